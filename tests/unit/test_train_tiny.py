"""The PyTorch side of scripts/train_tiny: chunked against stepwise, unrolled against cached, licences, packing."""

from __future__ import annotations

import sys
from email.message import Message
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch, which the test environment does not install")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from train_tiny import corpus, draft, gdn, mtp, pool, target, training  # noqa: E402


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


def mtp_by_cache(head: mtp.MtpHead, embedded: torch.Tensor, hidden: torch.Tensor, anchor: int, n_steps: int) -> list[torch.Tensor]:
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
    loss, _ = training.soft_cross_entropy(logits, labels, teacher, temperature)
    hard = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert torch.allclose(loss[:2], hard[:2])
    soft = -((teacher / 0.8).softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert torch.allclose(loss[2:], soft[2:], atol=1e-5)


def test_prefix_weights_fall_when_an_earlier_slot_is_wrong() -> None:
    weight = training.prefix_weights(torch.tensor([[True, False, True]]), 1e9, 0.25)
    assert weight.tolist() == [[1.25, 1.25, 0.25]]


def test_generator_continues_like_the_whole_sequence(model: target.Target) -> None:
    prompts = torch.randint(0, model.c.n_vocab, (3, 9))
    text = pool.Generator(model, 3, 20).run(prompts, torch.zeros(3)).long()
    best = model.head(model(text)[0]).argmax(-1)
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
    copy = corpus.Package("b", "1", "MIT", [("b.py", "\n".join([*lines[:20], *(f"other_line_number_{i} = {i}" for i in range(10))]))])
    assert corpus.drop_copies([first, copy]) == 1
    assert len(first.files) + len(copy.files) == 1


def test_packing_round_trip(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 4096, 10_000).astype(np.int16)
    corpus.pack(ids, tmp_path / "x.xz")
    assert np.array_equal(corpus.unpack(tmp_path / "x.xz"), ids)
