"""Layouts of full shapes without writing them, and small files of random weights."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from llama_dflash import gguf, shapes, synth
from llama_dflash.cli import cli
from llama_dflash.errors import DFlashError, UsageError
from llama_dflash.shapes import Attention, DeltaNet, Experts, layout, mixes

GIB = 2**30
# Published sizes of real files (their vocabulary is about 11 MB larger than ours).
REAL_BYTES = {
    ("qwen3.5-0.8b", "q8_0"): 812e6,  # unsloth, ggml-org/Llama-macOS#63, and the next four
    ("qwen3.5-4b", "q8_0"): 4.5e9,
    ("qwen3.5-9b", "q8_0"): 9.5e9,
    ("qwen3.5-27b", "q8_0"): 28.6e9,
    ("qwen3.5-35b-a3b", "q8_0"): 36.9e9,
    ("qwen3.5-27b", "q4_k_m"): 15.401 * GIB,  # mradermacher Qwen3.6-27B.i1-Q4_K_M, as sokann's model card gives it
    ("qwen3.5-4b", "q6_k"): 3.5e9,  # steampunque's model card
    ("qwen3.5-9b", "q4_k_m"): 5.6e9,  # the same
    ("qwen3.5-27b-dflash", "f16"): 3.46e9,  # z-lab's in BF16, design notes
    ("qwen3.5-27b-dflash", "q8_0"): 1.84e9,
    ("qwen3.5-27b-dflash", "q4_k_m"): 1.03e9,  # spiritbuun/Qwen3.6-27B-DFlash-GGUF
    ("qwen3.5-27b-dflash2", "f16"): 3.85e9,  # z-lab's in BF16
}
TINY = shapes.TargetShape(
    "tiny", 4, 256, 512, Attention(4, 2, 64), DeltaNet(2, 4, 64), "made up", tied=True, n_vocab=1024, n_ctx_train=2048
)


@pytest.mark.parametrize(("shape", "quant"), REAL_BYTES)
def test_file_sizes_are_those_of_real_files(shape: str, quant: str) -> None:
    assert layout.of(shapes.find(shape), quant).n_bytes == pytest.approx(REAL_BYTES[shape, quant], rel=0.03)


@pytest.mark.parametrize(
    ("shape", "n_params"),
    [("qwen3.5-0.8b", 0.752e9), ("qwen3.5-4b", 4.21e9), ("qwen3.5-9b", 8.95e9), ("qwen3.5-27b", 26.896e9),
     ("qwen3.5-35b-a3b", 34.66e9), ("qwen3.5-27b-dflash2", 1.924e9)],
)  # fmt: skip
def test_numbers_of_weights(shape: str, n_params: float) -> None:
    assert layout.of(shapes.find(shape), "q4_k_m").n_params == pytest.approx(n_params, rel=0.002)


@pytest.mark.parametrize("shape", shapes.SHAPES.values(), ids=lambda s: s.name)
def test_every_shape_has_a_source_and_distinct_tensors(shape: shapes.TargetShape | shapes.DraftShape) -> None:
    made = layout.of(shape, "q4_k_m")
    assert shape.source
    assert len({t.name for t in made.tensors}) == len(made.tensors)
    for t in made.tensors:
        assert t.shape[0] % mixes.BLOCKS[t.kind].n_values == 0


def test_tensors_and_keys_of_the_27b() -> None:
    made = layout.of(shapes.find("qwen3.5-27b"), "q4_k_m")
    kinds = {t.name: (t.kind, t.shape) for t in made.tensors}
    assert len(kinds) == 851
    assert kinds["output.weight"] == ("Q6_K", (5120, 248320))
    assert kinds["token_embd.weight"] == ("Q4_K", (5120, 248320))
    assert kinds["blk.0.attn_qkv.weight"] == ("Q6_K", (5120, 10240))
    assert kinds["blk.8.attn_qkv.weight"][0] == "Q4_K"
    assert kinds["blk.10.ffn_down.weight"] == ("Q6_K", (17408, 5120))
    assert kinds["blk.3.attn_q.weight"] == ("Q4_K", (5120, 12288))
    assert kinds["blk.3.attn_q_norm.weight"] == ("F32", (256,))
    assert made.facts.key("ssm.inner_size") == 6144
    assert made.facts.n_layer == 64


def test_a_draft_fits_its_target() -> None:
    for draft in shapes.DRAFTS:
        facts = [layout.of(shapes.find(name), "q8_0").facts for name in (draft.target, draft.name)]
        assert gguf.pairing_problems(*facts) == []
        assert facts[1].draft_format == ("DFlash2" if draft.selector else "DFlash")


@pytest.mark.parametrize("quant", mixes.MIXES)
def test_a_small_file_is_what_its_layout_says(tmp_path: Path, quant: str) -> None:
    made = layout.of(replace(TINY, experts=Experts(4, 2, 256, 256)), quant)
    out = tmp_path / "a.gguf"
    assert synth.write(made, out) == out.stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]
    read = GGUFReader(out)
    assert {t.name: (t.tensor_type.name, tuple(int(n) for n in t.shape)) for t in read.tensors} == {
        t.name: (t.kind, t.shape) for t in made.tensors
    }
    facts = gguf.read(out)
    assert facts.n_vocab == 1024
    assert len(set(facts.tokens)) == 1024


@pytest.mark.parametrize("kind", [k for k in mixes.BLOCKS if k not in ("F32", "BF16")])
def test_values_have_the_deviation_that_is_asked_for(kind: str) -> None:
    tensor = layout.Tensor("x.weight", (1024, 512), kind, gain=2.0)
    data = np.frombuffer(b"".join(synth._chunks(tensor, 1)), np.uint8)
    values = data.view(np.float16).astype(np.float32) if kind == "F16" else dequantize(data, GGMLQuantizationType[kind])
    wanted = 2.0 / 1024**0.5
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(wanted, rel=0.03)
    assert abs(values.mean()) < 0.06 * wanted  # formats without a minimum reach one step further down than up


def test_the_seed_decides(tmp_path: Path) -> None:
    made = layout.of(TINY, "q4_k_m")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synth.write(made, tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = layout.of(TINY, "q4_k_m")
    out = tmp_path / "a.gguf"
    out.write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists, expected a new file"):
        synth.write(made, out)
    assert out.read_bytes() == b"mine"
    with pytest.raises(UsageError, match="is a folder"):
        synth.write(made, tmp_path)
    with pytest.raises(UsageError, match="is no folder"):
        synth.write(made, tmp_path / "no" / "a.gguf")
    monkeypatch.setattr(synth, "SPARE_BYTES", 10**18)
    with pytest.raises(DFlashError, match="GB free, expected"):
        synth.write(made, out, force=True)
    assert out.read_bytes() == b"mine"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def stop(n_bytes: int) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "a.gguf"
    out.write_bytes(b"mine")
    with pytest.raises(KeyboardInterrupt):
        synth.write(layout.of(TINY, "q4_k_m"), out, force=True, on_bytes=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]
    assert out.read_bytes() == b"mine"


def test_layers_shrink_target_and_draft_alike(tmp_path: Path) -> None:
    target = shapes.find_target("qwen3.5-27b").shrunk(8)
    draft = shapes.find("qwen3.5-27b-dflash").shrunk(8)
    assert gguf.pairing_problems(layout.of(target, "q4_k_m").facts, layout.of(draft, "q4_k_m").facts) == []
    with pytest.raises(UsageError, match="expected a multiple of 4"):
        target.shrunk(6)
    result = CliRunner().invoke(cli, ["synth", "qwen3.5-0.8b-dflash", str(tmp_path / "d.gguf"), "--layers", "5"])
    assert isinstance(result.exception, UsageError)


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match=re.escape("shape 'x' is unknown")):
        shapes.find("x")
    with pytest.raises(UsageError, match="quant 'x' is unknown"):
        mixes.find_mix("x")
    with pytest.raises(UsageError, match="expected a target's"):
        shapes.find_target("qwen3.5-4b-dflash")
