"""Write a GGUF file anew with other keys and tensor names; the tensors' bytes stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from llama_dflash.errors import ModelFileError


@dataclass(frozen=True)
class Value:
    """A metadata value with its type; `item` is the type of an array's items."""

    value: Any
    kind: Any
    item: Any = None


def uint32(value: int) -> Value:
    """A number."""
    return Value(value, GGUFValueType.UINT32)


def int32s(values: list[int]) -> Value:
    """A list of numbers."""
    return Value(values, GGUFValueType.ARRAY, GGUFValueType.INT32)


def read_values(reader: Any) -> dict[str, Value]:
    """Metadata of an open file, the architecture and the header's own counts left out."""
    out = {}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        out[name] = Value(field.contents(), field.types[0], item)
    return out


def open_file(path: Path) -> Any:
    """A reader of a file whose header `llama_dflash.gguf.read` has accepted.

    Raises:
        ModelFileError: the file is for machines of the other byte order.
    """
    reader = GGUFReader(path)
    if reader.byte_order == "S":
        raise ModelFileError(
            f"{path} has the other byte order, expected this machine's", "convert it with gguf-convert-endian first"
        )
    return reader


def write(reader: Any, out: Path, arch: str, values: Mapping[str, Value], names: Mapping[str, str]) -> None:
    """Write the tensors of `reader` under the names `names` gives them, in the same order, to `out`.

    Args:
        reader: the open source; its tensors are mapped, not read into memory.
        out: file to write.
        arch: `general.architecture` of the result.
        values: its metadata. Empty arrays are left out: the writer knows no type for them.
        names: new name of every tensor by its old name.
    """
    writer = GGUFWriter(out, arch)
    try:
        for key, v in values.items():
            if key == "general.alignment":
                writer.add_custom_alignment(v.value)
            elif v.kind != GGUFValueType.ARRAY or len(v.value):
                writer.add_key_value(key, v.value, v.kind, v.item)
        for t in reader.tensors:
            writer.add_tensor_info(names[t.name], t.data.shape, t.data.dtype, t.data.nbytes, raw_dtype=t.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for t in reader.tensors:
            writer.write_tensor_data(t.data)
    finally:
        writer.close()
