"""A draft's Hugging Face folder: configuration and tensor names, read without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_dflash.convert import layout
from llama_dflash.errors import ModelFileError
from llama_dflash.gguf import DRAFT_ARCH, ModelFacts

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")
DRAFT_KEYS = ("target_layer_ids", "mask_token_id", "block_size")
DTYPES = ("F32", "F16", "BF16")
LARGEST_HEADER_BYTES = 100 << 20
LAYER_TYPES = ("full_attention", "sliding_attention")
# Buffers that the pinned converter passes over.
IGNORED = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class Checkpoint:
    """What a folder says.

    Attributes:
        folder: where it is.
        config: config.json in the one form that the pinned converter is given; see `normalised`.
        tensors: tensor name to shape, rows first.
        size_bytes: of all weight files.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    size_bytes: int

    @property
    def is_dflash2(self) -> bool:
        """Whether the draft has a selector and convolutions."""
        return bool(self.config["architectures"][0] == "DFlash2DraftModel")

    @property
    def n_layer(self) -> int:
        """Layers of the draft."""
        return int(self.config["num_hidden_layers"])

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        return float(self.config["rope_theta"])

    def facts(self, tensors: dict[str, tuple[int, ...]]) -> ModelFacts:
        """What pairing needs, as the converted file will say it; `tensors` has its names and shapes in GGUF order."""
        block = self.config["dflash_config"]
        fields = {
            "general.architecture": DRAFT_ARCH,
            f"{DRAFT_ARCH}.embedding_length": self.config["hidden_size"],
            f"{DRAFT_ARCH}.block_size": block["block_size"],
            f"{DRAFT_ARCH}.target_layers": [i + 1 for i in block["target_layer_ids"]],
            "tokenizer.ggml.mask_token_id": block["mask_token_id"],
        }
        return ModelFacts(self.folder, self.size_bytes, fields, tensors, "none", ())


def read(folder: Path) -> Checkpoint:
    """Read a draft's folder.

    Raises:
        ModelFileError: not a DFlash or DFlash2 checkpoint, incomplete, damaged, or it says two things at once.
    """
    path = folder / "config.json"
    config = read_config(path)
    names = config.get("architectures")
    if not isinstance(names, list) or not names or names[0] not in ARCHITECTURES:
        raise ModelFileError(
            f"{path}: architectures is {names!r}, expected {' or '.join(ARCHITECTURES)}", "name the folder of a DFlash draft"
        )
    block = {**config, **_dict(config.get("dflash_config"))}
    missing = [key for key in NEEDED if not isinstance(config.get(key), int)]
    missing += [key for key in DRAFT_KEYS if block.get(key) is None]
    if names[0] == "DFlash2DraftModel":
        missing += [f"dflash_config.{key}" for key in layout.DFLASH2_KEYS if key not in _dict(config.get("dflash_config"))]
    ids = block.get("target_layer_ids")
    if ids is not None and (not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids)):
        raise ModelFileError(f"{path}: target_layer_ids is {ids!r}, expected a list of layers", "download the folder again")
    if missing:
        raise ModelFileError(f"{path} lacks {', '.join(missing)}; expected a draft's configuration", "download the folder again")
    tensors: dict[str, tuple[int, ...]] = {}
    size_bytes = 0
    for part in parts(folder):
        tensors |= dict(read_header(part))
        size_bytes += part.stat().st_size
    # Where the pinned converter looks for all of them.
    inner = _dict(config.get("dflash_config")) | {key: block[key] for key in DRAFT_KEYS}
    return Checkpoint(folder, normalised(config | {"dflash_config": inner}, path), tensors, size_bytes)


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json; raises ModelFileError when there is none or it is no JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or "not JSON"
        raise ModelFileError(f"{path} cannot be read ({reason}), expected a model's config.json", "check the folder") from e
    if not isinstance(config, dict):
        raise ModelFileError(f"{path} holds a {type(config).__name__}, expected an object", "check the folder")
    return config


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def normalised(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The configuration with its rotary parameters in every place that a reader may look.

    Checkpoints have `rope_theta` at the top (transformers 4), in `rope_parameters` (transformers 5) or in `rope_scaling`, in the
    last two by layer type or for all layers. A reader that looks in one place only takes a default of 10000, and the draft's
    tokens are then rarely accepted.

    Raises:
        ModelFileError: no base anywhere, or places that contradict each other.
    """
    places = [("", {"rope_theta": config["rope_theta"]})] if config.get("rope_theta") is not None else []
    for key in ("rope_scaling", "rope_parameters"):
        places += _rope_places(key, _dict(config.get(key)))
    merged: dict[str, Any] = {}
    said: dict[str, str] = {}
    for place, values in places:
        for name, value in values.items():
            if name in merged and merged[name] != value:
                raise ModelFileError(
                    f"{path}: {said[name]} is {merged[name]!r} but {place}{name} is {value!r}, expected one value: a DFlash draft has one "
                    f"set of rotary parameters",
                    "correct the wrong one",
                )
            merged[name], said[name] = value, place + name
    theta = merged.get("rope_theta")
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or theta <= 0:
        raise ModelFileError(
            f"{path}: rope_theta is {theta!r} in rope_parameters, rope_scaling and at the top, expected a positive number",
            "take it from the target's config.json",
        )
    out = {key: value for key, value in config.items() if key != "rope_scaling"}
    return out | {"rope_theta": theta, "rope_parameters": merged}


def _rope_places(key: str, values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    groups = {name: values[name] for name in LAYER_TYPES if isinstance(values.get(name), dict)}
    groups[""] = {name: value for name, value in values.items() if name not in LAYER_TYPES}
    for group, inner in groups.items():
        found = {"rope_type" if name == "type" else name: value for name, value in inner.items() if value is not None}
        yield f"{key}.{group}." if group else f"{key}.", found


def parts(folder: Path) -> list[Path]:
    """The safetensors files of a folder, as the pinned converter chooses them.

    Raises:
        ModelFileError: there are none, or the index names files that are missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _dict(read_config(index).get("weight_map"))
        found = [folder / name for name in sorted(set(map(str, weight_map.values())))]
    else:
        found = sorted(folder.glob("model*.safetensors"))
    missing = [path.name for path in found if not path.is_file()]
    if missing or not found:
        what = f"lacks {', '.join(missing)}" if missing else "has no model*.safetensors"
        raise ModelFileError(f"{folder} {what}, expected a complete checkpoint", "download it again")
    return found


def read_header(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors in a safetensors file.

    Raises:
        ModelFileError: damaged, truncated, or of a type that the pinned converter does not take as it is.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as f:
            (n,) = struct.unpack("<Q", f.read(8))
            if n > min(size, LARGEST_HEADER_BYTES):
                raise ValueError(f"its header would have {n} bytes")
            header = {name: info for name, info in json.loads(f.read(n)).items() if name != "__metadata__"}
        found = [
            (name, tuple(map(int, info["shape"])), info["dtype"], int(info["data_offsets"][1])) for name, info in header.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as e:
        raise ModelFileError(
            f"{path} is damaged ({' '.join(str(e).split())[:120]}), expected a safetensors file", "download it again"
        ) from e
    end = 8 + n + max((offset for *_, offset in found), default=0)
    if end > size:
        raise ModelFileError(f"{path} is truncated: {size} bytes, expected {end}", "download it again")
    for name, shape, dtype, _ in found:
        if name.endswith(IGNORED):
            continue
        if dtype not in DTYPES:
            raise ModelFileError(
                f"{path}: {name} has type {dtype}, expected {', '.join(DTYPES)}", "use the unquantized checkpoint"
            )
        yield name, shape
