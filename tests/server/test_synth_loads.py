"""Random-weight files in llama.cpp: every architecture and mix loads and generates, pairs draft in trees."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llama_dflash import synth
from llama_dflash.builds import Build
from llama_dflash.cli import cli
from llama_dflash.client import Sampling
from llama_dflash.server import Server
from llama_dflash.shapes import Attention, DeltaNet, DraftShape, Experts, Selector, TargetShape, layout, mixes
from llama_dflash.spec import RunConfig

TARGET = TargetShape("small", 4, 256, 512, Attention(4, 2, 64), DeltaNet(2, 4, 64), "made up", n_vocab=1024, n_ctx_train=2048)
TARGETS = {
    "dense": TARGET,
    "tied": replace(TARGET, tied=True),
    "experts": replace(TARGET, experts=Experts(8, 2, 256, 256)),
}
DFLASH = DraftShape(
    "small-dflash", "small", 2, 256, 512, Attention(4, 2, 64), (1, 2, 3), "made up", n_vocab=1024, mask_token_id=1000, n_ctx_train=2048
)  # fmt: skip
DRAFTS = {"dflash": DFLASH, "dflash2": replace(DFLASH, block_size=8, window=512, selector=Selector(rank=256, top_k=15))}


def generate(build: Build, config: RunConfig, n_predict: int = 24) -> tuple[dict[str, Any], Any]:
    """The effective mode of a server, and its greedy answer."""
    with Server(build, config.checked(), extra=("-t", "1", "-c", "1024", "-np", "1")) as server:
        answer = server.client.complete("hello world", n_predict, Sampling(), ignore_eos=True)
        return server.client.effective_mode(), answer


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("quant", ["q4_k_m", "f16"])
def test_targets_generate(exact: Build, tmp_path: Path, kind: str, quant: str) -> None:
    path = tmp_path / "t.gguf"
    synth.write(layout.of(TARGETS[kind], quant), path)
    _, answer = generate(exact, RunConfig(path))
    assert len(answer.tokens) == 24
    assert len(set(answer.tokens)) > 4  # logits that are not finite, or all equal, give one token again and again


@pytest.mark.parametrize("quant", [q for q in mixes.MIXES if q not in ("q4_k_m", "f16")])
def test_the_other_mixes_generate(exact: Build, tmp_path: Path, quant: str) -> None:
    path = tmp_path / "t.gguf"
    synth.write(layout.of(TARGET, quant), path)
    _, answer = generate(exact, RunConfig(path))
    assert len(set(answer.tokens)) > 4


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_pairs_draft_in_trees(exact: Build, tmp_path: Path, kind: str, draft: str) -> None:
    paths = tmp_path / "t.gguf", tmp_path / "d.gguf"
    synth.write(layout.of(TARGETS[kind], "q4_k_m"), paths[0])
    synth.write(layout.of(DRAFTS[draft], "q8_0"), paths[1])
    _, plain = generate(exact, RunConfig(paths[0]))
    mode, drafted = generate(exact, RunConfig(*paths, budget=15))
    assert mode["mode"] == "tree"
    assert drafted.timings["draft_n"] > 0
    assert drafted.tokens == plain.tokens


def test_the_real_08b(exact: Build, tmp_path: Path) -> None:
    path = tmp_path / "qwen3.5-0.8b.gguf"
    result = CliRunner().invoke(cli, ["synth", "qwen3.5-0.8b", str(path)])
    try:
        assert result.exit_code == 0, result.output
        assert 515e6 < path.stat().st_size < 530e6
        with Server(exact, RunConfig(path).checked(), extra=("-t", "1", "-c", "512", "-np", "1", "--no-warmup")) as server:
            request = {"prompt": "hello", "n_predict": 3, "temperature": 0, "n_probs": 5}
            answer = server.client.post("/completion", request)
        probs = [p["logprob"] for token in answer["completion_probabilities"] for p in token["top_logprobs"]]
        assert len(probs) == 15
        assert all(math.isfinite(p) and p < 0 for p in probs)
        assert answer["content"].isascii()
    finally:
        path.unlink(missing_ok=True)
