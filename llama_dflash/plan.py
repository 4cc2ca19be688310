"""How much memory a model needs before it is loaded: each buffer that llama-server makes, and whether a GPU holds them.

Weights, KV caches, recurrent states, snapshots and stash follow from the header by the sizes that llama.cpp allocates. Compute
buffers come from a replay of ggml's allocator on the graphs (`shapes.graphs`), for flash attention, llama.cpp's default batches
(512 rows), and one device that holds all layers.

What is approximated: the graph that checks a draft tree is taken to be smaller than that of a prompt; drafts of DFlash2 are
replayed without their selector, whose tensors are small; where a sum takes the room of one of its terms, the term is chosen by
what fits the logged sizes (comments in `shapes.graphs`). Measured on the CPU, where everything but the drafts' compute buffers
comes out within 1.5 % and those within 3 %; on a GPU the buffers are the same but not measured. What is not derived at all: the
CUDA context and cuBLAS workspace, for which `RESERVE_BYTES` is kept free. Other architectures are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llama_dflash import gguf, memory
from llama_dflash.errors import ModelFileError, UsageError
from llama_dflash.memory import GIB
from llama_dflash.shapes import Attention, DeltaNet, Experts, Selector, find_target, graphs, layout
from llama_dflash.shapes import find as find_shape

N_UBATCH = 512
CELLS_PAD = 256
# The CUDA context and cuBLAS workspace: kept free, not derived.
RESERVE_BYTES = 512 * 2**20
# Tokens that a DFlash draft keeps of each row for trees; a few kB either way.
N_CANDIDATES = 16
TARGET_ARCHS = ("qwen35", "qwen35moe")


@dataclass(frozen=True)
class Model:
    """A header, and the bytes of its tensors by name."""

    facts: gguf.ModelFacts
    tensor_bytes: Mapping[str, int]

    @property
    def weight_bytes(self) -> int:
        """All tensors that are loaded; an MTP head behind the layers is not."""
        first_mtp = self.facts.n_layer
        return sum(
            n for name, n in self.tensor_bytes.items() if not (name.startswith("blk.") and int(name.split(".")[1]) >= first_mtp)
        )

    @property
    def embedding_bytes(self) -> int:
        """The embedding, which stays in the host's memory."""
        return self.tensor_bytes.get("token_embd.weight", 0)

    @property
    def device_weight_bytes(self) -> int:
        """What a GPU holds with all layers on it; an embedding that is the output too is there as well."""
        tied = "output.weight" not in self.facts.tensors
        return self.weight_bytes - (0 if tied else self.embedding_bytes)


def from_file(path: Path) -> Model:
    """Read a GGUF header; raises ModelFileError if it cannot be read."""
    facts = gguf.read(path)
    from gguf import GGUFReader  # slow to import

    return Model(facts, {t.name: int(t.n_bytes) for t in GGUFReader(path).tensors})


def from_shape(name: str, quant: str) -> Model:
    """The file that `synth` would write; raises UsageError for an unknown shape or mix."""
    plan = layout.of(find_shape(name), quant)
    return Model(plan.facts, {t.name: t.n_bytes for t in plan.tensors})


def preset(name: str, quant: str, draft_quant: str, draft_format: str) -> tuple[Model, Model]:
    """A target's shape with its draft's."""
    find_target(name)
    return from_shape(name, quant), from_shape(f"{name}-{draft_format}", draft_quant)


@dataclass(frozen=True)
class Settings:
    """How the models would be run.

    Attributes:
        n_ctx: cells of all slots together, llama-server's -c.
        n_slots: sequences at once, each with its own part of the cache (-np).
        mode: `ar`, `chain` or `tree`.
        rollback: `replay` or `snapshot`; trees need replay.
        n_max: drafted tokens in a row; None is the draft's block size minus one.
        budget: nodes of a tree.
    """

    n_ctx: int
    kv: str = "f16"
    draft_kv: str = "f16"
    n_slots: int = 1
    mode: str = "tree"
    rollback: str = "replay"
    n_max: int | None = None
    budget: int = 15

    def checked(self, draft: Model | None) -> Settings:
        """Return a copy with n_max resolved.

        Raises:
            UsageError: a mode that drafts without a draft, snapshots with trees, an unknown KV type, a number out of range.
        """
        for kind in (self.kv, self.draft_kv):
            if kind not in memory.KV_BYTES:
                raise UsageError(f"KV type {kind!r} is unknown", f"expected one of {', '.join(memory.KV_BYTES)}")
        if self.mode == "ar":
            return replace(self, n_max=0, budget=0)
        if draft is None:
            raise UsageError(f"mode {self.mode} needs a draft, none was given", "pass one with -md FILE, or use --mode ar")
        if self.mode == "tree" and self.rollback == "snapshot":
            raise UsageError("rollback is snapshot in mode tree, expected replay", "a tree keeps no snapshots")
        limit = draft.facts.block_size - 1
        n_max = limit if self.n_max is None else self.n_max
        if not 1 <= n_max <= limit:
            raise UsageError(f"n_max is {n_max}, expected 1..{limit} for this draft", "leave it out for the longest draft")
        return replace(self, n_max=n_max)

    @property
    def n_drafted(self) -> int:
        """Tokens checked in a round beside the first, of one slot; `self` must be checked."""
        n_max = self.n_max or 0
        return 0 if self.mode == "ar" else max(n_max, self.budget) if self.mode == "tree" else n_max

    @property
    def slot_cells(self) -> int:
        """Cells of one slot."""
        return _padded(-(-self.n_ctx // self.n_slots))

    @property
    def n_rows(self) -> int:
        """Rows of the batch that compute buffers are made for."""
        return -(-min(N_UBATCH, self.slot_cells * self.n_slots) // self.n_slots) * self.n_slots


@dataclass(frozen=True)
class Plan:
    """Bytes by buffer: `device` on the GPU, `host` beside it."""

    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """What the GPU holds."""
        return sum(self.device.values())

    def fits(self, gpu_bytes: int) -> bool:
        """Whether a GPU of this size holds it, with RESERVE_BYTES to spare."""
        return self.total_bytes + RESERVE_BYTES <= gpu_bytes


def _padded(n_cells: int) -> int:
    return -(-n_cells // CELLS_PAD) * CELLS_PAD


def _need(facts: gguf.ModelFacts, name: str) -> int:
    value = facts.key(name)
    if not isinstance(value, int):
        raise ModelFileError(f"{facts.path}: {facts.arch}.{name} is {value!r}, expected a number", "use a Qwen3.5 model")
    return value


def _attention(facts: gguf.ModelFacts) -> Attention:
    return Attention(*(_need(facts, f"attention.{name}") for name in ("head_count", "head_count_kv", "key_length")))


def _delta(facts: gguf.ModelFacts) -> DeltaNet:
    names = ("group_count", "time_step_rank", "state_size", "conv_kernel")
    return DeltaNet(*(_need(facts, f"ssm.{name}") for name in names))


def _target_dims(facts: gguf.ModelFacts, taps: frozenset[int]) -> graphs.TargetDims:
    if facts.arch not in TARGET_ARCHS:
        raise ModelFileError(
            f"{facts.path} is a {facts.arch!r} model, expected one of {', '.join(TARGET_ARCHS)}",
            "only their graphs are known here",
        )
    experts = None
    if facts.key("expert_count"):
        names = ("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length")
        experts = Experts(*(_need(facts, name) for name in names))
    recurrent = tuple(f"blk.{i}.ssm_a" in facts.tensors for i in range(facts.n_layer))
    n_ff = 0 if experts else _need(facts, "feed_forward_length")
    return graphs.TargetDims(facts.n_embd, n_ff, facts.n_vocab, _attention(facts), recurrent, _delta(facts), experts, taps)


def _draft_dims(facts: gguf.ModelFacts, n_vocab: int) -> graphs.DraftDims:
    selector = None
    if facts.draft_format == "DFlash2":
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        selector = Selector(*(_need(facts, name) for name in names))
    pattern = facts.key("attention.sliding_window_pattern") if facts.key("attention.sliding_window") else None
    windowed = tuple(bool(x) for x in pattern) if pattern else (False,) * facts.n_layer
    n_ff = _need(facts, "feed_forward_length")
    return graphs.DraftDims(facts.n_embd, n_ff, n_vocab, _attention(facts), facts.block_size, windowed, selector)


def state_bytes(d: graphs.TargetDims) -> int:
    """One recurrent state: the convolution's window and the delta net's matrices of every layer."""
    n = d.delta
    assert n is not None
    n_inner = n.head_size * n.n_head_v
    channels = n_inner + 2 * n.head_size * n.n_head_k
    return 4 * sum(d.recurrent) * ((n.conv_kernel - 1) * channels + n.head_size * n_inner)


def stash_bytes(d: graphs.TargetDims, n_nodes: int, n_slots: int) -> int:
    """Convolution input, k, v, gate and beta of every node of every slot, and one row for the padding."""
    n = d.delta
    assert n is not None
    n_inner, n_keys = n.head_size * n.n_head_v, n.head_size * n.n_head_k
    row = (n_inner + 2 * n_keys) + n_keys + n_inner + 2 * n.n_head_v
    return 4 * sum(d.recurrent) * row * (n_nodes * n_slots + 1)


def _batch(s: Settings, kv: str, n_outputs: int) -> graphs.Batch:
    rotated = kv not in ("f32", "f16", "bf16")  # quantised caches hold rotated values
    return graphs.Batch(s.n_rows, s.n_slots, min(s.n_rows, n_outputs), s.slot_cells, s.n_slots, rotated, rotated)


def _draft_parts(draft: Model, s: Settings, n_vocab: int) -> dict[str, int]:
    d = _draft_dims(draft.facts, n_vocab)
    n_window = int(draft.facts.key("attention.sliding_window") or 0)
    window_cells = min(s.slot_cells, _padded(n_window + N_UBATCH)) if n_window else s.slot_cells
    values = 2 * d.attention.n_head_kv * d.attention.head_size * memory.KV_BYTES[s.draft_kv]
    cells = sum(window_cells if windowed else s.slot_cells for windowed in d.windowed)
    batch = _batch(s, s.draft_kv, s.n_rows)
    drafting = graphs.draft(d, batch, window_cells, N_CANDIDATES).peak_bytes()
    injecting = graphs.draft_inject(d, batch, len(draft.facts.target_layers), window_cells).peak_bytes()
    return {
        "draft_weights": draft.device_weight_bytes,
        "draft_kv": int(values * cells) * s.n_slots,
        "draft_compute": max(drafting, injecting),
    }


def make(target: Model, draft: Model | None, settings: Settings) -> Plan:
    """Every buffer of a run.

    Raises:
        ModelFileError: not a Qwen3.5 model, or not a draft.
        UsageError: settings that do not go together.
    """
    facts = target.facts.require_target()
    if draft is not None:
        draft.facts.require_draft()
    s = settings.checked(draft)
    drafts = draft is not None and s.mode != "ar"
    taps = frozenset(draft.facts.target_layers) if draft is not None and drafts else frozenset()
    d = _target_dims(facts, taps)
    n_snapshots = s.n_drafted if drafts and s.rollback == "snapshot" else 0
    n_outputs = s.n_slots * (1 + s.n_drafted)
    device = {
        "weights": target.device_weight_bytes,
        "kv": memory.kv_bytes(facts, s.slot_cells * s.n_slots, s.kv, s.kv),
        "recurrent_state": state_bytes(d) * s.n_slots,
        "snapshots": state_bytes(d) * s.n_slots * n_snapshots,
        "stash": stash_bytes(d, 1 + s.n_drafted, s.n_slots) if drafts and not n_snapshots else 0,
        "compute": graphs.target(d, _batch(s, s.kv, n_outputs), n_snapshots).peak_bytes(),
    }
    if draft is not None and drafts:
        device |= _draft_parts(draft, s, d.n_vocab)
    host = {"embedding": target.embedding_bytes, "logits": 4 * n_outputs * d.n_vocab}
    return Plan(device, host)


def largest_context(target: Model, draft: Model | None, settings: Settings, gpu_bytes: int) -> int:
    """Most cells that fit, a multiple of 1024 up to what the model was trained for; 0 if none do."""
    low, high = 0, max(1, int(target.facts.key("context_length") or 0) // 1024)
    while low < high:
        middle = (low + high + 1) // 2
        if make(target, draft, replace(settings, n_ctx=middle * 1024)).fits(gpu_bytes):
            low = middle
        else:
            high = middle - 1
    return low * 1024


def _kv_names(settings: Settings) -> tuple[str, ...]:
    return ("kv",) if settings.mode == "ar" else ("kv", "draft_kv")


def advice(target: Model, draft: Model | None, settings: Settings, gpu_bytes: int) -> str:
    """One line: the least change that makes it fit, in the order replay, KV type, context, no draft; or that nothing does."""
    changes: list[tuple[str, dict[str, Any]]] = []
    if settings.mode == "chain" and settings.rollback == "snapshot":
        changes.append(("roll back by replay instead of snapshots (--rollback replay)", {"rollback": "replay"}))
    for kind in ("q8_0", "q4_0"):
        larger = [name for name in _kv_names(settings) if memory.KV_BYTES[kind] < memory.KV_BYTES[getattr(settings, name)]]
        if larger:
            flags = " ".join(f"--{name.replace('_', '-')} {kind}" for name in larger)
            changes.append((f"use a smaller KV type ({flags})", dict.fromkeys(larger, kind)))
    tried = settings
    words: list[str] = []
    for text, change in changes:
        tried = replace(tried, **change)
        words = [text] if text.startswith("use a smaller") and words and words[-1].startswith("use a smaller") else [*words, text]
        if make(target, draft, tried).fits(gpu_bytes):
            return " and ".join(words)
    if n_ctx := largest_context(target, draft, settings, gpu_bytes):
        return f"shorten the context to {n_ctx} tokens (--ctx {n_ctx})"
    if n_ctx := largest_context(target, draft, tried, gpu_bytes):
        return " and ".join([*words, f"shorten the context to {n_ctx} tokens (--ctx {n_ctx})"])
    plain = replace(tried, mode="ar")
    if settings.mode != "ar" and (n_ctx := largest_context(target, None, plain, gpu_bytes)):
        return f"run without a draft (--mode ar) with up to {n_ctx} tokens"
    return f"take a smaller mix or model: its weights alone need {target.device_weight_bytes / GIB:.1f} GiB"
