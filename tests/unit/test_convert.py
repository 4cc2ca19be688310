"""Converting drafts in older forks' key schemes, and results that appear whole or not at all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import gguf as library
import numpy as np
import pytest

from llama_dflash import gguf
from llama_dflash.cli import main
from llama_dflash.convert import convert, files, rewrite
from llama_dflash.errors import DFlashError, ModelFileError, PairingError, UsageError

Make = Callable[..., Path]
KINDS = library.GGUFValueType
ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "llama_dflash" / "models"
SMALL = {"DFlash": checkpoints.FACTS, "DFlash2": checkpoints.FACTS2}


def bytes_of(path: Path) -> dict[str, tuple[Any, list[int], bytes]]:
    """Type, shape and data of every tensor."""
    return {t.name: (t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in library.GGUFReader(path).tensors}


def metadata(path: Path) -> dict[str, Any]:
    return {k: f.contents() for k, f in library.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A small DFlash draft in pinned llama.cpp's scheme."""
    return checkpoints.write_draft(tmp_path / "draft.gguf", checkpoints.FACTS)


@pytest.fixture
def old(tmp_path: Path, draft: Path) -> Path:
    """The same in an older fork's, with a tokenizer."""
    return checkpoints.write_old(draft, tmp_path / "old.gguf", "dflash-draft")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The target of both."""
    return checkpoints.write_target(tmp_path / "target.gguf")


@pytest.fixture(autouse=True)
def nothing_half_written(tmp_path: Path) -> Iterator[None]:
    yield
    assert list(tmp_path.rglob("*.part")) == []


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command, which must fail with one line; returns the line without the prefix."""

    def run(exit_code: int, *args: str | Path) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["convert", *map(str, args)])
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines()), caught.value.code) == ("", 1, exit_code), err
        return err.removeprefix("llama-dflash: error: ").rstrip()

    return run


@pytest.mark.parametrize("arch", gguf.OLD_DRAFT_ARCHS)
@pytest.mark.parametrize("name", ["tiny-draft", "tiny-draft2"])
def test_an_older_file_becomes_the_draft_that_it_was_made_from(tmp_path: Path, arch: str, name: str) -> None:
    source, out = MODELS / f"{name}.gguf", tmp_path / "new.gguf"
    old = checkpoints.write_old(source, tmp_path / "old.gguf", arch)
    assert gguf.read(old).arch == arch
    result = convert(old, out, MODELS / "tiny-target.gguf")
    assert bytes_of(out) == bytes_of(source)
    assert metadata(out) == metadata(source) | ({"dflash.attention.causal": False} if arch == "dflash-draft" else {})
    assert (result.facts.draft_format, result.facts.target_layers) == (gguf.read(source).draft_format, [1, 3, 5, 7])
    assert result.notes == ()


def test_without_a_target_the_files_own_tokenizer_is_kept(tmp_path: Path, old: Path) -> None:
    result = convert(old, tmp_path / "new.gguf")
    assert result.facts.tokens == tuple("abcdefgh")
    assert "dflash.rope.dimension_sections" not in result.facts.fields
    assert "rotary sections are not set" in result.notes[0]


def test_a_file_without_tokenizer_takes_the_targets(tmp_path: Path, draft: Path, target: Path) -> None:
    old, out = checkpoints.write_old(draft, tmp_path / "old.gguf", "qwen35-dflash-draft"), tmp_path / "new.gguf"
    with pytest.raises(ModelFileError, match="has no tokenizer, expected the target's; name the target's GGUF file"):
        convert(old, out)
    assert not out.exists()
    convert(old, out, target)
    theirs = {k: v for k, v in metadata(target).items() if k.startswith("tokenizer.")}
    assert {k: v for k, v in metadata(out).items() if k.startswith("tokenizer.")} == theirs | {"tokenizer.ggml.mask_token_id": 7}
    assert metadata(out)["dflash.rope.dimension_sections"] == [8, 0, 0, 0]


def test_an_alignment_stays(tmp_path: Path, draft: Path) -> None:
    alignment = {"general.alignment": (128, KINDS.UINT32, None)}
    old = checkpoints.write_old(draft, tmp_path / "old.gguf", "dflash-draft", alignment)
    convert(old, tmp_path / "new.gguf")
    reader = library.GGUFReader(tmp_path / "new.gguf")
    assert (reader.alignment, {int(t.data_offset) % 128 for t in reader.tensors}) == (128, {0})
    assert bytes_of(tmp_path / "new.gguf") == bytes_of(draft)


def test_quantized_tensors_stay_as_they_are(tmp_path: Path, draft: Path) -> None:
    types = iter([library.GGMLQuantizationType[name] for name in ("Q8_0", "BF16", "Q4_0")])
    reader, source = library.GGUFReader(draft), tmp_path / "quantized.gguf"
    writer = library.GGUFWriter(source, "dflash")
    for key, v in rewrite.read_values(reader).items():
        writer.add_key_value(key, v.value, v.kind, v.item)
    for t in reader.tensors:
        kind = next(types, None) if t.data.ndim == 2 else None
        data = t.data if kind is None else library.quants.quantize(t.data.astype(np.float32), kind)
        writer.add_tensor(t.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(checkpoints.write_old(source, tmp_path / "old.gguf", "dflash-draft"), tmp_path / "new.gguf")
    assert bytes_of(tmp_path / "new.gguf") == bytes_of(source)
    assert len({kind for kind, *_ in bytes_of(source).values()}) == 5


def test_a_rope_base_that_is_not_the_targets_is_told(tmp_path: Path, draft: Path, target: Path) -> None:
    changes = {"dflash-draft.rope.freq_base": (1e6, KINDS.FLOAT32, None)}
    old = checkpoints.write_old(draft, tmp_path / "old.gguf", "dflash-draft", changes)
    result = convert(old, tmp_path / "new.gguf", target)
    assert result.facts.key("rope.freq_base") == 1e6
    assert "rope.freq_base is 1e+06, the target's is 1e+07" in result.notes[0]


# What is refused, by name.


def number(value: Any) -> tuple[Any, Any, Any]:
    return value, KINDS.UINT32, None


A = "dflash-draft."
REFUSED_KEYS = [
    ({A + "dflash.domino.enabled": number(1)}, "unclaimed keys: dflash-draft.dflash.domino.enabled"),
    (
        {"split.count": number(2), A + "dspark.markov_rank": number(4)},
        "unclaimed keys: dflash-draft.dspark.markov_rank, split.count",
    ),
    ({A + "rope.scaling.factor": (64.0, KINDS.FLOAT32, None)}, "rope.scaling.factor (without a type"),
    ({A + "attention.sliding_window": number(2048)}, "missing keys: dflash-draft.attention.sliding_window_pattern"),
    ({A + "dflash.target_layer_ids": None}, "missing keys: dflash-draft.dflash.target_layer_ids"),
    (
        {A + "dflash.mask_token_id": None, A + "dflash.block_size": None},
        "dflash-draft.dflash.block_size, dflash-draft.dflash.mask_",
    ),
    ({A + "dflash.target_layer_ids": ("1,3", KINDS.STRING, None)}, "target_layer_ids is '1,3', expected a list of layers"),
    ({A + "dflash.block_size": ("16", KINDS.STRING, None)}, "dflash.block_size is '16', expected a number"),
    ({A + "dflash.n_target_features": number(77)}, "dflash.n_target_features is 77, expected 64"),
    ({A + "dflash.n_target_layers": number(5)}, "dflash.n_target_layers is 5, expected 2"),
    ({"tokenizer.ggml.mask_token_id": number(3)}, "tokenizer.ggml.mask_token_id is 3, expected 7"),
    (
        {A + "attention.sliding_window": number(9), A + "attention.sliding_window_pattern": ([True], KINDS.ARRAY, KINDS.BOOL)},
        "attention.sliding_window_pattern is [True], expected a value for each of 2 layers",
    ),
]
REFUSED_TENSORS = [
    ({"dflash_fc.weight": "dflash.fc2.weight"}, "unclaimed tensors: dflash.fc2.weight; missing tensors: fc.weight"),
    ({"blk.1.attn_q_norm.weight": ""}, "missing tensors: blk.1.attn_q_norm.weight"),
    (
        {"blk.1.attn_q.weight": "blk.2.attn_q.weight"},
        "unclaimed tensors: blk.2.attn_q.weight; missing tensors: blk.1.attn_q.weight",
    ),
    ({"blk.1.attn_norm.weight": "blk.1.ffn_norm.weight"}, "blk.1.ffn_norm.weight and blk.1.post_attention_norm.weight are both"),
    ({"blk.1.ffn_up.weight": "dflash.domino.head.w1"}, "unclaimed tensors: dflash.domino.head.w1"),
    (
        {f"blk.{i}.attn_{k}.weight": f"x.{i}.{k}" for i in (0, 1) for k in ("q", "k", "v", "output", "norm")},
        "unclaimed tensors: x.0.k, x.0.norm, x.0.output, x.0.q, x.0.v, x.1.k, x.1.norm, x.1.output and 2 more",
    ),
]


@pytest.mark.parametrize(("keys", "expected"), REFUSED_KEYS, ids=[text[:40] for _, text in REFUSED_KEYS])
def test_keys_that_are_refused(tmp_path: Path, draft: Path, keys: dict[str, Any], expected: str) -> None:
    refused(tmp_path, checkpoints.write_old(draft, tmp_path / "old.gguf", "dflash-draft", keys), expected)


@pytest.mark.parametrize(("names", "expected"), REFUSED_TENSORS, ids=[text[:40] for _, text in REFUSED_TENSORS])
def test_tensors_that_are_refused(tmp_path: Path, draft: Path, names: dict[str, str], expected: str) -> None:
    refused(tmp_path, checkpoints.write_old(draft, tmp_path / "old.gguf", "dflash-draft", names=names), expected)


def refused(tmp_path: Path, old: Path, expected: str) -> None:
    with pytest.raises(ModelFileError, match="cannot be rewritten: ") as caught:
        convert(old, tmp_path / "new.gguf")
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "new.gguf").exists()


def test_a_dflash2_file_without_its_keys_is_refused(tmp_path: Path) -> None:
    draft = checkpoints.write_draft(tmp_path / "draft.gguf", checkpoints.FACTS2)
    keys = {f"{A}dflash2.{name}": None for name in ("selector_rank", "selector_top_k", "conv_group_size", "conv_taps")}
    old = checkpoints.write_old(draft, tmp_path / "old.gguf", "dflash-draft", keys)
    refused(tmp_path, old, "missing keys: dflash-draft.dflash2.conv_group_size, dflash-draft.dflash2.conv_taps")


def test_a_draft_for_another_target_is_refused(tmp_path: Path, old: Path) -> None:
    other = checkpoints.write_target(tmp_path / "other.gguf", n_embd=64)
    with pytest.raises(PairingError, match=r"new\.gguf does not fit other\.gguf: the draft reads 2 layers of width 32"):
        convert(old, tmp_path / "new.gguf", other)
    assert not (tmp_path / "new.gguf").exists()


def test_tables_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    draft = checkpoints.write_draft(tmp_path / "draft.gguf", checkpoints.FACTS2)
    old = checkpoints.write_old(draft, tmp_path / "old.gguf", "qwen35-dflash-draft")
    with pytest.raises(PairingError, match="selector_pred has 8 rows, expected the target's 9 tokens"):
        convert(old, tmp_path / "new.gguf", checkpoints.write_target(tmp_path / "other.gguf", n_tokens=9))


def test_other_sources(tmp_path: Path, draft: Path, target: Path, old: Path, fails: Callable[..., str]) -> None:
    out = tmp_path / "new.gguf"
    assert "has the key scheme of pinned llama.cpp already ('dflash')" in fails(1, draft, out)
    assert "is a 'qwen35' model, expected a draft in an older key scheme" in fails(1, target, out)
    assert "no such file" in fails(1, tmp_path / "missing.gguf", out)
    (tmp_path / "text").write_text("hello")
    assert "is not a GGUF file" in fails(1, tmp_path / "text", out)
    assert "--outtype is f16 but" in fails(2, old, out, "--outtype", "f16")
    assert "--target is the folder" in fails(2, old, out, "--target", tmp_path)
    assert "is a draft (architecture 'dflash'), expected a target model" in fails(1, old, out, "--target", draft)
    assert "the path is empty" in fails(2, "", out)
    assert not out.exists()


def test_outputs_that_cannot_be_meant(tmp_path: Path, target: Path, old: Path, fails: Callable[..., str]) -> None:
    assert "is a folder, expected a file to write" in fails(2, old, tmp_path)
    assert "is no folder, expected one to write to" in fails(2, old, tmp_path / "no" / "new.gguf")
    assert "exists, expected a new file" in fails(2, old, target)
    assert "would overwrite the source" in fails(2, old, old, "--force")
    assert "would overwrite the source" in fails(2, old, target, "--force", "--target", target)
    (tmp_path / "link.gguf").symlink_to(old)
    assert "would overwrite the source" in fails(2, old, tmp_path / "link.gguf", "--force")


def test_the_command(tmp_path: Path, old: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new.gguf"
    main(["convert", str(old), str(out), "--json"])
    text, err = capsys.readouterr()
    result = json.loads(text)
    assert (result["schema"], result["command"], result["path"], result["format"]) == (1, "convert", str(out), "DFlash")
    assert (result["target_layers"], result["size_bytes"]) == ([2, 4], out.stat().st_size)
    assert err == f"note: {result['notes'][0]}\n"
    main(["convert", str(old), str(out), "--force", "--target", str(target)])
    assert capsys.readouterr() == (f"{out}: DFlash draft, F16, 25 tensors, {out.stat().st_size} bytes\n", "")


# Whole or not at all.


def test_a_failure_while_writing_leaves_the_old_file(tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new.gguf"
    out.write_text("before")
    seen = []

    def broken(self: Any, tensor: Any) -> None:
        seen.append(len(list(tmp_path.glob(".*.part"))))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(library.GGUFWriter, "write_tensor_data", broken)
    with pytest.raises(OSError, match="No space left"):
        convert(old, out, force=True)
    assert (seen, out.read_text()) == ([1], "before")


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, write = tmp_path / "new.gguf", rewrite.write
    monkeypatch.setattr(rewrite, "write", lambda *args: (write(*args), out.write_text("theirs")))
    with pytest.raises(UsageError, match="appeared meanwhile"):
        convert(old, out)
    assert out.read_text() == "theirs"


def test_too_little_room(tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": old.stat().st_size - 1})())
    with pytest.raises(DFlashError, match=r"has 0\.0 GB free, expected 0\.0 GB for new\.gguf"):
        convert(old, tmp_path / "new.gguf")


STALL = """
import sys, time
import gguf
gguf.GGUFWriter.write_tensor_data = lambda *args: (print("writing", flush=True), time.sleep(60))
from llama_dflash.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_remove_the_file(tmp_path: Path, old: Path, signum: signal.Signals) -> None:
    command = [sys.executable, "-c", STALL, "convert", str(old), str(tmp_path / "new.gguf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert len(list(tmp_path.glob(".*.part"))) == 1
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
    # click ends the line of Ctrl-C.
    assert (process.returncode, err.strip()) == (128 + signum, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft.gguf", "old.gguf"]
