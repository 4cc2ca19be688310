"""Drafts in older forks' key schemes, and what each key and tensor is in the scheme that pinned llama.cpp loads.

Two schemes are known, both from before llama.cpp had DFlash: `dflash-draft` (buun-llama-cpp, BeeLlama and others) and
`qwen35-dflash-draft` (Lucebox). Their keys stand below `<arch>.dflash.`, the mask token is a key of the model instead of the
tokenizer, and `target_layer_ids` are the checkpoint's: a draft reads the *output* of those layers. Pinned llama.cpp counts
layer inputs, so its `target_layers` are one higher. Nothing is guessed: what is not listed here is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from llama_dflash.convert import layout
from llama_dflash.convert.rewrite import Value, int32s, uint32
from llama_dflash.errors import ModelFileError, PairingError
from llama_dflash.gguf import DRAFT_ARCH, ModelFacts

# Keys below the architecture's name, and what they are below the new one.
_SIZES = ("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size")
_HEADS = ("head_count", "head_count_kv", "key_length", "value_length")
_ATTENTION = (*_HEADS, "layer_norm_rms_epsilon", "causal", "sliding_window", "sliding_window_pattern")
_ROPE = (
    "freq_base",
    "dimension_count",
    "dimension_sections",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
)
_SAME = (*_SIZES, *(f"attention.{name}" for name in _ATTENTION), *(f"rope.{name}" for name in _ROPE))
KEYS = {
    **{name: name for name in _SAME},
    "dflash.block_size": "block_size",
    "dflash2.conv_taps": "conv_kernel_size",
    "dflash2.conv_group_size": "conv_group_size",
    "dflash2.selector_rank": "selector_rank",
    "dflash2.selector_top_k": "selector_top_k",
}
# Read by `_dflash_values`: they become other keys, or say again what the tensors say.
CONSUMED = tuple(f"dflash.{name}" for name in ("mask_token_id", "target_layer_ids", "n_target_layers", "n_target_features"))
# What every file may have, whoever wrote it.
ANYWHERE = ("general.", "tokenizer.", "quantize.")
_NEEDED_SIZES = ("embedding_length", "block_count", "feed_forward_length", "attention.head_count")
NEEDED = (*_NEEDED_SIZES, "attention.layer_norm_rms_epsilon", "rope.freq_base", "dflash.block_size", *CONSUMED[:2])

TOP = {
    **{name: name for name in (*layout.OPTIONAL, *layout.DFLASH2_TOP, "output_norm.weight")},
    "dflash.fc.weight": "fc.weight",
    "dflash_fc.weight": "fc.weight",
    "dflash.hidden_norm.weight": "enc.output_norm.weight",
    "dflash_hidden_norm.weight": "enc.output_norm.weight",
    "selector_hproj.weight": "selector_hidden.weight",
    "selector_pred": "selector_predecessor.weight",
    "selector_succ": "selector_successor.weight",
}
LAYER = {
    **{name: name for name in (*layout.LAYER, *layout.DFLASH2_LAYER)},
    # The norm before the feed-forward part; pinned llama.cpp means another one by this name.
    "post_attention_norm.weight": "ffn_norm.weight",
}


@dataclass
class Plan:
    """How a file is rewritten.

    Attributes:
        values: metadata of the result.
        names: new name of every tensor.
        notes: what the user should know; no reason to refuse.
    """

    values: dict[str, Value]
    names: dict[str, str]
    notes: list[str] = field(default_factory=list)


def plan(source: ModelFacts, values: Mapping[str, Value], target: ModelFacts | None, target_values: Mapping[str, Value]) -> Plan:
    """Map an older draft's metadata and tensors to the pinned scheme.

    Args:
        source: the draft's facts; its architecture is one of `gguf.OLD_DRAFT_ARCHS`.
        values: the draft's metadata.
        target: the model that the draft was trained for, if it is at hand.
        target_values: the target's metadata; the tokenizer comes from here when the draft has none.

    Raises:
        ModelFileError: a key or tensor is unknown, missing or contradicts another; the message lists them.
    """
    prefix = source.arch + "."
    own = {key.removeprefix(prefix): v for key, v in values.items() if key.startswith(prefix)}
    is_dflash2 = any(key.startswith("dflash2.") for key in own) or any("selector" in name for name in source.tensors)
    names = {name: _tensor_name(name) for name in source.tensors}
    problems = _key_problems(values, own, prefix, is_dflash2)
    if not problems:
        n_layer = int(own["block_count"].value)
        problems = layout.problems(names, n_layer, is_dflash2) or _contradictions(source, own, values)
    if problems:
        raise ModelFileError(
            f"{source.path} ({source.arch!r}) cannot be rewritten: {'; '.join(problems)}; expected a draft of a known older scheme",
            "convert the draft's checkpoint folder instead",
        )
    out = {key: v for key, v in values.items() if key.startswith(ANYWHERE)}
    out |= {f"{DRAFT_ARCH}.{KEYS[key]}": v for key, v in own.items() if key not in CONSUMED}
    out |= _dflash_values(own)
    result = Plan(out, names)
    add_tokenizer(out, target_values, source)
    _match_target(result, own, target)
    return result


def _tensor_name(name: str) -> str:
    """The pinned name of a tensor, empty where there is none."""
    layer = re.fullmatch(r"(blk\.\d+\.)(.+)", name)
    if layer is None:
        return TOP.get(name, "")
    return layer[1] + LAYER[layer[2]] if layer[2] in LAYER else ""


def _key_problems(values: Mapping[str, Value], own: Mapping[str, Value], prefix: str, is_dflash2: bool) -> list[str]:
    unclaimed = [key for key in values if not key.startswith((*ANYWHERE, prefix))]
    unclaimed += [prefix + key for key in own if key not in KEYS and key not in CONSUMED]
    if "rope.scaling.factor" in own and "rope.scaling.type" not in own:
        unclaimed.append(f"{prefix}rope.scaling.factor (without a type, which llama.cpp takes for linear)")
    needed = list(NEEDED)
    if is_dflash2:
        needed += [old for old, new in KEYS.items() if new in layout.DFLASH2_KEYS]
    if "attention.sliding_window" in own and own["attention.sliding_window"].value:
        needed.append("attention.sliding_window_pattern")
    missing = [prefix + key for key in needed if key not in own]
    out = [f"unclaimed keys: {layout.listed(unclaimed)}"] if unclaimed else []
    return out + ([f"missing keys: {layout.listed(missing)}"] if missing else [])


def _contradictions(source: ModelFacts, own: Mapping[str, Value], values: Mapping[str, Value]) -> list[str]:
    """Keys of the wrong kind, and keys that say something else than other keys or the tensors; with a target, `check_pair` tells more."""
    ids = own["dflash.target_layer_ids"].value
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
        return [f"dflash.target_layer_ids is {ids!r}, expected a list of layers"]
    numbers = ("dflash.block_size", "dflash.mask_token_id", "attention.head_count", "embedding_length", "block_count")
    if wrong := [f"{name} is {own[name].value!r}, expected a number" for name in numbers if not isinstance(own[name].value, int)]:
        return wrong
    width = next(shape[0] for name, shape in source.tensors.items() if _tensor_name(name) == "fc.weight")
    said = {
        "dflash.n_target_layers": (own.get("dflash.n_target_layers"), len(ids)),
        "dflash.n_target_features": (own.get("dflash.n_target_features"), width),
        "tokenizer.ggml.mask_token_id": (values.get("tokenizer.ggml.mask_token_id"), own["dflash.mask_token_id"].value),
    }
    out = [f"{name} is {v.value!r}, expected {want}" for name, (v, want) in said.items() if v is not None and v.value != want]
    pattern = own.get("attention.sliding_window_pattern")
    n_layer = own["block_count"].value
    if pattern is not None and (not isinstance(pattern.value, list) or len(pattern.value) != n_layer):
        out.append(f"attention.sliding_window_pattern is {pattern.value!r}, expected a value for each of {n_layer} layers")
    return out


def _dflash_values(own: Mapping[str, Value]) -> dict[str, Value]:
    return {
        f"{DRAFT_ARCH}.target_layers": int32s([i + 1 for i in own["dflash.target_layer_ids"].value]),
        "tokenizer.ggml.mask_token_id": uint32(own["dflash.mask_token_id"].value),
    }


def add_tokenizer(out: dict[str, Value], target_values: Mapping[str, Value], source: ModelFacts) -> None:
    """Give `out` the target's tokenizer unless it has one; the draft's own mask token stays.

    Raises:
        ModelFileError: neither has a tokenizer.
        PairingError: the draft's tables are not made for the target's vocabulary.
    """
    model = out.get("tokenizer.ggml.model")
    if model is not None and model.value not in ("none", "no_vocab"):
        return
    theirs = {key: v for key, v in target_values.items() if key.startswith("tokenizer.")}
    tokens = theirs.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelFileError(
            f"{source.path} has no tokenizer, expected the target's", "name the target's GGUF file with --target TARGET.gguf"
        )
    check_rows(source, len(tokens.value))
    mask = out.get("tokenizer.ggml.mask_token_id")
    out |= theirs
    if mask is not None:
        out["tokenizer.ggml.mask_token_id"] = mask


def check_rows(source: ModelFacts, n_tokens: int) -> None:
    """Raise PairingError unless the draft's tables have a row for each of the target's tokens."""
    for name, shape in source.tensors.items():
        if name.startswith(("selector_pred", "selector_succ", "token_embd.", "output.")) and shape[-1] != n_tokens:
            raise PairingError(
                f"{source.path}: {name} has {shape[-1]} rows, expected the target's {n_tokens} tokens",
                "use the target that the draft was trained for",
            )


def _match_target(result: Plan, own: Mapping[str, Value], target: ModelFacts | None) -> None:
    """What the pinned converter reads from a target's configuration."""
    sections = f"{DRAFT_ARCH}.rope.dimension_sections"
    if target is None:
        if sections not in result.values:
            result.notes.append("without --target the draft's rotary sections are not set; text is unaffected, images may be")
        return
    if any(target.key("rope.dimension_sections") or []) and sections not in result.values:
        head = own.get("attention.key_length")
        n_rot = head.value if head else own["embedding_length"].value // own["attention.head_count"].value
        result.values[sections] = int32s([n_rot // 2, 0, 0, 0])
    base, theirs = own["rope.freq_base"].value, target.key("rope.freq_base")
    if theirs and base != theirs:
        result.notes.append(
            f"rope.freq_base is {base:g}, the target's is {theirs:g}: some older converters wrote a wrong one; "
            f"if few tokens are accepted, convert the draft's checkpoint folder instead"
        )
