"""Dimensions of Qwen3.5 targets and of DFlash drafts, and where each figure comes from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llama_dflash.errors import UsageError

N_VOCAB = 248320
N_CTX_TRAIN = 262144
MASK_TOKEN_ID = 248070
# Layers of a target whose inputs a draft reads; drafts of shrunk targets read as many where there are enough.
N_TAPS = 5


@dataclass(frozen=True)
class Attention:
    """Full attention: query heads, key/value heads, width of a head."""

    n_head: int
    n_head_kv: int
    head_size: int


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net: key heads, value heads, width of a head (of keys and of values), taps of the convolution."""

    n_head_k: int
    n_head_v: int
    head_size: int = 128
    conv_kernel: int = 4


@dataclass(frozen=True)
class Experts:
    """Experts of a layer: how many, how many a token uses, widths of a routed one and of the shared one."""

    n_expert: int
    n_used: int
    n_ff: int
    n_ff_shared: int


@dataclass(frozen=True)
class TargetShape:
    """A Qwen3.5 text model; every `interval`-th layer is full attention, the others gated delta net.

    Attributes:
        name: what the command line calls it.
        n_ff: width of the dense feed-forward part; unused with experts.
        tied: the output matrix is the embedding.
        source: where the figures come from.
    """

    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    attention: Attention
    delta: DeltaNet
    source: str
    experts: Experts | None = None
    tied: bool = False
    interval: int = 4
    n_vocab: int = N_VOCAB
    n_ctx_train: int = N_CTX_TRAIN

    @property
    def arch(self) -> str:
        """`general.architecture`."""
        return "qwen35moe" if self.experts else "qwen35"

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps a recurrent state instead of a KV cache."""
        return (layer + 1) % self.interval != 0

    def shrunk(self, n_layer: int) -> TargetShape:
        """The same with fewer layers.

        Raises:
            UsageError: not a positive multiple of the interval of attention layers.
        """
        if n_layer < self.interval or n_layer % self.interval or n_layer > self.n_layer:
            raise UsageError(
                f"{n_layer} layers for {self.name}, expected a multiple of {self.interval} up to {self.n_layer}: "
                f"every {self.interval}th layer is attention",
                f"such as {self.interval}",
            )
        return replace(self, n_layer=n_layer)


@dataclass(frozen=True)
class Selector:
    """What DFlash2 adds: convolutions over the block, and a selector among the candidates of each position."""

    conv_kernel: int = 2
    conv_group: int = 16
    rank: int = 256
    top_k: int = 16


@dataclass(frozen=True)
class DraftShape:
    """A DFlash draft; it shares the target's embedding and output.

    Attributes:
        target_layers: layers of the target whose inputs it reads: the checkpoint's target_layer_ids plus one.
        block_size: tokens of a block, the anchor included.
        window: sliding window of its attention in tokens; 0 is full attention.
        selector: set for DFlash2.
    """

    name: str
    target: str
    n_layer: int
    n_embd: int
    n_ff: int
    attention: Attention
    target_layers: tuple[int, ...]
    source: str
    block_size: int = 16
    window: int = 0
    selector: Selector | None = None
    n_vocab: int = N_VOCAB
    mask_token_id: int = MASK_TOKEN_ID
    n_ctx_train: int = N_CTX_TRAIN
    arch: str = "dflash"

    def shrunk(self, n_layer: int) -> DraftShape:
        """The same for a target of fewer layers: only the layers that it reads change."""
        last = n_layer - 1
        taps = sorted({round(1 + i * (last - 1) / (N_TAPS - 1)) for i in range(N_TAPS)})
        return replace(self, target_layers=tuple(taps))


_SLIME = "THUDM/slime scripts/models/{}, after Qwen's config.json"
_DELTA_LOG = "delta net heads from load logs of the GGUF files"

TARGETS = (
    TargetShape(
        "qwen3.5-0.8b", 24, 1024, 3584, Attention(8, 2, 256), DeltaNet(16, 16), tied=True,
        source=_SLIME.format("qwen3.5-0.8B.sh") + "; delta net heads from the pin's 0.8B test shape; Q8_0 file size agrees",
    ),
    TargetShape(
        "qwen3.5-4b", 32, 2560, 9216, Attention(16, 4, 256), DeltaNet(16, 32), tied=True,
        source="tensor list of the GGUF file in huggingface/candle#3821 and load log in lemonade-sdk/llamacpp-rocm#75; "
        "tied by SpecForge configs/qwen3.5-4b-vl-dflash.json; Q8_0 file size agrees",
    ),
    TargetShape(
        "qwen3.5-9b", 32, 4096, 12288, Attention(16, 4, 256), DeltaNet(16, 32),
        source="load log of the GGUF file in noamsto/nix-amd-ai#7; delta net heads from ggml-org/llama.cpp#22673; Q8_0 file size agrees",
    ),
    TargetShape(
        "qwen3.5-27b", 64, 5120, 17408, Attention(24, 4, 256), DeltaNet(16, 48),
        source=_SLIME.format("qwen3.5-27B.sh") + "; " + _DELTA_LOG + " (ggml-org/llama.cpp#22105); Qwen3.6 and 3.8 27B are the same",
    ),
    TargetShape(
        "qwen3.5-35b-a3b", 40, 2048, 512, Attention(16, 2, 256), DeltaNet(16, 32), experts=Experts(256, 8, 512, 512),
        source=_SLIME.format("qwen3.5-35B-A3B.sh") + "; " + _DELTA_LOG + " (ikawrakow/ik_llama.cpp#1363)",
    ),
)  # fmt: skip

_HEADS = Attention(32, 8, 128)
_TAPS_32 = (2, 9, 16, 23, 30)
# z-lab published DFlash2 for Qwen3.8-27B alone; the others take its block, window and selector.
_LIKE_27B = "block, window and selector as in the published 27B DFlash2; width and layers of {}"


def _dflash2(draft: DraftShape, target_layers: tuple[int, ...], source: str) -> DraftShape:
    return replace(
        draft, name=f"{draft.name}2", block_size=8, window=2048, selector=Selector(), target_layers=target_layers, source=source
    )


_DFLASH = (
    DraftShape(
        "qwen3.5-0.8b-dflash", "qwen3.5-0.8b", 5, 1024, 3584, _HEADS, (2, 7, 12, 17, 22),
        source="no config is published: heads, block and number of layers as z-lab's 9B draft, widths as the target, layers evenly spread",
    ),
    DraftShape(
        "qwen3.5-4b-dflash", "qwen3.5-4b", 5, 2560, 9216, _HEADS, _TAPS_32,
        source="widths, block and target layers from SpecForge configs/qwen3.5-4b-vl-dflash.json (16/4 heads of 256 there); "
        "heads taken from z-lab's 9B draft: z-lab's own 4B config was not seen",
    ),
    DraftShape(
        "qwen3.5-9b-dflash", "qwen3.5-9b", 5, 4096, 12288, _HEADS, _TAPS_32,
        source="config.json of z-lab/Qwen3.5-9B-DFlash as quoted in public loader tests",
    ),
    DraftShape(
        "qwen3.5-27b-dflash", "qwen3.5-27b", 5, 5120, 17408, _HEADS, (2, 17, 32, 47, 62),
        source="config.json of z-lab/Qwen3.5-27B-DFlash as quoted in public loaders; file sizes agree",
    ),
    DraftShape(
        "qwen3.5-35b-a3b-dflash", "qwen3.5-35b-a3b", 8, 2048, 6144, Attention(32, 4, 128), (2, 11, 20, 29, 38),
        source="config.json of z-lab's 35B-A3B DFlash draft as quoted in public loader tests (Qwen3.5 and 3.6)",
    ),
)  # fmt: skip
DRAFTS = tuple(
    draft
    for dflash in _DFLASH
    for draft in (
        dflash,
        _dflash2(
            dflash,
            (6, 20, 34, 48, 62) if dflash.target == "qwen3.5-27b" else dflash.target_layers,
            "config.json of z-lab/Qwen3.8-27B-DFlash2 as quoted in public loaders"
            if dflash.target == "qwen3.5-27b"
            else "no config is published: " + _LIKE_27B.format(dflash.name),
        ),
    )
)
SHAPES: dict[str, TargetShape | DraftShape] = {s.name: s for s in TARGETS} | {s.name: s for s in DRAFTS}


def find(name: str) -> TargetShape | DraftShape:
    """The shape `name`.

    Raises:
        UsageError: there is none.
    """
    if name not in SHAPES:
        raise UsageError(f"shape {name!r} is unknown", f"expected one of {', '.join(SHAPES)}")
    return SHAPES[name]


def find_target(name: str) -> TargetShape:
    """The target's shape `name`; raises UsageError if there is none or it is a draft's."""
    shape = find(name)
    if not isinstance(shape, TargetShape):
        raise UsageError(f"{name} is a draft's shape, expected a target's", f"such as {shape.target}")
    return shape
