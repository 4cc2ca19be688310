"""Converted drafts in the exact build: the pinned converter's and the rewritten ones draft as the draft that they were made from.

Converting a checkpoint needs torch and transformers; without them those tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import gguf as library
import numpy as np
import pytest

from llama_dflash.bench import cases
from llama_dflash.bench.run import Job, run_pass
from llama_dflash.builds import Build
from llama_dflash.client import Sampling
from llama_dflash.convert import convert, pinned
from llama_dflash.spec import RunConfig

MODELS = Path(__file__).resolve().parents[2] / "llama_dflash" / "models"
TARGET = MODELS / "tiny-target.gguf"
DRAFTS = ["tiny-draft", "tiny-draft2"]
MISSING = [name for name in pinned.PACKAGES if importlib.util.find_spec(name) is None]
needs_torch = pytest.mark.skipif(bool(MISSING), reason=f"the pinned converter needs {' and '.join(MISSING)}")


def tensors_of(path: Path) -> dict[str, tuple[Any, list[int], bytes]]:
    """Type, shape and data of every tensor."""
    return {t.name: (t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in library.GGUFReader(path).tensors}


def keys_of(path: Path) -> dict[str, Any]:
    return {k: f.contents() for k, f in library.GGUFReader(path).fields.items() if k.startswith(("dflash.", "tokenizer."))}


@pytest.fixture(scope="module")
def drafted(exact: Build) -> Callable[[Path], list[Any]]:
    """Tokens, rounds, and drafted and accepted tokens of three prompts."""

    def run(draft: Path) -> list[Any]:
        job = Job(cases.load("tests", 3), 32, Sampling(), server_flags=("-t", "1"))
        done = run_pass(exact, RunConfig(TARGET, draft, 7).checked(), job).completions
        assert sum(c.timings["draft_n_accepted"] for c in done) > 30
        return [(c.tokens, *(c.timings[k] for k in ("rounds", "draft_n", "draft_n_accepted_per_pos"))) for c in done]

    return run


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("arch", ["dflash-draft", "qwen35-dflash-draft"])
def test_a_rewritten_draft_drafts_the_same(tmp_path: Path, drafted: Callable[[Path], list[Any]], name: str, arch: str) -> None:
    source, out = MODELS / f"{name}.gguf", tmp_path / "new.gguf"
    convert(checkpoints.write_old(source, tmp_path / "old.gguf", arch), out, TARGET)
    assert drafted(out) == drafted(source)


@needs_torch
@pytest.mark.parametrize(("name", "rope_layout", "n_parts"), [("tiny-draft", "top", 2), ("tiny-draft2", "parameters", 1)])
def test_a_draft_from_its_checkpoint_is_the_same(
    tmp_path: Path, drafted: Callable[[Path], list[Any]], name: str, rope_layout: str, n_parts: int
) -> None:
    source, out = MODELS / f"{name}.gguf", tmp_path / "new.gguf"
    folder = checkpoints.write_checkpoint(source, tmp_path / "Tiny-DFlash", rope_layout, n_parts)
    convert(folder, out, TARGET, "f16")
    assert tensors_of(out) == tensors_of(source)
    theirs = keys_of(source)
    assert {k: v for k, v in keys_of(out).items() if k in theirs} == {k: v for k, v in theirs.items() if k in keys_of(out)}
    assert theirs.keys() - keys_of(out).keys() == {"dflash.vocab_size", "dflash.rope.dimension_count"}
    assert drafted(out) == drafted(source)


@needs_torch
@pytest.mark.parametrize("rope_layout", ["scaling", "typed"])
def test_the_converter_gets_every_rope_layout(tmp_path: Path, rope_layout: str) -> None:
    # A base that is no reader's default, and bfloat16 weights, which are kept without --outtype.
    facts = checkpoints.FACTS | {"rope.freq_base": 12345.0}
    folder = tmp_path / "Tiny-DFlash"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(checkpoints.config(facts, rope_layout)))
    random = np.random.default_rng(0)
    halves = {k: random.standard_normal(s).astype(np.float32).view(np.uint32) >> 16 for k, s in checkpoints.shapes(facts).items()}
    checkpoints.write_safetensors(folder / "model.safetensors", {k: v.astype(np.uint16) for k, v in halves.items()})
    target = tmp_path / "target"
    target.mkdir()
    # The converter takes a target's folder too; one without a tokenizer will do here.
    config = {"architectures": [pinned.NO_TOKENIZER], "hidden_size": 32, "num_hidden_layers": 6}
    (target / "config.json").write_text(json.dumps(config))
    done = convert(folder, tmp_path / "new.gguf", target)
    assert (done.facts.key("rope.freq_base"), done.facts.quant, done.facts.target_layers) == (12345.0, "BF16", [2, 4])
    assert done.facts.key("rope.dimension_sections") is None
    fc = tensors_of(tmp_path / "new.gguf")["fc.weight"]
    assert fc[2] == halves["fc.weight"].astype(np.uint16).tobytes()
