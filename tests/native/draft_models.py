"""Drafts that no trained file exists for, made from the embedded DFlash draft.

python tests/native/draft_models.py dspark DRAFT.gguf OUT.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

RANK = 32
SEED = 5


def write_dspark(draft: Path, out: Path, *, anchor: bool = False, rank: int = RANK) -> None:
    """Write a DSpark draft: the DFlash draft with a small random Markov head, so that it still drafts well.

    Args:
        draft: a DFlash draft.
        out: file to write.
        anchor: draft from the anchor on (`sample_from_anchor`), else from the first mask as DFlash does.
        rank: of the Markov head.
    """
    source = gguf.GGUFReader(draft)
    writer = gguf.GGUFWriter(out, "dflash")
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value, types = field.contents(), field.types
        sub = types[1] if types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, types[0], sub)
    writer.add_bool("dflash.sample_from_anchor", anchor)
    n_vocab = 0
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    n_vocab = len(source.fields["tokenizer.ggml.tokens"].data)
    random = np.random.default_rng(SEED)
    for name in ("markov_w1.weight", "markov_w2.weight"):
        writer.add_tensor(name, (random.standard_normal((n_vocab, rank)) * 0.3).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write_dspark(Path(sys.argv[2]), Path(sys.argv[3]))
