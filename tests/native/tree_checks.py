"""What the tree tests assert beyond scripts of steps, as functions that run in a worker against any build."""

from __future__ import annotations

import dataclasses

import numpy as np
from tree_lib import Batch, Context, Params, Tree, chain, native, tree_function
from tree_player import Player, Reference, Step, Tokens, play

PROMPT: Tokens = tuple((i * i * 7 + 3 * i + 11) % 300 for i in range(40))
STAR = Tree((5, 6, 7, 8), (0, 0, 0, 0))
BUSHY = Tree((5, 9, 17, 9, 33, 9, 21, 2, 60), (0, 0, 0, 1, 1, 2, 3, 3, 6))  # siblings and cousins share tokens


def harness(path: str, params: Params) -> None:
    """Without a tree: batches equal one-by-one decoding, copies equal fresh contexts, and nothing is degenerate."""
    ref, fresh = Reference(path, params), Reference(path, params, fresh=True)
    tokens = [*PROMPT, *range(100, 220)]
    with Context(path, dataclasses.replace(params, tree=0)) as ctx:
        single = ctx.plain(0, tokens, n_batch=1)
        state = ctx.state(0)
        for width in (2, 33, 128):
            ctx.clear()
            assert np.array_equal(ctx.plain(0, tokens, n_batch=width), single), f"width {width}"
            assert ctx.state(0) == state, f"state after width {width}"
        if not ctx.shares_window:
            ctx.plain(1, tokens, n_batch=7)
            for seq in (0, 1):
                assert ref.state(PROMPT, seq) == fresh.state(PROMPT, seq)
                assert ref.state(tokens, seq) == fresh.state(tokens, seq) == ctx.state(seq)
            assert ref.state(tokens[::-1], 0) == fresh.state(tokens[::-1], 0) != state
        for leaf in BUSHY.leaves():
            assert np.array_equal(ref.tail(tokens, BUSHY.words(leaf)), fresh.tail(tokens, BUSHY.words(leaf)))
        assert np.array_equal(ref.tail(PROMPT, tokens[len(PROMPT) :]), single[len(PROMPT) :])
        other = fresh.tail([], [tokens[0] + 1, *tokens[1:]])
    assert float(single.std()) > 0.5, "the logits are flat"
    assert float(np.abs(np.diff(single, axis=0)).max(axis=1).min()) > 0.5, "two tokens have the same logits"
    for distance in (1, 5, 20, 100):
        assert float(np.abs(other[distance] - single[distance]).max()) > 1e-3, f"the first token is forgotten after {distance}"
    ref.close()
    fresh.close()


def full_cache(path: str, params: Params, tree: Tree) -> None:
    """A tree takes exactly its nodes' cells: it fits when they are free, and one less is status 1."""
    n = 256
    params = dataclasses.replace(params, n_ctx=n, n_seq_max=1)
    prompt = tuple(i % 300 for i in range(n - len(tree.tokens)))
    with Player(path, params) as player:
        player.decode({0: prompt})
        player.decode({0: tree})
        player.accept(0, tree.leaves()[-1])
        player.check_state(0)
    with Player(path, params) as player:
        player.decode({0: (*prompt, 1)})
        player.refused({0: tree}, 1)
        player.decode({0: chain(tree.tokens[1:])})
        player.accept(0, len(tree.tokens) - 2)
        player.check_state(0)


def invalid_batches(path: str, params: Params, *, may_jump: bool) -> None:
    """Every rule of a tree in a batch: the reason is logged, and the context goes on.

    `may_jump`: positions of the model may leave gaps, as behind an image (M-RoPE), in a plain decode and for a root alike.
    """
    cases: list[tuple[str, str, list[tuple[int, int, int, int | None, bool]]]] = [
        ("a token without parent", "no parent", [(0, 5, 0, 0, True), (0, 6, 1, None, True)]),
        ("a token without parent first", "root is not the first", [(0, 6, 0, None, True), (0, 5, 1, 1, True)]),
        ("two roots", "second root", [(0, 5, 0, 0, True), (0, 6, 1, 1, True)]),
        ("a parent of another sequence", "not an earlier node", [(1, 5, 0, 0, True), (0, 5, 0, 1, True), (0, 6, 1, 0, True)]),
        ("a parent that is no node", "not an earlier node", [(1, 5, 0, None, True), (0, 5, 0, 1, True), (0, 6, 1, 0, True)]),
        ("a gap", "position is not the parent's", [(0, 5, 0, 0, True), (0, 6, 2, 0, True)]),
        ("a child at its parent's position", "position is not the parent's", [(0, 5, 0, 0, True), (0, 6, 0, 0, True)]),
        ("depth first", "level order", [(0, 5, 0, 0, True), (0, 6, 1, 0, True), (0, 7, 2, 1, True), (0, 8, 1, 0, True)]),
        ("a root behind the context's end", "position", [(0, 5, 1, 0, True), (0, 6, 2, 0, True)]),
        ("a root before the context's end", "position", [(0, 5, -1, 0, True), (0, 6, 0, 0, True)]),
        (
            "more nodes than llama_tree_init allows",
            "tree",
            [(0, 5, 0, 0, True), *[(0, 6 + i, 1, 0, True) for i in range(params.tree)]],
        ),
    ]
    with Player(path, params) as player:
        player.decode({0: PROMPT, 1: PROMPT[:9]})
        for what, words, rows in cases:
            if may_jump and "behind" in what:
                continue
            batch = Batch([(s, t, p + len(player.committed[s]), parent, o) for s, t, p, parent, o in rows])
            player.ctx.clear_log()
            status = player.ctx.process(batch)
            text = "\n".join(player.ctx.log(10))
            assert status == -1, f"{what}: status {status}: {text}"
            assert words in text, f"{what}: expected {words!r} in {text!r}"
            player.positions()
            player.decode({0: BUSHY})
            player.drop(0)
        player.finish()


def invalid_sequences(path: str, params: Params) -> None:
    """A tree token with several sequences, and parents that llama_batch_ext_set_parent itself refuses."""
    api, set_parent = native(), tree_function("set_parent")
    with Player(path, params) as player:
        ctx = player.ctx.ctx
        batch = api.llama_batch_ext_init(ctx)
        for i in range(3):
            assert api.llama_batch_ext_add_token(batch, 0, 5 + i) == i
            assert api.llama_batch_ext_set_pos(batch, i, (player.ctx.api.llama_pos * 4)(i, i, i, 0))
        for idx, parent in ((-1, -1), (3, 0), (1, 2), (1, -1), (0, 1)):
            assert not set_parent(batch, idx, parent), f"set_parent({idx}, {parent}) was taken"
        for i in range(3):
            assert set_parent(batch, i, max(0, i - 1))
        assert api.llama_batch_ext_add_seq(batch, 2, 1)
        player.ctx.clear_log()
        assert api.llama_process(ctx, api.LLAMA_PROCESS_TYPE_DECODE, batch) == -1
        assert "several sequences" in "\n".join(player.ctx.log(10))
        api.llama_batch_ext_free(batch)
        player.positions()
        player.decode({0: BUSHY})
        player.finish()


def embeddings_refused(path: str, params: Params) -> None:
    """A context that outputs embeddings decodes no tree."""
    with Context(path, dataclasses.replace(params, embeddings=True, tree=0)) as ctx:
        if not ctx.tree_init(8):
            return
        ctx.clear_log()
        status, _ = ctx.tree(0, STAR, 0)
        assert status == -1
        assert "embeddings" in "\n".join(ctx.log(10))


def init_refused(path: str, params: Params, words: str) -> None:
    """llama_tree_init says no and why; the context still decodes text, and no tree."""
    with Context(path, dataclasses.replace(params, tree=0)) as ctx:
        ctx.clear_log()
        assert not ctx.tree_init(16), "llama_tree_init was taken"
        lines = [line for line in ctx.log(10) if "draft trees are refused" in line]
        assert len(lines) == 1, f"one line should say why: {ctx.log(10)}"
        assert words in lines[0], lines[0]
        assert ctx.tree_n_max() == 0
        ctx.plain(0, PROMPT, 0)
        assert ctx.tree(0, STAR)[0] == -1
        ctx.plain(0, PROMPT)


def larger_than_ubatch(path: str, params: Params) -> None:
    """A tree is never split over ubatches."""
    params = dataclasses.replace(params, n_ubatch=16, tree=0)
    with Context(path, params) as ctx:
        ctx.plain(0, PROMPT)
        if not ctx.tree_init(64):
            assert ctx.tree_init(16)
        ctx.clear_log()
        assert ctx.tree(0, chain(range(17)))[0] == -1
        assert "expected at most 16" in "\n".join(ctx.log(10))
        assert ctx.pos_max(0) == len(PROMPT) - 1
        assert ctx.tree(0, chain(range(16)))[0] == 0


def without_init(path: str, params: Params) -> None:
    """Before llama_tree_init a tree is refused; after it the largest tree is what was asked."""
    with Context(path, dataclasses.replace(params, tree=0)) as ctx:
        assert ctx.tree_n_max() == 0
        ctx.plain(0, PROMPT)
        assert ctx.tree(0, STAR)[0] == -1
        assert not ctx.accept(0, [0])
        assert ctx.tree_init(16)
        assert ctx.tree_n_max() == 16
        assert ctx.tree(0, STAR)[0] == 0


def aborted(path: str, params: Params) -> None:
    """A tree decode that is aborted anywhere, also while an accepted path is replayed, changes nothing."""
    with Player(path, params) as player:
        player.decode({0: PROMPT, 1: PROMPT[:5]})
        for leaf in (8, 5, 0):
            batch, _ = player.batch({0: BUSHY})
            with player.ctx.abort_after(10**9) as asked:
                player.decode({0: BUSHY})
            player.accept(0, leaf)
            n = asked[0]
            assert n > 4, f"the library asked {n} times whether to abort"
            # The path of this round is still to be replayed: the first aborts fall into it.
            for k in sorted({0, 1, 2, n // 4, n // 2, n - 2}):
                batch, _ = player.batch({0: BUSHY})
                with player.ctx.abort_after(k):
                    status = player.ctx.process(batch)
                assert status == 2, f"abort at {k} of {n}: status {status}"
                player.positions()
                player.accept_refused(0, [0])
            player.decode({0: BUSHY, 1: BUSHY})
            player.drop(0)
            player.accept(1, 3)
            player.check_state(0)
        player.finish()
        player.remove(0)  # a slot that is used again
        with player.ctx.abort_after(3):
            assert player.ctx.process(player.batch({0: BUSHY})[0]) == 2
        player.decode({0: PROMPT[::-1]})
        player.finish()


def load_elsewhere(path: str, params: Params) -> None:
    """A state saved while a tree is pending, and one saved after accept, continue in a fresh context."""
    with Player(path, params) as player:
        player.decode({0: PROMPT})
        player.decode({0: BUSHY})
        player.save(0, "pending")
        player.accept(0, 8)
        player.save(0, "accepted")
        for name in ("pending", "accepted"):
            with Player(path, params) as other:
                other.saved = player.saved
                other.load(name, 1)
                other.decode({1: BUSHY})
                other.accept(1, 6)
                other.finish()
        player.finish()


# --------------------------------------------------------------------------------------------------------------------
# the named checks of the negative controls


def siblings_are_hidden(path: str) -> None:
    """Attention: a node sees its ancestors only."""
    play(path, Params(), [("decode", {0: PROMPT}), ("decode", {0: STAR})])


def windows_follow_parents(path: str) -> None:
    """Convolution: the window of a node holds its ancestors, not the rows before it."""
    play(path, Params(), [("decode", {0: PROMPT}), ("decode", {0: BUSHY})])


def commit_takes_every_node(path: str) -> None:
    """Replay: after accept the state is that of the whole path."""
    with Player(path, Params()) as player:
        player.decode({0: PROMPT})
        player.decode({0: BUSHY})
        player.accept(0, 8)
        player.check_state(0)


def accept_advances_position(path: str) -> None:
    """The end of the sequence is known as soon as accept returns."""
    with Player(path, Params()) as player:
        player.decode({0: PROMPT})
        player.decode({0: BUSHY})
        player.accept(0, 8)
        player.finish()


def shared_cells_are_settled(path: str) -> None:
    """A tree behind a copied sequence starts from the state that was copied."""
    steps: list[Step] = [("decode", {0: PROMPT, 1: PROMPT[:5]}), ("copy", 0, 1), ("decode", {1: BUSHY, 0: STAR})]
    play(path, Params(kv_unified=True), steps)


def error_of_a_wrong_ancestor(path: str, params: Params) -> float:
    """The largest logit difference when one token of a path is another one: what the bounds must tell from noise."""
    with Context(path, params) as ctx, Context(path, dataclasses.replace(params, tree=0)) as other:
        ctx.plain(0, PROMPT)
        status, idxs = ctx.tree(0, chain((5, 6, 7)))
        assert status == 0
        other.plain(0, PROMPT)
        wrong = other.plain(0, (5, 9, 7))
        return float(np.abs(ctx.logits(idxs[2]) - wrong[2]).max())


# --------------------------------------------------------------------------------------------------------------------
# what may happen to a pending tree behind its back


def goes_on(ctx: Context, path: str, committed: dict[int, Tokens]) -> None:
    """The sequences hold these tokens: the logits of what follows are those of a new context."""
    for seq, tokens in committed.items():
        with Context(path, dataclasses.replace(ctx.params, tree=0)) as other:
            want = other.plain(0, [*tokens, 7, 8], 0)[-2:]
        assert np.array_equal(ctx.plain(seq, (7, 8), len(tokens)), want), f"sequence {seq} does not go on as it should"


def keep_with_a_cache_each(path: str, params: Params) -> None:
    """seq_keep of another sequence drops the tree, whatever it leaves of that sequence."""
    with Context(path, params) as ctx:
        ctx.plain(0, PROMPT)
        ctx.plain(1, PROMPT[:9])
        _, idxs = ctx.tree(0, BUSHY)
        ctx.seq_keep(1)
        assert not ctx.accept(0, idxs[:1])
        assert not ctx.accept(0, [])
        goes_on(ctx, path, {1: PROMPT[:9]})


def partial_load(path: str, params: Params) -> None:
    """A load of the part that is not attention (a checkpoint) drops the tree and leaves the committed tokens."""
    with Context(path, params) as ctx:
        ctx.plain(0, PROMPT)
        state = ctx.state(0, partial=True)
        _, idxs = ctx.tree(0, BUSHY)
        ctx.set_state(0, state, partial=True)
        assert not ctx.accept(0, idxs[:1])
        assert ctx.pos_max(0) == len(PROMPT) - 1
        goes_on(ctx, path, {0: PROMPT})


def coupled_token(path: str, params: Params) -> None:
    """A token of several sequences beside a tree is refused, in whatever order its sequences were named."""
    api = native()
    for first, second in ((0, 1), (1, 0), (2, 3)):
        with Context(path, params) as ctx:
            b = api.llama_batch_ext_init(ctx.ctx)
            for i, seq in enumerate((0, first)):
                assert api.llama_batch_ext_add_token(b, seq, 5 + i) == i
                assert api.llama_batch_ext_set_pos(b, i, (api.llama_pos * 4)(0, 0, 0, 0))
            assert tree_function("set_parent")(b, 0, 0)
            assert api.llama_batch_ext_add_seq(b, 1, second)
            ctx.clear_log()
            assert ctx.run(b) == -1, f"sequences {first}, {second}"
            api.llama_batch_ext_free(b)
            assert "several sequences" in "\n".join(ctx.log(5))
            assert ctx.pos_max(0) == -1


def removals(path: str, params: Params, *, may_remove: bool) -> None:
    """Removing up to the root drops the tree; removing nothing, or only what lies before, does not."""
    with Context(path, params) as ctx:
        ctx.plain(0, PROMPT)
        _, idxs = ctx.tree(0, BUSHY)
        assert ctx.seq_rm(0, 7, 7)
        assert ctx.pos_max(0) == len(PROMPT) - 1
        if may_remove:
            assert ctx.seq_rm(0, 30, len(PROMPT))
            assert not ctx.accept(0, idxs[:1])
            goes_on(ctx, path, {0: PROMPT[:30]})
        else:
            assert not ctx.seq_rm(0, 30, len(PROMPT))
            assert ctx.accept(0, idxs[:1])
            goes_on(ctx, path, {0: (*PROMPT, BUSHY.tokens[0])})
        _, idxs = ctx.tree(1, BUSHY)  # nothing committed before it
        assert ctx.seq_rm(1, 0, 0)
        assert ctx.accept(1, idxs[:1])
        goes_on(ctx, path, {1: BUSHY.tokens[:1]})
        _, idxs = ctx.tree(2, BUSHY)
        assert ctx.seq_rm(2, 0, 1)
        assert not ctx.accept(2, [])
        assert ctx.pos_max(2) == -1
        goes_on(ctx, path, {2: ()})


def backend_sampler(path: str, params: Params) -> None:
    """A sampler in the graph draws per row, not per accepted token, so such a sequence gets no tree."""
    api = native()
    with Context(path, params) as ctx:
        ctx.plain(0, PROMPT)
        sampler = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        api.llama_sampler_chain_add(sampler, api.llama_sampler_init_greedy())
        if not api.llama_set_sampler(ctx.ctx, 0, sampler):
            raise AssertionError("the sampler was not taken")
        batch = Batch()
        batch.tree(0, BUSHY, len(PROMPT))
        batch.rows = [(*row[:4], i == 0) for i, row in enumerate(batch.rows)]  # more than one output is refused anyway
        ctx.clear_log()
        assert ctx.process(batch) == -1
        assert "backend sampler" in "\n".join(ctx.log(5))
        assert ctx.tree(1, BUSHY)[0] == 0
        api.llama_set_sampler(ctx.ctx, 0, None)
        assert ctx.accept(1, [])
        goes_on(ctx, path, {0: PROMPT})
        api.llama_sampler_free(sampler)
