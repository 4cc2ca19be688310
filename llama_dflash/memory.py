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
# The attention mask of a default batch (512 rows, F16) grows with the context too.
MASK_BYTES_PER_TOKEN = 512 * 2
GIB = 2**30


def kv_bytes(facts: ModelFacts, n_ctx: int, k_type: str = "f16", v_type: str = "f16") -> int:
    """Bytes of the attention KV cache for `n_ctx` tokens; recurrent layers have none."""
    values = {"k": 0, "v": 0}
    for name, shape in facts.tensors.items():
        match = re.fullmatch(r"blk\.(\d+)\.attn_([kv])\.weight", name)
        if match and int(match[1]) < facts.n_layer and len(shape) == 2:
            values[match[2]] += shape[1]
    return int(n_ctx * (values["k"] * KV_BYTES.get(k_type, 2.0) + values["v"] * KV_BYTES.get(v_type, 2.0)))


def available_bytes() -> int | None:
    """Memory that a new process can have, a container's limit included; None where the system does not tell."""
    limits = []
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        limits += [int(match[1]) * 1024] if match else []
        group = Path("/sys/fs/cgroup")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no such file, or "max": no limit
    return min(limits, default=None)


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
    if text is None:
        return
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"the context size is {text!r}, expected a whole number of tokens", "such as -c 32768")
    types = [
        [flag_value(flags, short, long) or "f16" for short, long in names]
        for names in (
            (("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")),
            (("-ctkd", "--spec-draft-type-k"), ("-ctvd", "--spec-draft-type-v")),
        )
    ]
    n_ctx = int(text)
    need = sum(kv_bytes(m, n_ctx, *types[i > 0]) + n_ctx * MASK_BYTES_PER_TOKEN for i, m in enumerate(models))
    have = available_bytes()
    if have is not None and need > have:
        raise UsageError(
            f"a context of {text} tokens needs {need / GIB:.1f} GiB for its caches, expected at most {have / GIB:.1f} GiB",
            "choose a smaller -c, or a smaller KV type (-- -ctk q8_0 -ctv q8_0)",
        )
