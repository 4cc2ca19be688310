"""Will a context fit? An estimate of the KV cache from the header, before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from llama_dflash.errors import UsageError
from llama_dflash.gguf import ModelFacts

# Bytes per value of the KV types that llama.cpp takes.
KV_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
GIB = 2**30


def kv_bytes(facts: ModelFacts, n_ctx: int, k_type: str = "f16", v_type: str = "f16") -> int:
    """Bytes of the attention KV cache for `n_ctx` tokens; recurrent layers have none."""
    values = {"k": 0, "v": 0}
    for name, shape in facts.tensors.items():
        match = re.fullmatch(r"blk\.\d+\.attn_([kv])\.weight", name)
        if match and len(shape) == 2:
            values[match[1]] += shape[1]
    return int(n_ctx * (values["k"] * KV_BYTES.get(k_type, 2.0) + values["v"] * KV_BYTES.get(v_type, 2.0)))


def available_bytes() -> int | None:
    """Memory that a new process can have, or None where the system does not tell."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
    return int(match[1]) * 1024 if match else None


def flag_value(flags: Sequence[str], *names: str) -> str | None:
    """Value of the last of `names` in a command line."""
    value = None
    for i, flag in enumerate(flags):
        head, eq, tail = flag.partition("=")
        if head in names:
            value = tail if eq else flags[i + 1] if i + 1 < len(flags) else None
    return value


def check_context(models: Sequence[ModelFacts], flags: Sequence[str]) -> None:
    """Refuse a context whose KV cache cannot fit in memory.

    The system would grant it and kill the process, or another one, when the cache is first written.

    Raises:
        UsageError: the cache of all `models` together is larger than the available memory.
    """
    text = flag_value(flags, "-c", "--ctx-size")
    if text is None or not text.isdigit():
        return
    k_type = flag_value(flags, "-ctk", "--cache-type-k") or "f16"
    v_type = flag_value(flags, "-ctv", "--cache-type-v") or "f16"
    need = kv_bytes(models[0], int(text), k_type, v_type) + sum(kv_bytes(m, int(text)) for m in models[1:])
    have = available_bytes()
    if have is not None and need > have:
        raise UsageError(
            f"a context of {text} tokens needs {need / GIB:.1f} GiB of KV cache, expected at most {have / GIB:.1f} GiB",
            "choose a smaller -c, or a smaller KV type (-- -ctk q8_0 -ctv q8_0)",
        )
