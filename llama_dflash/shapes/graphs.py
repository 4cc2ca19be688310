"""The graphs that llama.cpp reserves room for, as sizes: src/models/qwen35.cpp, qwen35moe.cpp, delta-net-base.cpp and dflash.cpp.

Only what decides the peak is here. The first layers repeat, so that a model is as many layers as its pattern needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama_dflash.shapes import Attention, DeltaNet, Experts, Selector
from llama_dflash.shapes.arena import Graph, Node


@dataclass(frozen=True)
class Batch:
    """What a graph is reserved for.

    Attributes:
        n_tokens: rows of the batch, all sequences together.
        n_seq: sequences in it.
        n_outputs: rows of logits.
        n_kv: cells that a row may look at, of one sequence.
        n_stream: parts of the cache: one, or one a sequence.
        rotated: K and V are rotated before they are stored (quantised caches).
    """

    n_tokens: int
    n_seq: int
    n_outputs: int
    n_kv: int
    n_stream: int = 1
    rotated_k: bool = False
    rotated_v: bool = False


@dataclass(frozen=True)
class TargetDims:
    """Sizes of a target; `recurrent` says for each layer whether it is a delta net, `taps` which inputs a draft reads."""

    n_embd: int
    n_ff: int
    n_vocab: int
    attention: Attention
    recurrent: tuple[bool, ...]
    delta: DeltaNet | None = None
    experts: Experts | None = None
    taps: frozenset[int] = frozenset()


@dataclass(frozen=True)
class DraftDims:
    """Sizes of a draft; `windowed` says for each layer whether its attention has the sliding window."""

    n_embd: int
    n_ff: int
    n_vocab: int
    attention: Attention
    block_size: int
    windowed: tuple[bool, ...]
    selector: Selector | None = None


class _Inputs:
    """Inputs of attention layers; the mask is what grows with the context."""

    def __init__(self, g: Graph, b: Batch, n_kv: int) -> None:
        rows = (n_kv, b.n_tokens // b.n_stream, 1, b.n_stream)
        self.k_ids = g.leaf(b.n_tokens, item_bytes=8)
        self.v_ids = g.leaf(b.n_tokens, item_bytes=8)
        self.mask = g.leaf(*rows, item_bytes=2)


def _norm(g: Graph, x: Node, shape: tuple[int, ...]) -> Node:
    return g.op(shape, g.op(shape, x, in_place=True), in_place=True)


def _rotated(g: Graph, x: Node, shape: tuple[int, ...], wanted: bool) -> Node:
    return g.view(g.op(shape, g.view(x, shape)), shape) if wanted else x


def _attend(g: Graph, b: Batch, a: Attention, inp: _Inputs, q: Node, k: Node, v: Node) -> Node:
    t = b.n_tokens
    q = _rotated(g, q, (a.head_size, a.n_head, t), b.rotated_k)
    k = _rotated(g, k, (a.head_size, a.n_head_kv, t), b.rotated_k)
    v = _rotated(g, v, (a.head_size, a.n_head_kv, t), b.rotated_v)
    g.expand(q)
    g.expand(v)
    g.expand(k)
    g.store(g.view(k), inp.k_ids)
    g.store(g.view(v), inp.v_ids)
    out = g.op((a.head_size, a.n_head, t), g.view(q), inp.mask)
    flat = g.view(out, (a.head_size * a.n_head, t))
    return _rotated(g, flat, (a.head_size * a.n_head, t), b.rotated_v)


def _swiglu(g: Graph, x: Node, n_ff: int, rows: tuple[int, ...]) -> Node:
    up = g.op((n_ff, *rows), x)
    gate = g.op((n_ff, *rows), x)
    return g.op((n_ff, *rows), gate, up)


def _experts(g: Graph, x: Node, n_embd: int, e: Experts, t: int) -> Node:
    probs = g.op((e.n_expert, t), g.op((e.n_expert, t), x), in_place=True)
    chosen = g.view(g.op((e.n_expert, t), probs))
    weights = g.op((1, e.n_used, t), g.view(probs), chosen)
    total = g.op((1, t), g.op((1, t), g.view(weights, (e.n_used, t))), in_place=True)
    weights = g.view(g.op((e.n_used, t), g.view(weights, (e.n_used, t)), total, in_place=True), (1, e.n_used, t))
    g.expand(weights)
    wide = g.view(x, (n_embd, 1, t))
    up = g.op((e.n_ff, e.n_used, t), wide, chosen)
    gate = g.op((e.n_ff, e.n_used, t), wide, chosen)
    hidden = g.op((e.n_ff, e.n_used, t), gate, up)
    each = g.op((n_embd, e.n_used, t), g.op((n_embd, e.n_used, t), hidden, chosen), weights, in_place=True)
    g.expand(each)
    parts = [g.view(each) for _ in range(e.n_used)]
    for part in parts:
        g.expand(part)
    routed = parts[0]
    for part in parts[1:]:
        routed = g.expand(g.op((n_embd, t), routed, part, in_place=True))
    shared = g.op((n_embd, t), _swiglu(g, x, e.n_ff_shared, (t,)))
    gate = g.op((1, t), g.op((1, t), x), in_place=True)
    shared = g.op((n_embd, t), shared, gate, in_place=True)
    return g.op((n_embd, t), routed, shared, in_place=True)


def _gated_attention(g: Graph, b: Batch, d: TargetDims, inp: _Inputs, pos: Node, x: Node) -> Node:
    a, t = d.attention, b.n_tokens
    q_and_gate = g.op((2 * a.head_size * a.n_head, t), x)
    k = g.op((a.head_size * a.n_head_kv, t), x)
    v = g.op((a.head_size * a.n_head_kv, t), x)
    heads, kv_heads = (a.head_size, a.n_head, t), (a.head_size, a.n_head_kv, t)
    q = _norm(g, g.view(q_and_gate), heads)
    k = _norm(g, g.view(k, kv_heads), kv_heads)
    gate = g.op((a.head_size * a.n_head, t), g.view(q_and_gate))
    q = g.op(heads, q, pos, in_place=True)
    k = g.op(kv_heads, k, pos, in_place=True)
    out = _attend(g, b, a, inp, q, k, g.view(v, kv_heads))
    gate = g.op((a.head_size * a.n_head, t), gate, in_place=True)
    out = g.op((a.head_size * a.n_head, t), out, gate, in_place=True)
    return g.op((d.n_embd, t), out)


def _state(g: Graph, n_state: int, n_seq: int, ids: Node) -> Node:
    state = g.expand(g.op((n_state, n_seq), g.view(ids)))
    g.store(g.op((n_state, 0), g.view(ids)))
    return state


def _delta_net(g: Graph, b: Batch, d: TargetDims, ids: Node, n_snapshots: int, x: Node) -> Node:
    n = d.delta
    assert n is not None
    t, per_seq = b.n_tokens, b.n_tokens // b.n_seq
    n_inner = n.head_size * n.n_head_v
    channels = n_inner + 2 * n.head_size * n.n_head_k
    qkv = g.op((channels, per_seq, b.n_seq), x)
    z = g.op((n_inner, t), x)
    beta = g.op((n.n_head_v, t), g.op((n.n_head_v, t), x), in_place=True)
    alpha = g.op((n.n_head_v, t), x)
    for _ in range(3):
        alpha = g.op((n.n_head_v, t), alpha, in_place=True)
    window = _state(g, (n.conv_kernel - 1) * channels, b.n_seq, ids)
    conv_input = g.op((per_seq + n.conv_kernel - 1, channels, b.n_seq), g.view(window), g.view(qkv))
    for _ in range(n_snapshots + 1):
        g.store(g.view(conv_input))
    state = _state(g, n.head_size * n_inner, b.n_seq, ids)
    mixed = g.op((channels, per_seq, b.n_seq), g.op((channels, per_seq, b.n_seq), conv_input), in_place=True)
    keys = (n.head_size, n.n_head_k, per_seq, b.n_seq)
    q = g.op(keys, g.view(mixed))
    k = g.op(keys, g.view(mixed))
    n_states = (n_snapshots + 1) * n.head_size * n_inner * b.n_seq
    both = g.op((n_inner * t + n_states,), q, k, g.view(mixed), g.view(alpha), g.view(beta), g.view(state))
    wide = (n.head_size, n.n_head_v, per_seq, b.n_seq)
    g.store(g.view(both))
    out = _norm(g, g.view(both, wide), wide)
    out = g.op(wide, out, g.op(wide, g.view(z, wide), in_place=True), in_place=True)
    return g.view(g.op((d.n_embd, t), g.view(out)), (d.n_embd, t))


def target(d: TargetDims, b: Batch, n_snapshots: int = 0) -> Graph:
    """A pass of a prompt through the target.

    Args:
        d: the target's sizes.
        b: the batch.
        n_snapshots: recurrent states that are kept for rollback, the current one not counted.
    """
    g = Graph()
    t, shape = b.n_tokens, (d.n_embd, b.n_tokens)
    tokens = g.leaf(t)
    x = g.expand(g.op(shape, tokens))
    g.expand(g.leaf(*shape))  # embeddings could come in place of tokens
    ids = g.leaf(b.n_seq)
    inp = _Inputs(g, b, b.n_kv)
    pos, out_ids = g.leaf(4 * t), g.leaf(b.n_outputs)
    for i, recurrent in enumerate(d.recurrent):
        if i in d.taps:
            x.is_output = True
        residual = x
        cur = g.expand(_norm(g, x, shape))
        cur = _delta_net(g, b, d, ids, n_snapshots, cur) if recurrent else _gated_attention(g, b, d, inp, pos, cur)
        # Behind attention the sum takes the residual's room: without this, some shapes came out one activation too large.
        terms = (cur, residual) if recurrent else (residual, cur)
        cur = ffn_residual = g.op(shape, *terms, in_place=True)
        cur = _norm(g, cur, shape)
        cur = _experts(g, cur, d.n_embd, d.experts, t) if d.experts else g.op(shape, _swiglu(g, cur, d.n_ff, (t,)))
        x = g.op(shape, cur, ffn_residual, in_place=True)
    x = _norm(g, x, shape)
    x.is_output = True
    rows = g.op((d.n_embd, b.n_outputs), x, out_ids)
    rows.is_output = True
    g.output(g.op((d.n_vocab, b.n_outputs), rows))
    return g


def _conv(g: Graph, x: Node, dynamic: Node, d: DraftDims, b: Batch) -> Node:
    s, t, shape = d.selector, b.n_tokens, (d.n_embd, b.n_tokens)
    assert s is not None
    groups = d.n_embd // s.conv_group
    small = g.op((1, groups, s.conv_kernel, t), g.view(dynamic))
    wide = (s.conv_group, groups, s.conv_kernel, t)
    weights = g.op(wide, g.op(wide, g.view(small)), in_place=True)
    result = None
    for tap in range(s.conv_kernel):
        values = g.view(x, shape) if tap == 0 else g.view(g.op(shape, g.view(x)), shape)
        weight = g.view(g.op((s.conv_group, groups, 1, t), g.view(weights)), shape)
        term = g.op(shape, weight, values, in_place=True)
        result = g.op(shape, result, term, in_place=True) if result else term
    assert result is not None
    return result


def draft(d: DraftDims, b: Batch, n_kv_window: int, n_candidates: int) -> Graph:
    """A pass of drafted blocks through the draft: logits of every row, and the best tokens among them.

    Args:
        d: the draft's sizes.
        b: the batch; `n_outputs` is not read, as every row has logits.
        n_kv_window: cells of the cache of layers with a sliding window.
        n_candidates: tokens that DFlash keeps of every row; DFlash2 keeps its selector's.
    """
    g = Graph()
    a, t, shape = d.attention, b.n_tokens, (d.n_embd, b.n_tokens)
    pos = g.leaf(4 * t)
    full = _Inputs(g, b, b.n_kv)
    windowed = _Inputs(g, b, n_kv_window)
    x = g.op(shape, g.leaf(t))
    heads, kv_heads = (a.head_size, a.n_head, t), (a.head_size, a.n_head_kv, t)
    for is_windowed in d.windowed:
        cur = _norm(g, x, shape)
        dynamic = None
        if d.selector:
            n_dynamic = 2 * d.selector.conv_kernel * (d.n_embd // d.selector.conv_group)
            dynamic = g.op((n_dynamic, t), cur)
            cur = _conv(g, cur, dynamic, d, b)
        q, k, v = (g.op((n * a.head_size, t), cur) for n in (a.n_head, a.n_head_kv, a.n_head_kv))
        q = g.op(heads, _norm(g, g.view(q, heads), heads), pos, in_place=True)
        k = g.op(kv_heads, _norm(g, g.view(k, kv_heads), kv_heads), pos, in_place=True)
        cur = g.op(shape, _attend(g, b, a, windowed if is_windowed else full, q, k, g.view(v, kv_heads)))
        if dynamic:
            cur = _conv(g, cur, dynamic, d, b)
        # Which room the sum takes is what fits the logged sizes of four drafts of each format.
        ffn_in = g.op(shape, *((x, cur) if d.selector else (cur, x)), in_place=True)
        cur = _norm(g, ffn_in, shape)
        if d.selector:
            dynamic = g.op((n_dynamic, t), cur)
            cur = _conv(g, cur, dynamic, d, b)
        cur = g.op(shape, _swiglu(g, cur, d.n_ff, (t,)))
        if d.selector and dynamic:
            cur = _conv(g, cur, dynamic, d, b)
        x = g.op(shape, cur, ffn_in, in_place=True)
    x = _norm(g, x, shape)
    x.is_output = True
    logits = g.output(g.op((d.n_vocab, t), x))
    if not d.selector:
        best = g.op((n_candidates, t), logits)
        probs = g.op((d.n_vocab, t), logits, in_place=True)
        g.output(
            g.op(shape, g.op((2 * n_candidates, t), g.op((n_candidates, t), best), g.op((n_candidates, t), g.view(probs), best)))
        )
    else:
        g.output(g.op(shape, g.op((d.selector.top_k, t), logits)))
    return g


def draft_inject(d: DraftDims, b: Batch, n_taps: int, n_kv_window: int) -> Graph:
    """A pass that turns what the target computed into the draft's K and V."""
    g = Graph()
    a, t = d.attention, b.n_tokens
    pos = g.leaf(4 * t)
    full = _Inputs(g, b, b.n_kv)
    windowed = _Inputs(g, b, n_kv_window)
    fused = _norm(g, g.op((d.n_embd, t), g.leaf(n_taps * d.n_embd, t)), (d.n_embd, t))
    kv_heads = (a.head_size, a.n_head_kv, t)
    for is_windowed in d.windowed:
        inp = windowed if is_windowed else full
        k = g.op((a.n_head_kv * a.head_size, t), fused)
        k = g.op(kv_heads, _norm(g, g.view(k, kv_heads), kv_heads), pos, in_place=True)
        g.store(g.view(k), inp.k_ids)
        g.store(g.view(g.op((a.n_head_kv * a.head_size, t), fused)), inp.v_ids)
    g.output(fused)
    return g
