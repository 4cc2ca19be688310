"""Write GGUF files with random weights: real shapes, real types, nothing learnt.

Random weights cost the same memory and time as trained ones, and say nothing about acceptance or quality.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from llama_dflash.files import check_out, publish, require_space, temporary_beside
from llama_dflash.shapes.layout import Layout, Tensor
from llama_dflash.shapes.mixes import BLOCKS

# Drawn and written at once; memory stays at a few of these whatever the file's size.
CHUNK_BYTES = 16 * 2**20
# Left free on the disk beyond the file itself.
SPARE_BYTES = 64 * 2**20
ALIGNMENT = 32

# Standard deviation of a block's values for a scale of 1 and random bits, and where the scale (F16) stands in the block.
# Q4_K and Q5_K: value = d * scale * q - dmin * min with 6-bit scales and mins; dmin = d * middle of q centres the values.
_DEVIATION = {
    "Q4_K": (0, (1333.5 * 77.5 - 236.25**2 + 7.5**2 * 341.25) ** 0.5),
    "Q5_K": (0, (1333.5 * 325.5 - 488.25**2 + 15.5**2 * 341.25) ** 0.5),
    "Q6_K": (208, (5461.5 * 341.5) ** 0.5),
    "Q5_0": (0, 85.5**0.5),
    "Q5_1": (0, 85.25**0.5),
    "Q8_0": (0, 5461.5**0.5),
}
# Bytes 2 and 3: what is taken off, as a multiple of the scale; its sign is the format's.
_MINIMUM = {"Q4_K": 7.5, "Q5_K": 15.5, "Q5_1": -15.5}


def tokens(n_vocab: int) -> list[str]:
    """A vocabulary of printable text, as short as it can be: every byte first, then distinct strings of two and three characters.

    A smaller `n_vocab` than 256 would not cover all bytes.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    n_other = 256 - len(printable)
    out = [chr(b) for b in printable] + [chr(256 + i) for i in range(n_other)]
    # Letters and digits alone: no accidental "<s>", which llama.cpp would take for a special token.
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    pairs = (a + b for a in letters for b in letters)
    triples = (a + b + c for a in letters for b in letters for c in letters)
    quads = (a + b + c + d for a in letters for b in letters for c in letters for d in letters)
    for source in (pairs, triples, quads):
        for token in source:
            if len(out) >= n_vocab:
                return out[:n_vocab]
            out.append(token)
    return out[:n_vocab]


def _f16(value: float) -> npt.NDArray[np.uint8]:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def _quantised(rng: np.random.Generator, kind: str, n_blocks: int, deviation: float) -> npt.NDArray[np.uint8]:
    """Blocks `[n_blocks, bytes]` of random bits whose values have this standard deviation and mean zero."""
    bits = np.frombuffer(rng.bytes(n_blocks * BLOCKS[kind].n_bytes), np.uint8)
    blocks: npt.NDArray[np.uint8] = bits.reshape(n_blocks, -1).copy()
    at, unit = _DEVIATION[kind]
    scale = float(np.float16(deviation / unit))
    blocks[:, at : at + 2] = _f16(scale)
    if kind in _MINIMUM:
        blocks[:, 2:4] = _f16(scale * _MINIMUM[kind])
    return blocks


def _half_table() -> npt.NDArray[np.float32]:
    """65536 values whose distribution is a normal one: drawing bits and looking up is much faster than drawing normals."""
    from statistics import NormalDist

    steps = (np.arange(4096) + 0.5) / 4096
    values = np.array([NormalDist().inv_cdf(p) for p in steps], np.float32)
    return np.tile(values / values.std(), 16)


def _chunks(tensor: Tensor, seed: int) -> Iterator[bytes]:
    """The tensor's bytes in pieces; the same for the same seed and name, whatever else is in the file."""
    rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(tensor.name.encode())])))
    if tensor.kind == "F32" or tensor.bounds:
        low, high = tensor.bounds or (-0.02, 0.02)
        n_left = tensor.n_bytes // 4
        while n_left > 0:
            n = min(n_left, CHUNK_BYTES // 4)
            yield (rng.random(n, np.float32) * np.float32(high - low) + np.float32(low)).tobytes()
            n_left -= n
        return
    deviation = tensor.gain / tensor.shape[0] ** 0.5
    block = BLOCKS[tensor.kind]
    n_left = tensor.n_bytes // block.n_bytes
    if tensor.kind == "F16":
        table = (_half_table() * np.float32(deviation)).astype(np.float16)
        while n_left > 0:
            n = min(n_left, CHUNK_BYTES // 2)
            yield table[np.frombuffer(rng.bytes(2 * n), np.uint16)].tobytes()
            n_left -= n
        return
    while n_left > 0:
        n = min(n_left, CHUNK_BYTES // block.n_bytes)
        yield _quantised(rng, tensor.kind, n, deviation).tobytes()
        n_left -= n


def _write_header(path: Path, layout: Layout) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter  # slow to import

    w = GGUFWriter(path, layout.arch)
    w.add_name(layout.name)
    for key, value in layout.keys.items():
        full = key if key.startswith(("general.", "tokenizer.")) else f"{layout.arch}.{key}"
        if isinstance(value, bool):
            w.add_bool(full, value)
        elif isinstance(value, list):
            w.add_array(full, value)
        elif isinstance(value, float):
            w.add_float32(full, value)
        else:
            w.add_uint32(full, value)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen35")
    w.add_token_list(tokens(layout.n_vocab))
    w.add_token_merges(["a b"])  # llama.cpp wants one; more would only take time and space
    w.add_bos_token_id(layout.n_vocab - 3)
    w.add_eos_token_id(layout.n_vocab - 2)
    w.add_add_bos_token(False)
    for t in layout.tensors:
        w.add_tensor_info(t.name, t.shape[::-1], np.dtype(np.float32), t.n_bytes, raw_dtype=GGMLQuantizationType[t.kind])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    w.close()


def _pad(f: BinaryIO, n_bytes: int) -> None:
    f.write(bytes(-n_bytes % ALIGNMENT))


def write(layout: Layout, out: Path, *, seed: int = 1, force: bool = False, on_bytes: Callable[[int], None] | None = None) -> int:
    """Write a file of this layout with random weights.

    The bytes go to a temporary name beside `out`, which is renamed at the end: there is never half a file at `out`.

    Args:
        layout: what to write.
        out: the file.
        seed: the same seed writes the same file.
        force: overwrite a file that exists.
        on_bytes: called with the size of every piece written.

    Returns:
        The file's size in bytes.

    Raises:
        UsageError: `out` exists, is a folder, or its folder is missing.
        DFlashError: the disk has not enough room.
    """
    check_out(out, (), force)
    require_space(out.parent, layout.n_bytes + SPARE_BYTES, "this file")
    with temporary_beside(out) as part:
        _write_header(part, layout)
        with part.open("r+b") as f:
            f.seek(0, os.SEEK_END)
            _pad(f, f.tell())
            for tensor in layout.tensors:
                for piece in _chunks(tensor, seed):
                    f.write(piece)
                    if on_bytes:
                        on_bytes(len(piece))
                _pad(f, tensor.n_bytes)
        size_bytes = part.stat().st_size
        publish(part, out, force)
        return size_bytes
