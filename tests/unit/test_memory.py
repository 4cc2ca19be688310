"""KV cache sizes, and the refusal of a context that cannot fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_dflash import gguf, memory
from llama_dflash.errors import UsageError

# Two of the target's eight layers are attention, each with 2 KV heads of 64 values for K and as many for V.
TARGET_VALUES = 2 * 2 * 64
# The draft's four layers, the same heads.
DRAFT_VALUES = 4 * 2 * 64
MASK_BYTES = 512 * 2


@pytest.fixture(scope="module")
def models(pair: tuple[Path, Path]) -> list[gguf.ModelFacts]:
    return [gguf.read(path) for path in pair]


@pytest.mark.parametrize(
    ("k_type", "v_type", "bytes_per_pair"),
    [("f16", "f16", 4.0), ("f32", "f16", 6.0), ("q8_0", "q4_0", 34 / 32 + 18 / 32), ("q8_0", "q8_0", 2 * 34 / 32)],
)
def test_kv_bytes_of_the_embedded_target(models: list[gguf.ModelFacts], k_type: str, v_type: str, bytes_per_pair: float) -> None:
    assert memory.kv_bytes(models[0], 1000, k_type, v_type) == 1000 * TARGET_VALUES * bytes_per_pair


def test_kv_bytes_of_the_embedded_draft(models: list[gguf.ModelFacts]) -> None:
    assert memory.kv_bytes(models[1], 10) == 10 * DRAFT_VALUES * 4
    assert memory.kv_bytes(models[1], 0) == 0


def test_kv_bytes_counts_k_and_v_apart(make_target: Callable[..., Path]) -> None:
    facts = gguf.read(make_target())
    assert memory.kv_bytes(facts, 1, "f32", "f16") == 16 * 4 + 8 * 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], None),
        (["-c", "5"], "5"),
        (["--ctx-size", "5"], "5"),
        (["--ctx-size=5"], "5"),
        (["-c", "5", "-c", "6"], "6"),
        (["-c", "5", "--ctx-size=7"], "7"),
        (["--ctx-size=7", "-c", "5"], "5"),
        (["-c"], None),
        (["-cx", "5"], None),
        (["-ctk", "f16"], None),
    ],
)
def test_flag_value(flags: list[str], expected: str | None) -> None:
    assert memory.flag_value(flags, "-c", "--ctx-size") == expected


def test_available_bytes_is_what_the_system_says() -> None:
    total = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    assert total is not None
    available = memory.available_bytes()
    assert available is not None
    assert 0 < available <= int(total[1]) * 1024


@pytest.mark.parametrize("off_by", [0, 1])
def test_check_context_at_the_limit(models: list[gguf.ModelFacts], monkeypatch: pytest.MonkeyPatch, off_by: int) -> None:
    need = 1000 * ((TARGET_VALUES + DRAFT_VALUES) * 4 + 2 * MASK_BYTES)
    monkeypatch.setattr(memory, "available_bytes", lambda: need - off_by)
    if not off_by:
        memory.check_context(models, ["-c", "1000"])
        return
    with pytest.raises(UsageError, match="a context of 1000 tokens needs"):
        memory.check_context(models, ["-c", "1000"])


def test_check_context_reads_the_kv_types(models: list[gguf.ModelFacts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000 * (TARGET_VALUES * 3 + MASK_BYTES))
    target = models[:1]
    with pytest.raises(UsageError):
        memory.check_context(target, ["-c", "1000"])
    memory.check_context(target, ["-c", "1000", "-ctk", "q8_0", "--cache-type-v=q8_0"])


@pytest.mark.parametrize("flags", [[], ["-c"]])
def test_no_size_is_the_models_own(
    models: list[gguf.ModelFacts], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    memory.check_context(models, flags)


def test_check_context_reads_the_drafts_own_types(models: list[gguf.ModelFacts], monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = TARGET_VALUES * 4 + DRAFT_VALUES * 3 + 2 * MASK_BYTES
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000 * per_token)
    with pytest.raises(UsageError):
        memory.check_context(models, ["-c", "1000", "-ctk", "f16"])
    memory.check_context(models, ["-c", "1000", "-ctkd", "q8_0", "-ctvd", "q8_0"])


def test_an_unknown_amount_of_memory_refuses_nothing(models: list[gguf.ModelFacts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    memory.check_context(models, ["-c", "1000000000000"])
