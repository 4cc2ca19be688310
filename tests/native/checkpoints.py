"""Drafts in other forms than pinned llama.cpp's: Hugging Face folders and older forks' GGUF files, made from drafts in its form."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TOP = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
    **{f"ffn_{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"attn_{name}.weight": f"self_attn.{name}_proj.weight" for name in "qkv"},
    "attn_output.weight": "self_attn.o_proj.weight",
    **{f"attn_{name}_norm.weight": f"self_attn.{name}_norm.weight" for name in "qk"},
}
OLD_TOP = {
    "fc.weight": ("dflash_fc.weight", "dflash.fc.weight"),
    "enc.output_norm.weight": ("dflash_hidden_norm.weight", "dflash.hidden_norm.weight"),
    "selector_hidden.weight": ("selector_hproj.weight",) * 2,
    "selector_predecessor.weight": ("selector_pred",) * 2,
    "selector_successor.weight": ("selector_succ",) * 2,
}
DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint16): "BF16"}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays of float32, float16, or bfloat16 as uint16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in tensors.items():
        header[name] = {"dtype": DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(np.ascontiguousarray(a).tobytes() for a in tensors.values()))


def hf_name(name: str) -> str:
    """Checkpoint's name of a draft's tensor."""
    if name in TOP:
        return TOP[name]
    _, layer, rest = name.split(".", 2)
    return f"layers.{layer}.{LAYER[rest]}"


def rope(layout: str, theta: float) -> dict[str, Any]:
    """Rotary parameters as a config.json has them: `top`, `parameters`, `scaling` or `typed`."""
    inner = {"rope_theta": theta, "rope_type": "default"}
    return {
        "top": {"rope_theta": theta, "rope_scaling": None},
        "parameters": {"rope_parameters": inner},
        "scaling": {"rope_scaling": inner},
        "typed": {"rope_parameters": {"full_attention": inner, "sliding_attention": dict(inner)}},
    }[layout]


def config(facts: dict[str, Any], rope_layout: str = "parameters") -> dict[str, Any]:
    """config.json of a draft with the keys `facts` (without `dflash.`)."""
    is_dflash2 = "selector_rank" in facts
    inner = {"target_layer_ids": [i - 1 for i in facts["target_layers"]], "mask_token_id": facts["mask_token_id"]}
    if is_dflash2:
        inner |= {k: facts[k] for k in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")}
    return {
        "architectures": ["DFlash2DraftModel" if is_dflash2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": facts["embedding_length"],
        "num_hidden_layers": facts["block_count"],
        "intermediate_size": facts["feed_forward_length"],
        "num_attention_heads": facts["attention.head_count"],
        "num_key_value_heads": facts["attention.head_count_kv"],
        "head_dim": facts["attention.key_length"],
        "max_position_embeddings": facts["context_length"],
        "rms_norm_eps": 1e-6,
        "vocab_size": facts["vocab_size"],
        "block_size": facts["block_size"],
        "dflash_config": inner,
        **rope(rope_layout, facts["rope.freq_base"]),
    }


def facts_of(reader: Any) -> dict[str, Any]:
    """A draft's keys without `dflash.`, and its mask token."""
    out = {name.removeprefix("dflash."): f.contents() for name, f in reader.fields.items() if name.startswith("dflash.")}
    return out | {"mask_token_id": reader.fields["tokenizer.ggml.mask_token_id"].contents()}


def write_checkpoint(draft: Path, folder: Path, rope_layout: str = "parameters", n_parts: int = 1) -> Path:
    """Turn a draft of F16 and F32 tensors back into the Hugging Face folder that it could have come from."""
    reader = gguf.GGUFReader(draft)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(facts_of(reader), rope_layout)))
    tensors = {hf_name(t.name): np.array(t.data) for t in reader.tensors}
    if n_parts == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for i in range(n_parts):
        name = f"model-{i + 1:05}-of-{n_parts:05}.safetensors"
        part = {k: v for j, (k, v) in enumerate(tensors.items()) if j % n_parts == i}
        write_safetensors(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def old_values(reader: Any, arch: str) -> dict[str, tuple[Any, Any, Any]]:
    """Metadata of a draft in an older fork's scheme: key to value, type, item type."""
    kinds = gguf.GGUFValueType
    facts = facts_of(reader)
    lucebox = arch == "qwen35-dflash-draft"
    out: dict[str, tuple[Any, Any, Any]] = {}
    skipped = ("block_size", "target_layers", "rope.dimension_sections", "conv_", "selector_")
    for name, f in reader.fields.items():
        item = f.types[-1] if f.types[0] == kinds.ARRAY else None
        own = name.removeprefix("dflash.")
        if name.startswith("tokenizer.") and (lucebox or name.endswith("mask_token_id")):
            continue
        if name.startswith(("general.", "tokenizer.")) and name != "general.architecture":
            out[name] = (f.contents(), f.types[0], item)
        elif own != name and not own.startswith(skipped):
            out[f"{arch}.{own}"] = (f.contents(), f.types[0], item)
    ids = [i - 1 for i in facts["target_layers"]]
    numbers = {"block_size": facts["block_size"], "mask_token_id": facts["mask_token_id"]}
    numbers |= {"n_target_layers": len(ids)} if lucebox else {"n_target_features": len(ids) * facts["embedding_length"]}
    out |= {f"{arch}.dflash.{name}": (value, kinds.UINT32, None) for name, value in numbers.items()}
    out[f"{arch}.dflash.target_layer_ids"] = (ids, kinds.ARRAY, kinds.INT32 if lucebox else kinds.UINT32)
    if "selector_rank" in facts:
        names = {"conv_taps": "conv_kernel_size"} | {k: k for k in ("conv_group_size", "selector_rank", "selector_top_k")}
        out |= {f"{arch}.dflash2.{old}": (facts[new], kinds.UINT32, None) for old, new in names.items()}
    if not lucebox:
        out[f"{arch}.attention.causal"] = (False, kinds.BOOL, None)
    return out


def old_name(name: str, arch: str) -> str:
    """An older fork's name of a tensor."""
    lucebox = arch == "qwen35-dflash-draft"
    if name in OLD_TOP:
        return OLD_TOP[name][lucebox]
    return name if lucebox else name.replace("ffn_norm", "post_attention_norm")


def write_old(
    draft: Path, out: Path, arch: str, changes: dict[str, Any] | None = None, names: dict[str, str] | None = None
) -> Path:
    """Write a draft as an older fork did.

    Args:
        draft: in pinned llama.cpp's scheme.
        out: file to write.
        arch: `dflash-draft` (with a tokenizer) or `qwen35-dflash-draft` (without).
        changes: full keys to (value, type, item type), None leaves a key out.
        names: new names of tensors, by the old scheme's; empty leaves a tensor out.
    """
    reader = gguf.GGUFReader(draft)
    writer = gguf.GGUFWriter(out, arch)
    for key, entry in (old_values(reader, arch) | (changes or {})).items():
        if entry is not None and key == "general.alignment":
            writer.add_custom_alignment(entry[0])
        elif entry is not None:
            writer.add_key_value(key, *entry)
    for t in reader.tensors:
        name = old_name(t.name, arch)
        if renamed := (names or {}).get(name, name):
            writer.add_tensor(renamed, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


# Small enough to be written in every test; rows of 32 values, as Q8_0 needs them.
FACTS = {
    "embedding_length": 32, "block_count": 2, "feed_forward_length": 64, "attention.head_count": 2, "attention.head_count_kv": 1,
    "attention.key_length": 16, "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6, "context_length": 64,
    "vocab_size": 8, "rope.freq_base": 1e7, "block_size": 8, "target_layers": [2, 4], "mask_token_id": 7,
}  # fmt: skip
FACTS2 = FACTS | {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 4, "selector_top_k": 4}


def shapes(facts: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint, rows first."""
    n, ff, q, kv, head = 32, 64, 32, 16, 16
    layer = {
        "input_layernorm.weight": (n,), "post_attention_layernorm.weight": (n,), "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,), "self_attn.q_proj.weight": (q, n), "self_attn.k_proj.weight": (kv, n),
        "self_attn.v_proj.weight": (kv, n), "self_attn.o_proj.weight": (n, q), "mlp.gate_proj.weight": (ff, n),
        "mlp.up_proj.weight": (ff, n), "mlp.down_proj.weight": (n, ff),
    }  # fmt: skip
    top = {"fc.weight": (n, 2 * n), "hidden_norm.weight": (n,), "norm.weight": (n,)}
    if "selector_rank" in facts:
        conv = {"base_kernel": (2, 2, n), "kernel_projection.weight": (8, n)}
        layer |= {f"{where}_conv.{name}": shape for where in ("attention", "mlp") for name, shape in conv.items()}
        top |= {f"candidate_selector.{name}_codebook": (8, 4) for name in ("predecessor", "successor")}
        top["candidate_selector.hidden_projection.weight"] = (4, n)
    return top | {f"layers.{i}.{name}": shape for i in range(facts["block_count"]) for name, shape in layer.items()}


def gguf_name(name: str) -> str:
    """Pinned llama.cpp's name of a checkpoint's tensor."""
    tops = {theirs: ours for ours, theirs in TOP.items()}
    if name in tops:
        return tops[name]
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}." + {theirs: ours for ours, theirs in LAYER.items()}[rest]


def write_draft(path: Path, facts: dict[str, Any]) -> Path:
    """A small draft in pinned llama.cpp's scheme, of random F16 and F32 values, for a target of 8 tokens."""
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list("abcdefgh"))
    writer.add_mask_token_id(facts["mask_token_id"])
    for key, value in facts.items():
        if key == "target_layers":
            writer.add_array(f"dflash.{key}", value)
        elif key != "mask_token_id":
            writer.add_key_value(
                f"dflash.{key}", value, gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
            )
    random = np.random.default_rng(0)
    for name, shape in shapes(facts).items():
        values = random.standard_normal(shape)
        writer.add_tensor(gguf_name(name), values.astype(np.float16 if len(shape) == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_target(path: Path, n_tokens: int = 8, n_embd: int = 32, n_layer: int = 6) -> Path:
    """Header of a target; the defaults fit the small drafts."""
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_block_count(n_layer)
    writer.add_embedding_length(n_embd)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_sections([4, 2, 2, 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list("abcdefghijkl")[:n_tokens])
    writer.add_pad_token_id(1)
    writer.add_tensor("token_embd.weight", np.zeros((n_tokens, n_embd), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
