"""The PyTorch side of scripts/train_tiny: chunked against stepwise, unrolled against cached, licences, packing."""

from __future__ import annotations

import heapq
import sys
from email.message import Message
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch, which the test environment does not install")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from train_tiny import corpus, draft, gdn, grow, mtp, pool, record, refine_target, target, training, trees  # noqa: E402


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def model() -> target.Target:
    """A small target in evaluation mode."""
    return target.Target(target.SMALL).eval().requires_grad_(False)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def test_unit_lower_inverse_and_its_gradient() -> None:
    lower = (torch.randn(3, gdn.CHUNK, gdn.CHUNK, dtype=torch.float64).tril(-1) * 0.5).requires_grad_()
    eye = torch.eye(gdn.CHUNK, dtype=torch.float64)
    ours, exact = gdn.UnitLowerInverse.apply(lower), torch.linalg.inv(eye + lower.tril(-1))
    assert relative(ours, exact) < 1e-10
    weight = torch.randn_like(ours)
    (g1,), (g2,) = torch.autograd.grad((ours * weight).sum(), lower), torch.autograd.grad((exact * weight).sum(), lower)
    assert relative(g1, g2.tril(-1)) < 1e-9


def test_chunked_delta_net_equals_steps() -> None:
    n, dim, n_k, n_v = 2 * gdn.CHUNK, 8, 2, 4
    q, k = (torch.nn.functional.normalize(torch.randn(2, n, n_k, dim), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(2, n, n_v, dim), -torch.rand(2, n, n_v), torch.rand(2, n, n_v)
    out, state = gdn.gdn_chunked(q, k, v, g, beta)
    s = torch.zeros(2, n_v, dim, dim)
    for t in range(n):
        o, s = gdn.gdn_step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], s)
        assert relative(out[:, t], o) < 1e-4
    assert relative(state, s) < 1e-4


@pytest.mark.parametrize("n_prompt", [1, 2, 33, 40])
def test_target_steps_equal_the_whole_sequence(model: target.Target, n_prompt: int) -> None:
    ids = torch.randint(0, model.c.n_vocab, (2, 50))
    whole = model.head(model(ids)[0])
    cache = model.new_cache(2, 64, "cpu", torch.float32)
    model(ids[:, :n_prompt], cache=cache)
    for i in range(n_prompt, 50):
        logits, _ = model.step(ids[:, i], cache, torch.tensor([i]))
        assert relative(logits, whole[:, i]) < 1e-4


def test_taps_are_layer_inputs(model: target.Target) -> None:
    ids = torch.randint(0, model.c.n_vocab, (1, 7))
    _, taps = model(ids, taps=(0, 2))
    assert torch.equal(taps[0], model.embed(ids))
    x = taps[0]
    for block in model.blocks[:2]:
        x = block(x, torch.arange(7))
    assert torch.equal(taps[1], x)


def mtp_by_cache(
    head: mtp.MtpHead, embedded: torch.Tensor, hidden: torch.Tensor, anchor: int, n_steps: int
) -> list[torch.Tensor]:
    """What llama.cpp does: confirmed positions once, then one drafted token after the other on the growing cache."""
    first: list[tuple[torch.Tensor, torch.Tensor]] = []
    out = head.step(embedded[:, : anchor + 1], mtp.shift(hidden)[:, : anchor + 1], first)
    (k, v), outs = first[0], [out[:, anchor]]
    for s in range(1, n_steps):
        p = anchor + s
        x = head.eh_proj(torch.cat([head.enorm(embedded[:, p : p + 1]), head.hnorm(outs[-1][:, None])], -1))
        q, k1, v1, gate = head.mix.project(head.attn_norm(x), torch.tensor([p]))
        k, v = torch.cat([k, k1], 2), torch.cat([v, v1], 2)
        r = head.c.n_head // head.c.n_head_kv
        full = [t.repeat_interleave(r, 1) for t in (k, v)]
        o = torch.nn.functional.scaled_dot_product_attention(q, *full)
        x = x + head.mix.out(o.transpose(1, 2).flatten(2) * torch.sigmoid(gate))
        outs.append(head.head_norm(x + head.ffn(head.post_norm(x)))[:, 0])
    return outs


def test_unrolled_mtp_equals_the_cached_one(model: target.Target) -> None:
    ids = torch.randint(0, model.c.n_vocab, (2, 20))
    head = mtp.MtpHead(model.c).eval().requires_grad_(False)
    embedded, hidden = model.embed(ids), model(ids)[0]
    unrolled = head.unroll(embedded, hidden, 4)
    for anchor in (0, 5, 15):
        for s, expected in enumerate(mtp_by_cache(head, embedded, hidden, anchor, 4)):
            assert relative(unrolled[s][:, anchor + s], expected) < 1e-4


@pytest.fixture(params=[0, 7], ids=["dflash", "dflash2"])
def small_draft(request: pytest.FixtureRequest) -> draft.Draft:
    """A small draft of either kind, its convolutions away from the identity."""
    c = draft.DraftConfig(n_embd=64, n_layer=2, n_head=2, n_head_kv=1, head_dim=32, n_ff=64, target_layers=(1, 2, 3),
                          selector_rank=8, selector_top_k=request.param)  # fmt: skip
    made = draft.Draft(c).eval().requires_grad_(False)
    for name, p in made.named_parameters():
        if "conv" in name:
            p.add_(torch.randn_like(p) * 0.3)
    return made


def test_blocks_see_their_context_and_themselves_only(small_draft: draft.Draft) -> None:
    n_ctx, size = 24, 8
    features, anchors = torch.randn(1, n_ctx, 3 * 64), torch.tensor([[5, 12]])
    embedded = torch.randn(1, 2, size, 64)
    both = small_draft(embedded, features, anchors)
    alone = small_draft(embedded[:, 1:], features, anchors[:, 1:])
    assert relative(both[:, 1:], alone) < 1e-5
    changed = features.clone()
    changed[:, 12:] = 7.0  # from the second anchor on
    assert torch.equal(small_draft(embedded, changed, anchors), both)
    changed[:, 11] = 7.0
    other = small_draft(embedded, changed, anchors)
    assert relative(other[:, :1], both[:, :1]) < 1e-5
    assert relative(other[:, 1:], both[:, 1:]) > 1e-3


def test_convolution_stays_in_its_block() -> None:
    taps = torch.stack([torch.full((1, 2, 3, 4), 2.0), torch.full((1, 2, 3, 4), 10.0)])
    x = torch.arange(1.0, 7.0).view(1, 2, 3, 1).expand(-1, -1, -1, 4)
    out = draft.BlockConv.apply_taps(x, taps)[..., 0]
    assert out.tolist() == [[[2.0, 14.0, 26.0], [8.0, 50.0, 62.0]]]


def test_block_ids_hold_the_anchor_and_masks() -> None:
    ids = torch.arange(20).view(2, 10)
    block = draft.block_ids(ids, torch.tensor([[3, 4], [0, 9]]), 4, 99)
    assert block[0].tolist() == [[3, 99, 99, 99], [4, 99, 99, 99]]
    assert block[1].tolist() == [[10, 99, 99, 99], [19, 99, 99, 99]]


def test_soft_loss_is_the_hard_one_for_greedy_text() -> None:
    logits, teacher = torch.randn(4, 11), torch.randn(4, 11)
    labels = torch.randint(0, 11, (4,))
    temperature = torch.tensor([0.0, 0.0, 0.8, 0.8])
    loss, _, known = training.soft_cross_entropy(logits, labels, teacher, temperature)
    assert torch.allclose(known, logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0], atol=1e-6)
    hard = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert torch.allclose(loss[:2], hard[:2])
    soft = -((teacher / 0.8).softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert torch.allclose(loss[2:], soft[2:], atol=1e-5)


def test_slot_weights_of_chain_and_tree() -> None:
    correct, known = torch.tensor([[True, False, True, True]]), torch.tensor([[0.9, 0.2, 0.5, 0.9]]).log()
    chain = training.slot_weights(correct, known, 1e9, 0.25)
    assert torch.allclose(chain, torch.tensor([[1.25, 1.25, 0.25, 0.25]]))
    tree = training.slot_weights(correct, known, 1e9, 0.25, tree_share=1.0)  # 0.9, 0.18, 0.09: still held; 0.081 too
    assert torch.allclose(tree, torch.tensor([[1.25, 1.25, 1.25, 1.25]]))
    rare = training.slot_weights(correct, torch.tensor([[0.9, 0.05, 0.5, 0.9]]).log(), 1e9, 0.25, tree_share=0.5)
    assert torch.allclose(rare, torch.tensor([[1.25, 1.25, 0.25, 0.25]]))


def by_heap(c: grow.Candidates, a: int, shape: grow.TreeShape, max_depth: int, budget: int) -> list[list[int]]:
    """common/spec-tree.cpp word for word, for one anchor: paths of candidate indices in the order taken."""
    n_slots, n_rows = c.logp.shape[1:3]
    paths: list[list[int]] = [[]]
    logps, heap = [0.0], []

    def children(node: int) -> list[tuple[float, int]]:
        depth = len(paths[node])
        if depth >= min(max_depth, n_slots):
            return []
        row = (paths[node][-1] if paths[node] else 0) % n_rows
        return list(zip(c.logp[a, depth, row].tolist(), c.index[a, depth, row].tolist(), strict=True))[: shape.top_k]

    def push(node: int, rank: int) -> None:
        if rank < len(children(node)):
            heapq.heappush(heap, (-(logps[node] + children(node)[rank][0]), node, -rank))

    def take(node: int, rank: int) -> None:
        logp, index = children(node)[rank]
        paths.append([*paths[node], int(index)])
        logps.append(logps[node] + logp)
        push(node, rank + 1)

    while len(paths) - 1 < min(shape.spine, budget) and children(len(paths) - 1):
        take(len(paths) - 1, 0)
    push(len(paths) - 1, 0)
    while len(paths) - 1 < budget and heap:
        _, node, rank = heapq.heappop(heap)
        take(node, -rank)
        push(len(paths) - 1, 0)
    return paths[1:]


@pytest.mark.parametrize("n_rows", [1, 5], ids=["unary", "pairwise"])
@pytest.mark.parametrize(
    "shape", [grow.TreeShape(5), grow.TreeShape(2), grow.TreeShape(3, 2), grow.TreeShape(5, 20), grow.TreeShape(1)]
)
def test_trees_are_those_of_the_heap(n_rows: int, shape: grow.TreeShape) -> None:
    rng, n, n_slots, budget = np.random.default_rng(4), 60, 6, 20
    scores = np.log(rng.dirichlet(np.ones(5), (n, n_slots, n_rows)).round(1) + 0.05)  # rounding makes ties
    c = grow.Candidates.sort(torch.from_numpy(scores), torch.from_numpy(rng.integers(-1, 3, (n, n_slots))))
    max_depth = torch.from_numpy(rng.integers(0, n_slots + 2, n))
    held = grow.held_by_budget(c, shape, max_depth, budget)
    for a in range(n):
        paths = by_heap(c, a, shape, int(max_depth[a]), budget)
        truth = c.truth[a].tolist()
        for b in range(budget + 1):
            expected = max((len(p) for p in paths[:b] if p == truth[: len(p)]), default=0)
            assert held[a, b] == expected, (a, b)


def test_a_chain_is_the_tree_of_one_child() -> None:
    rng = np.random.default_rng(5)
    scores, truth = np.log(rng.dirichlet(np.ones(4), (30, 5, 1))), rng.integers(0, 2, (30, 5))
    c = grow.Candidates.sort(torch.from_numpy(scores), torch.from_numpy(truth))
    held = grow.held_by_budget(c, grow.TreeShape(1), torch.full((30,), 5), 5)[:, -1]
    assert held.tolist() == (c.index[:, :, 0, 0] == c.truth).cumprod(1).sum(1).tolist()


def test_rounds_stop_where_llama_cpp_stops() -> None:
    assert trees.room(6, 15).tolist() == [4, 3, 2, 1, 0]  # with 5 tokens to go at most 4 drafts
    accepted = np.array([[2, 9, 9, 1, 0], [0, 0, 0, 0, 0]])
    assert trees.play(accepted) == [[2, 1], [0, 0, 0, 0, 0]]
    rounds, per_slot = trees.count_rounds(accepted, 9)
    assert (rounds.tolist(), per_slot.tolist()) == ([2, 5], [2, 1, 0, 0, 0, 0, 0, 0, 0])


def test_texts_of_different_prompts_are_written_together(model: target.Target) -> None:
    prompts = [torch.randint(0, 4000, (2, 5)), torch.randint(0, 4000, (1, 40))]
    for texts, alone in zip(record.write_texts(model, prompts, 0.0, 12, 3), prompts, strict=True):
        assert torch.equal(texts.ids, record.write_texts(model, [alone], 0.0, 12, 3)[0].ids)
        best = pool.bar_end(model.head(model(texts.ids)[0])).argmax(-1)
        assert torch.equal(texts.ids[:, texts.n_prompt :], best[:, texts.n_prompt - 1 : -1])


def test_repeats_marks_what_the_rate_counts() -> None:
    rng = np.random.default_rng(6)
    ids = torch.from_numpy(np.concatenate([rng.integers(0, 3, (2, 40)), np.tile(np.arange(10), (2, 4))], 1))
    for first in (0, 7):
        marked = refine_target.repeats(ids, torch.tensor([first, first]), 4)
        for row, text in zip(marked, ids[:, first:].tolist(), strict=True):
            assert float(row.sum()) == pytest.approx(trees.repetition_rate(text, 4) * (len(text) - 3))


def test_recorded_chain_is_the_greedy_one(model: target.Target, small_draft: draft.Draft) -> None:
    prompts = [torch.randint(0, 4000, (1, 5)), torch.randint(0, 4000, (2, 9))]
    texts = record.write_texts(model, prompts, 0.8, 10, 8)[1]
    assert int(texts.ids.max()) < corpus.END_ID
    features = record.features_of_texts(model, texts, small_draft.c.target_layers)
    found = record.record_draft(model, small_draft, texts, 8, features)
    held = grow.held_by_budget(found.pair or found.single, grow.TreeShape(1), torch.full((18,), 7), 7)[:, -1].view(2, 9)
    for t in range(2):
        ids = texts.ids[t : t + 1]
        taps = torch.cat(model(ids, taps=small_draft.c.target_layers)[1], -1)
        for i, at in enumerate(texts.anchors.tolist()):
            anchor = torch.tensor([[at]])
            hidden = small_draft(model.embed(draft.block_ids(ids, anchor, 8, small_draft.c.mask_id)), taps, anchor)[0, 0, 1:]
            before, drafted = int(ids[0, at]), []
            for h in hidden:
                values, best = model.head(h).topk(small_draft.c.selector_top_k or 1)
                if small_draft.selector is not None:
                    values = values + small_draft.selector.next[best] @ small_draft.selector.condition(h, torch.tensor(before))
                before = int(best[values.argmax()])
                drafted.append(before)
            right = [a == b for a, b in zip(drafted, ids[0, at + 1 :].tolist(), strict=False)]
            assert held[t, i] == ([*right, False].index(False))


def test_generator_continues_like_the_whole_sequence(model: target.Target) -> None:
    prompts = torch.randint(0, model.c.n_vocab, (3, 9))
    text = pool.Generator(model, 3, 20).run(prompts, torch.zeros(3)).long()
    best = pool.bar_end(model.head(model(text)[0])).argmax(-1)
    assert torch.equal(text[:, 9:], best[:, 8:-1])


def test_weights_survive_saving(model: target.Target, tmp_path: Path) -> None:
    training.save_model(model, tmp_path / "t", model.c)
    again = training.load_model(target.Target, target.TargetConfig, tmp_path / "t", "cpu")
    assert again.c == model.c
    for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-6), name


def licence(*classifiers: str, text: str = "") -> str:
    meta = Message()
    meta["License"] = text
    for c in classifiers:
        meta["Classifier"] = f"License :: OSI Approved :: {c}"
    return corpus.licence_of(meta)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (licence("MIT License"), True),
        (licence(text="BSD-3-Clause"), True),
        (licence("Apache Software License", "GNU Lesser General Public License v3 (LGPLv3)"), False),
        (licence("Mozilla Public License 2.0 (MPL 2.0)"), False),
        (licence(text="LGPL-3.0-only"), False),
        (licence(text="MIT OR GPL-2.0"), False),
        (licence(), False),
    ],
)
def test_licence_filter(said: str, expected: bool) -> None:
    assert corpus.is_permissive(said) is expected


def test_near_copies_are_dropped_and_held_packages_come_last() -> None:
    lines = [f"value_{i} = compute_something({i}, {i * i})" for i in range(30)]
    first = corpus.Package("a", "1", "MIT", [("a.py", "\n".join(lines))])
    copy = corpus.Package(
        "b", "1", "MIT", [("b.py", "\n".join([*lines[:20], *(f"other_line_number_{i} = {i}" for i in range(10))]))]
    )
    assert corpus.drop_copies([first, copy]) == 1
    assert len(first.files) + len(copy.files) == 1


def test_packing_round_trip(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 4096, 10_000).astype(np.int16)
    corpus.pack(ids, tmp_path / "x.xz")
    assert np.array_equal(corpus.unpack(tmp_path / "x.xz"), ids)
