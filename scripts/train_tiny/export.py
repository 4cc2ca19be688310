#!/usr/bin/env python3
"""Write saved weights as GGUF files that pinned llama.cpp loads: matrices F16, norms, biases and convolution kernels F32.

    python -m train_tiny.export --weights DIR --tokenizer tokenizer.json --out DIR

tiny-target.gguf holds the MTP head as layer n_layer; tiny-draft.gguf is the DFlash draft, tiny-draft2.gguf the DFlash2 draft. The drafts
share the target's embedding and head and repeat its tokenizer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from train_tiny.corpus import SPECIALS
from train_tiny.draft import CONV_TAPS
from train_tiny.training import load_weights

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FFN = {"ffn.gate.weight": "ffn_gate.weight", "ffn.up.weight": "ffn_up.weight", "ffn.down.weight": "ffn_down.weight"}
ATTENTION = {f"{ours}.weight": f"attn_{theirs}.weight" for ours, theirs in
             (("q", "q"), ("k", "k"), ("v", "v"), ("out", "output"), ("q_norm", "q_norm"), ("k_norm", "k_norm"))}  # fmt: skip
MIXER = {f"mix.{ours}": theirs for ours, theirs in ATTENTION.items()}
TARGET_LAYER = {
    **FFN,
    **MIXER,
    "attn_norm.weight": "attn_norm.weight",
    "post_norm.weight": "post_attention_norm.weight",
    "mix.qkv.weight": "attn_qkv.weight",
    "mix.z.weight": "attn_gate.weight",
    "mix.conv": "ssm_conv1d.weight",
    "mix.dt_bias": "ssm_dt.bias",
    "mix.A_log": "ssm_a",
    "mix.alpha.weight": "ssm_alpha.weight",
    "mix.beta.weight": "ssm_beta.weight",
    "mix.norm.weight": "ssm_norm.weight",
}
MTP_LAYER = {
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "eh_proj.weight": "nextn.eh_proj.weight",
    "head_norm.weight": "nextn.shared_head_norm.weight",
}
DRAFT_LAYER = {
    **FFN,
    **ATTENTION,
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "attn_conv.base": "attn_conv_base",
    "attn_conv.proj.weight": "attn_conv_proj.weight",
    "ffn_conv.base": "ffn_conv_base",
    "ffn_conv.proj.weight": "ffn_conv_proj.weight",
}
TARGET_TOP = {"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "head.weight": "output.weight"}
DRAFT_TOP = {
    "fc.weight": "fc.weight",
    "enc_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "selector.hidden.weight": "selector_hidden.weight",
    "selector.prev": "selector_predecessor.weight",
    "selector.next": "selector_successor.weight",
}


def target_name(name: str, config: dict[str, Any]) -> str:
    """GGUF name of a target tensor."""
    if name in TARGET_TOP:
        return TARGET_TOP[name]
    _, layer, rest = name.split(".", 2)
    if rest == "mix.out.weight" and (int(layer) + 1) % config["full_attn_interval"]:
        return f"blk.{layer}.ssm_out.weight"
    return f"blk.{layer}.{TARGET_LAYER[rest]}"


def mtp_name(name: str, config: dict[str, Any]) -> str:
    """GGUF name of a tensor of the MTP head."""
    return f"blk.{config['n_layer']}.{(TARGET_LAYER | MTP_LAYER)[name]}"


def draft_name(name: str) -> str:
    """GGUF name of a draft tensor."""
    if name in DRAFT_TOP:
        return DRAFT_TOP[name]
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{DRAFT_LAYER[rest]}"


def add_tokenizer(writer: Any, path: Path) -> None:
    """Vocabulary, merges, special tokens and chat template."""
    data = json.loads(path.read_text())
    names = {i: token for token, i in data["model"]["vocab"].items()}
    special = {t["id"]: t["content"] for t in data["added_tokens"]}
    if tuple(special[i] for i in sorted(special)) != SPECIALS:
        raise SystemExit(f"export: special tokens are {list(special.values())}, expected {SPECIALS}")
    n_vocab = len(names | special)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([special.get(i) or names[i] for i in range(n_vocab)])
    writer.add_token_types([kinds.CONTROL if i in special else kinds.NORMAL for i in range(n_vocab)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]])
    end, _, _, mask = sorted(special)
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(end)
    writer.add_bos_token_id(end)
    writer.add_eot_token_id(sorted(special)[2])
    writer.add_add_bos_token(False)
    writer.add_mask_token_id(mask)
    writer.add_chat_template(CHAT_TEMPLATE)
    writer.add_vocab_size(n_vocab)


def add_sizes(writer: Any, config: dict[str, Any], n_block: int) -> None:
    """What every file says about its layers."""
    writer.add_context_length(config["n_ctx"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(n_block)
    writer.add_feed_forward_length(config["n_ff"])
    writer.add_head_count(config["n_head"])
    writer.add_head_count_kv(config["n_head_kv"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["eps"])
    writer.add_rope_freq_base(config["rope_base"])
    writer.add_license("mit")


def add_tensor(writer: Any, name: str, value: np.ndarray) -> None:
    """Matrices as F16; one-dimensional tensors and convolution kernels as F32."""
    is_f32 = value.ndim == 1 or name.endswith(("ssm_conv1d.weight", "conv_base"))
    writer.add_tensor(name, np.ascontiguousarray(value.astype(np.float32 if is_f32 else np.float16)))


def finish(writer: Any) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def arrays(prefix: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Configuration and tensors as float32 arrays."""
    config, weights = load_weights(prefix)
    return config, {k: v.float().numpy() for k, v in weights.items()}


def export_target(weights: Path, tokenizer: Path, out: Path) -> None:
    """Target, with the MTP head when there is one."""
    config, tensors = arrays(weights / "target")
    named = {target_name(k, config): -np.exp(v) if k.endswith("A_log") else v for k, v in tensors.items()}
    has_mtp = (weights / "mtp.json").exists()
    if has_mtp:
        named |= {mtp_name(k, config): v for k, v in arrays(weights / "mtp")[1].items()}
    writer = gguf.GGUFWriter(str(out), "qwen35")
    writer.add_name("tiny-py-target")
    add_tokenizer(writer, tokenizer)
    add_sizes(writer, config, config["n_layer"] + has_mtp)
    if has_mtp:
        writer.add_nextn_predict_layers(1)
    writer.add_rope_dimension_count(config["n_rot"])
    writer.add_rope_dimension_sections(list(config["rope_sections"]))
    writer.add_ssm_conv_kernel(config["d_conv"])
    writer.add_ssm_state_size(config["gdn_dim"])
    writer.add_ssm_group_count(config["gdn_k_heads"])
    writer.add_ssm_time_step_rank(config["gdn_v_heads"])
    writer.add_ssm_inner_size(config["gdn_dim"] * config["gdn_v_heads"])
    writer.add_full_attention_interval(config["full_attn_interval"])
    for name, value in named.items():
        add_tensor(writer, name, value)
    finish(writer)


def export_draft(prefix: Path, tokenizer: Path, out: Path) -> None:
    """A DFlash or DFlash2 draft."""
    config, tensors = arrays(prefix)
    writer = gguf.GGUFWriter(str(out), "dflash")
    writer.add_name("tiny-py-" + prefix.name)
    add_tokenizer(writer, tokenizer)
    add_sizes(writer, config, config["n_layer"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_dimension_sections([config["head_dim"] // 2, 0, 0, 0])  # an M-RoPE target: temporal positions only
    # by key, since released gguf packages do not know these
    writer.add_uint32("dflash.block_size", config["block_size"])
    writer.add_array("dflash.target_layers", list(config["target_layers"]))
    if config["selector_top_k"]:
        writer.add_uint32("dflash.conv_kernel_size", CONV_TAPS)
        writer.add_uint32("dflash.conv_group_size", config["conv_group_size"])
        writer.add_uint32("dflash.selector_rank", config["selector_rank"])
        writer.add_uint32("dflash.selector_top_k", config["selector_top_k"])
    for name, value in tensors.items():
        add_tensor(writer, draft_name(name), value)
    finish(writer)


def main(argv: Sequence[str] | None = None) -> int:
    """Export whatever weights are there."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weights", type=Path, required=True, help="folder with target, mtp, dflash, dflash2")
    p.add_argument("--tokenizer", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    export_target(args.weights, args.tokenizer, args.out / "tiny-target.gguf")
    for prefix, name in (("dflash", "tiny-draft.gguf"), ("dflash2", "tiny-draft2.gguf")):
        if (args.weights / f"{prefix}.json").exists():
            export_draft(args.weights / prefix, args.tokenizer, args.out / name)
    for path in sorted(args.out.glob("*.gguf")):
        print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
