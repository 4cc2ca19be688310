"""Facts from GGUF headers, refusals of unusable files, and pairing."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_dflash import gguf
from llama_dflash.errors import ModelFileError, PairingError

Make = Callable[..., Path]


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        gguf.read(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe", "qwen3next"])
def test_facts_of_a_target(make_target: Make, arch: str) -> None:
    path = make_target(arch=arch, context_length=512)
    facts = gguf.read(path)
    assert (facts.arch, facts.name, facts.quant, facts.is_draft) == (arch, "t", "F16", False)
    assert (facts.n_layer, facts.n_embd, facts.n_vocab, facts.key("context_length")) == (6, 32, 8, 512)
    assert (facts.block_size, facts.target_layers, facts.draft_format) == (0, [], "")
    assert facts.tokens == tuple("abcdefgh")
    assert facts.tensors["blk.3.attn_v.weight"] == (32, 8)
    assert facts.size_bytes == path.stat().st_size
    assert facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert facts.summary == {"name": "t", "arch": arch, "quant": "F16", "sha256": facts.sha256}
    assert facts.require_target() is facts


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [(None, "DFlash"), ("selector_hidden.weight", "DFlash2"), ("markov_w1.weight", "DSpark")],
)
def test_facts_of_a_draft(make_draft: Make, tensor: str | None, expected: str) -> None:
    facts = gguf.read(make_draft(shapes={tensor: (32, 4)} if tensor else None))
    assert facts.draft_format == expected
    assert (facts.is_draft, facts.block_size, facts.target_layers, facts.name) == (True, 8, [1, 3, 5], "draft")
    assert facts.require_draft() is facts


def test_block_size_of_a_target_is_zero_whatever_its_keys_say(make_target: Make) -> None:
    assert gguf.read(make_target(block_size=16)).block_size == 0


def test_n_vocab_without_a_token_list_comes_from_its_key(make_gguf: Make) -> None:
    assert gguf.read(make_gguf("x.gguf", "qwen35", {"vocab_size": 77}, {"a.weight": (4,)})).n_vocab == 77


def test_quant_is_the_type_of_most_bytes(pair: tuple[Path, Path]) -> None:
    # Both files hold more F32 tensors than F16 ones, but those are norms.
    assert [gguf.read(path).quant for path in pair] == ["F16", "F16"]


def test_a_file_without_tensors_has_no_quant(make_gguf: Make) -> None:
    assert gguf.read(make_gguf("vocab.gguf", "qwen35", {}, {})).quant == "none"


def test_refuses_what_is_no_file(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "missing.gguf")
    assert "is a folder" in refusal(tmp_path)
    (tmp_path / "file").write_bytes(b"GGUF")
    assert "no such file" in refusal(tmp_path / "file" / "below.gguf")
    assert "File name too long" in refusal(tmp_path / ("x" * 300))


def test_refuses_a_pipe_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    # Held open and filled, so that a reader of it fails this test instead of waiting.
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(pipe, b"GGUF" * 16)
    try:
        assert "no regular file" in refusal(tmp_path / "pipe")
    finally:
        os.close(pipe)


def test_refuses_an_unreadable_file() -> None:
    # Unreadable for root too: the first page of a process is not mapped.
    assert "cannot be read (Input/output error)" in refusal(Path("/proc/self/mem"))


@pytest.mark.parametrize("content", [b"", b"G", b"hello world", b"\x00" * 64, b"FUGG" + b"\x00" * 64])
def test_refuses_what_is_not_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path} is not a GGUF file: it starts with {content[:4]!r}")


# Header, key-value pairs, the token list, tensor headers, tensor data; from the end where negative.
@pytest.mark.parametrize(
    "cut", [4, 7, 8, 12, 16, 24, 25, 40, 100, 1000, 5000, 20_000, 60_000, 134_000, 136_000, 2_000_000, -32, -1]
)
def test_refuses_a_truncated_file(tmp_path: Path, pair: tuple[Path, Path], cut: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(pair[1].read_bytes()[:cut])
    size = path.stat().st_size
    message = refusal(path)
    assert message.startswith(f"{path} is ")
    assert "truncated" in message
    assert str(size) in message


def test_refuses_a_damaged_array_length(make_target: Make, tmp_path: Path) -> None:
    # The reader of the gguf package goes on forever on this one: the rest of the file is a whole number of values.
    content = bytearray(make_target(things=[1, 2, 3]).read_bytes())
    at = content.index(b"qwen35.things") + len("qwen35.things") + 4 + 4
    assert struct.unpack_from("<Q", content, at) == (3,)
    struct.pack_into("<Q", content, at, 1 << 40)
    path = tmp_path / "damaged.gguf"
    for n_pad in range(4):
        path.write_bytes(content + bytes(n_pad))
        assert "damaged" in refusal(path)


@pytest.mark.parametrize("at", [4, 8, 16, 24])
@pytest.mark.parametrize("value", [0xFF, 0x7F])
def test_a_damaged_header_is_never_another_error(make_draft: Make, at: int, value: int) -> None:
    path = make_draft()
    content = bytearray(path.read_bytes())
    content[at : at + 4] = bytes([value] * 4)
    path.write_bytes(content)
    assert "damaged" in refusal(path)


def test_refuses_a_file_without_architecture(make_gguf: Make) -> None:
    assert "general.architecture is None, expected a name" in refusal(make_gguf("x.gguf", None, {"general.name": "x"}, {}))


def test_a_draft_is_refused_as_target(make_draft: Make) -> None:
    with pytest.raises(ModelFileError, match=r"is a draft \(architecture 'dflash'\), expected a target") as caught:
        gguf.read(make_draft()).require_target()
    assert "-md" in caught.value.hint


def test_a_target_is_refused_as_draft(make_target: Make) -> None:
    with pytest.raises(ModelFileError, match="is a 'qwen35' model, expected a draft"):
        gguf.read(make_target()).require_draft()


@pytest.mark.parametrize("arch", gguf.OLD_DRAFT_ARCHS)
def test_old_key_schemes_are_drafts_but_refused(make_draft: Make, arch: str) -> None:
    facts = gguf.read(make_draft(arch=arch))
    assert facts.is_draft
    with pytest.raises(ModelFileError, match="older key scheme") as caught:
        facts.require_draft()
    assert "convert" in caught.value.hint
    with pytest.raises(ModelFileError, match="expected a target"):
        facts.require_target()


def test_a_fitting_pair(make_target: Make, make_draft: Make) -> None:
    target, draft = gguf.read(make_target()), gguf.read(make_draft())
    assert gguf.pairing_problems(target, draft) == []
    gguf.check_pair(target, draft)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"block_size": None}, "the draft lacks the key dflash.block_size"),
        ({"target_layers": None}, "the draft lacks the key dflash.target_layers"),
        ({"tokenizer.ggml.mask_token_id": None}, "the draft lacks the key tokenizer.ggml.mask_token_id"),
        ({"shapes": {"fc.weight": None}}, "the draft has no tensor fc.weight"),
        ({"shapes": {"fc.weight": (192, 32)}}, "the draft reads 3 layers of width 64, the target's hidden size is 32"),
        ({"embedding_length": 64}, "the draft shares the target's embedding but has hidden size 64, the target 32"),
        ({"target_layers": [1, 3, 6]}, "the draft reads layers [6], the target has 6 layers"),
        ({"tokens": list("abcXefgh")}, "the vocabularies differ: token 3 is 'd' in the target and 'X' in the draft"),
        ({"tokens": list("abcdefgh") + ["<pad>"] * 513}, "the vocabularies differ in size by 513 tokens"),
    ],
)
def test_each_reason_against_a_pair(make_target: Make, make_draft: Make, changes: dict, problem: str) -> None:
    target, draft = gguf.read(make_target()), gguf.read(make_draft(**changes))
    assert gguf.pairing_problems(target, draft) == [problem]
    with pytest.raises(PairingError) as caught:
        gguf.check_pair(target, draft)
    assert str(caught.value).startswith(f"draft.gguf does not fit target.gguf: {problem}")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.mask_token_id": 0},
        {"tokens": list("abcdefgh") + ["<pad>"] * 512},
        {"tokens": list("abcdef")},
        {"tokens": []},
        {"embedding_length": 64, "shapes": {"token_embd.weight": (64, 8)}},
        {"target_layers": [0, 3, 5]},
    ],
    ids=["mask token 0", "padded", "shorter", "no tokens", "own embedding", "first layer"],
)
def test_differences_that_are_allowed(make_target: Make, make_draft: Make, changes: dict) -> None:
    assert gguf.pairing_problems(gguf.read(make_target()), gguf.read(make_draft(**changes))) == []


def test_all_reasons_are_listed(make_target: Make, make_draft: Make) -> None:
    draft = gguf.read(make_draft(target_layers=[1, 3, 9], tokens=list("Xbcdefgh"), shapes={"fc.weight": (6, 32)}))
    problems = gguf.pairing_problems(gguf.read(make_target()), draft)
    assert [p.split(",")[0].split(":")[0] for p in problems] == [
        "the draft reads 3 layers of width 2",
        "the draft reads layers [9]",
        "the vocabularies differ",
    ]


def test_the_embedded_pair(pair: tuple[Path, Path]) -> None:
    target, draft = map(gguf.read, pair)
    gguf.check_pair(target, draft)
    assert (target.arch, target.n_layer, target.n_embd, target.n_vocab) == ("qwen35", 8, 256, 4096)
    assert (draft.draft_format, draft.block_size, draft.target_layers) == ("DFlash", 16, [1, 3, 5, 7])
    with pytest.raises(ModelFileError, match="expected a target"):
        gguf.check_pair(draft, target)
    with pytest.raises(ModelFileError, match="expected a draft"):
        gguf.check_pair(target, target)
