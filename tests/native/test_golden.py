"""llama.cpp against PyTorch on the tiny pair: target logits, tapped layer inputs, draft block, accepted drafts of every draft.

The vectors come from scripts/train_tiny/golden.py, which documents them; torch is not needed here.
Each comparison has a negative control: the same check must fail on vectors that are nearly right.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from llama_dflash.builds import Build
from llama_dflash.client import Sampling
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "llama_dflash" / "models"
PROMPTS = ("short", "middle", "long")
# Every row must be closer than this. Measured: 0.999999 or better, what is left is llama.cpp rounding activations to F16.
COSINE_MIN = 0.9999

Arrays: TypeAlias = Mapping[str, np.ndarray]
Run: TypeAlias = Callable[..., Arrays]


@pytest.fixture(scope="module")
def golden() -> Arrays:
    with np.load(ROOT / "tests" / "golden" / "tiny_pair.npz") as f:
        return dict(f)


@pytest.fixture(scope="module")
def meta(golden: Arrays) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(golden["meta"]))
    return found


@pytest.fixture(scope="module")
def run(probe: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the probe on ids and n_max; equal calls share one run."""
    seen: dict[tuple[object, ...], Arrays] = {}

    def run_probe(ids: np.ndarray, n_max: int, draft: Path = MODELS / "tiny-draft.gguf") -> Arrays:
        key = (draft, n_max, *map(int, ids))
        if key not in seen:
            out = tmp_path_factory.mktemp("probe")
            target = MODELS / "tiny-target.gguf"
            command = [str(probe), "golden", str(target), str(draft), str(n_max), str(out), *map(str, ids)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            seen[key] = {path.stem: np.load(path) for path in out.glob("*.npy")}
        return seen[key]

    return run_probe


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine along the last axis, after removing the mean: a common offset of all logits must not hide a difference."""
    assert a.shape == b.shape
    a, b = (x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64) for x in (a, b))
    close: np.ndarray = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    return close


def taps_of(arrays: Arrays, n_taps: int) -> np.ndarray:
    """The probe's taps as `[n, n_taps, n_embd]`."""
    return arrays["taps"].reshape(len(arrays["taps"]), n_taps, -1)


def test_vectors_belong_to_the_committed_models(meta: dict[str, Any]) -> None:
    for name in ("tiny-target.gguf", "tiny-draft.gguf", "tiny-draft2.gguf"):
        digest = hashlib.sha256((MODELS / name).read_bytes()).hexdigest()
        assert digest == meta["sha256"][name], f"{name} changed: run scripts/train_tiny/golden.py on its weights"


@pytest.mark.parametrize("name", PROMPTS)
def test_target_logits(golden: Arrays, run: Run, name: str) -> None:
    logits, rows = run(golden[f"{name}_ids"], 15)["logits"], golden[f"{name}_rows"]
    assert len(logits) == len(golden[f"{name}_ids"]) - 1
    assert cosine(logits[rows], golden[f"{name}_logits"]).min() > COSINE_MIN
    np.testing.assert_array_equal(logits.argmax(-1), golden[f"{name}_top1"])  # at every token, stored row or not


@pytest.mark.parametrize("name", PROMPTS)
def test_taps(golden: Arrays, meta: dict[str, Any], run: Run, name: str) -> None:
    arrays, layers = run(golden[f"{name}_ids"], 15), meta["target_layers"]
    assert arrays["tap_layers"].tolist() == layers
    close = cosine(taps_of(arrays, len(layers)), golden[f"{name}_taps"])
    assert close.shape == (len(golden[f"{name}_ids"]) - 1, len(layers))
    assert close.min() > COSINE_MIN


def test_taps_are_on_the_right_layers(golden: Arrays, meta: dict[str, Any], run: Run) -> None:
    """Every token of every tap matches its own layer and no other of the nine, neighbours included."""
    taps = taps_of(run(golden["middle_ids"], 15), len(meta["target_layers"]))
    inputs = golden["middle_layers"]
    for k, layer in enumerate(meta["target_layers"]):
        close = np.stack([cosine(taps[:, k], inputs[:, i]) for i in range(inputs.shape[1])], axis=1)
        assert (close.argmax(1) == layer).all()
        others = np.delete(close, layer, axis=1)
        assert others.max() < COSINE_MIN, f"tap {layer} also passes as another layer: the threshold tells nothing"
        assert close[:, [layer - 1, layer + 1]].max() < 0.99  # measured: 0.951 at most


def test_a_draft_that_taps_one_layer_too_early_fails(golden: Arrays, meta: dict[str, Any], run: Run, tmp_path: Path) -> None:
    """Negative control through the whole path: the same draft with [0, 2, 4, 6] in its metadata."""
    key = b"dflash.target_layers"
    data = (MODELS / "tiny-draft.gguf").read_bytes()
    layers = np.array(meta["target_layers"], "<i4")
    at = data.index(key) + len(key) + 4 + 4 + 8  # behind the key: type, element type, length
    assert data[at : at + layers.nbytes] == layers.tobytes()
    early = tmp_path / "early.gguf"
    early.write_bytes(data[:at] + (layers - 1).tobytes() + data[at + layers.nbytes :])

    arrays = run(golden["middle_ids"], 15, early)
    taps = taps_of(arrays, len(layers))
    assert cosine(taps, golden["middle_layers"][:, layers - 1]).min() > COSINE_MIN  # it did tap those
    assert cosine(taps, golden["middle_taps"]).max() < COSINE_MIN
    assert cosine(arrays["block_logits"], golden["middle_block_logits"]).max() < COSINE_MIN


@pytest.mark.parametrize("name", PROMPTS)
def test_draft_block(golden: Arrays, meta: dict[str, Any], run: Run, name: str) -> None:
    ids = golden[f"{name}_ids"]
    arrays = run(ids, 15)
    assert arrays["block_ids"].tolist() == [int(ids[-1])] + [meta["mask_id"]] * 15
    logits = arrays["block_logits"]
    assert cosine(logits, golden[f"{name}_block_logits"]).min() > COSINE_MIN
    np.testing.assert_array_equal(logits.argmax(-1)[1:], golden[f"{name}_block_top1"][1:])
    np.testing.assert_array_equal(arrays["draft"], logits.argmax(-1)[1:])  # the anchor's own position drafts nothing


def test_draft_block_of_n_max_7(golden: Arrays, meta: dict[str, Any], run: Run) -> None:
    """n_max 7 shortens the block itself: one anchor and seven masks, and logits of their own."""
    ids = golden["short_ids"]
    arrays = run(ids, 7)
    assert arrays["block_ids"].tolist() == [int(ids[-1])] + [meta["mask_id"]] * 7
    logits = arrays["block_logits"]
    assert cosine(logits, golden["short_block8_logits"]).min() > COSINE_MIN
    np.testing.assert_array_equal(logits.argmax(-1)[1:], golden["short_block8_top1"][1:])
    np.testing.assert_array_equal(arrays["draft"], logits.argmax(-1)[1:])
    assert cosine(logits, golden["short_block_logits"][:8]).max() < COSINE_MIN  # not the long block cut off


def test_another_context_fails_the_threshold(golden: Arrays, run: Run) -> None:
    """Negative control of the logits: no row of another prompt, or of a context shifted by one token, passes."""
    for name in PROMPTS:
        logits = run(golden[f"{name}_ids"], 15)["block_logits"]
        for other in set(PROMPTS) - {name}:
            assert cosine(logits[1:], golden[f"{other}_block_logits"][1:]).max() < COSINE_MIN
    shifted = run(golden["middle_ids"][1:], 15)
    assert shifted["block_ids"].tolist() == run(golden["middle_ids"], 15)["block_ids"].tolist()
    assert cosine(shifted["block_logits"], golden["middle_block_logits"]).max() < COSINE_MIN
    rows = golden["middle_rows"][1:]
    assert cosine(shifted["logits"][rows - 1], golden["middle_logits"][1:]).min() < COSINE_MIN


def test_a_missing_context_token_fails_the_threshold(golden: Arrays, run: Run) -> None:
    """Negative control of the injected features: without the token before the anchor the first drafts fail."""
    ids = np.delete(golden["middle_ids"], -2)
    close = cosine(run(ids, 15)["block_logits"], golden["middle_block_logits"])
    assert close[1:5].max() < COSINE_MIN


DRAFTS = {
    "dflash": ("-md", str(MODELS / "tiny-draft.gguf"), "--spec-type", "draft-dflash", "--spec-draft-n-max", "15"),
    "dflash2": ("-md", str(MODELS / "tiny-draft2.gguf"), "--spec-type", "draft-dflash", "--spec-draft-n-max", "15"),
    "mtp": ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3"),
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_accepted_drafts(golden: Arrays, exact: Build, draft: str) -> None:
    """Greedy text, rounds, and how often every slot was accepted, as PyTorch counts them."""
    flags = ("-np", "1", "-c", "2048", "-fa", "on", *DRAFTS[draft])
    with Server(exact, RunConfig(MODELS / "tiny-target.gguf"), extra=flags) as server:
        for name in PROMPTS:
            text, accepted = golden[f"{name}_greedy"], golden[f"{name}_{draft}_accepted"]
            done = server.client.complete(golden[f"{name}_ids"].tolist(), len(text), Sampling(0.0), ignore_eos=True)
            assert done.tokens == text.tolist()
            assert done.timings["draft_n_accepted"] == accepted.sum()
            assert len(text) - 1 == accepted.sum() + len(accepted)
            per_slot = done.timings["draft_n_accepted_per_pos"]
            expected = [int((accepted > k).sum()) for k in range(accepted.max())]
            assert per_slot[: len(expected)] == expected
            assert not any(per_slot[len(expected) :])


def test_accepted_drafts_tell_drafts_apart(golden: Arrays) -> None:
    """Negative control: the drafts accept differently on every prompt, so that one cannot pass for another."""
    for name in PROMPTS:
        counts = {tuple(golden[f"{name}_{draft}_accepted"].tolist()) for draft in DRAFTS}
        assert len(counts) == len(DRAFTS)
