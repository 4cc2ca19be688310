"""A context that decodes trees, beside a model of what it must hold and a reference that never sees one.

A `Player` keeps a model of what a context must hold (the committed tokens of each sequence and its pending tree) while
it drives one that decodes trees; a `Reference` that never sees a tree says what logits and state bytes these tokens have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from tree_lib import Batch, Context, Params, Tree

Tokens: TypeAlias = tuple[int, ...]
Work: TypeAlias = Mapping[int, "Tree | Tokens"]  # per sequence: a tree, or tokens to decode
Step: TypeAlias = tuple[Any, ...]

BIG = 4096  # cells of a reference context


def words(state: bytes) -> np.ndarray:
    """The 4-byte words of a state. A recurrent cell that is used again was multiplied by 0, which leaves -0.0 as well."""
    found: np.ndarray = np.frombuffer(state[: len(state) // 4 * 4], np.uint32).copy()
    found[found == 0x80000000] = 0
    return found


class Reference:
    """Logits and state of token sequences, from contexts that never see a tree.

    The prefix stays decoded in sequence 0 and each continuation runs in a copy, unless `fresh` asks for a new context
    for every one. States come from a context of their own: their bytes hold the sequence id and the number of caches.
    """

    def __init__(self, path: str, params: Params, *, fresh: bool = False) -> None:
        self.path, self.fresh = path, fresh
        self.states_params = dataclasses.replace(params, tree=0, n_ctx=BIG, n_rs_seq=0)
        self.params = dataclasses.replace(self.states_params, n_seq_max=2)
        self.ctx = Context(path, self.params)
        self.states = Context(path, self.states_params)
        self.held: list[int] = []
        self.states_held: dict[int, list[int]] = {}

    def at(self, prefix: Sequence[int]) -> Context:
        n = len(self.held)
        if self.held != list(prefix[:n]):
            self.ctx.clear()
            n = 0
        self.ctx.plain(0, prefix[n:], n)
        self.held = list(prefix)
        return self.ctx

    def tail(self, prefix: Sequence[int], tail: Sequence[int]) -> np.ndarray:
        """The logits of each token of `tail` behind `prefix`."""
        if self.fresh:
            with Context(self.path, self.params) as ctx:
                return ctx.plain(0, [*prefix, *tail], 0)[len(prefix) :]
        ctx = self.at(prefix)
        if prefix:
            ctx.seq_cp(0, 1)
        try:
            return ctx.plain(1, tail, len(prefix))
        finally:
            assert ctx.seq_rm(1)

    def nodes(self, prefix: Sequence[int], tree: Tree) -> dict[int, np.ndarray]:
        """The logits of each node of a tree behind `prefix`."""
        found: dict[int, np.ndarray] = {}
        for leaf in tree.leaves():
            for node, row in zip(tree.path(leaf), self.tail(prefix, tree.words(leaf)), strict=True):
                found[node] = row
        return found

    def state(self, tokens: Sequence[int], seq: int) -> bytes:
        """The state of a sequence that holds these tokens."""
        if self.fresh:
            with Context(self.path, self.states_params) as ctx:
                ctx.plain(seq, tokens, 0)
                return ctx.state(seq)
        held = self.states_held.get(seq, [])
        n = len(held)
        if held != list(tokens[:n]):
            assert self.states.seq_rm(seq)
            n = 0
        self.states.plain(seq, tokens[n:], n)
        self.states_held[seq] = list(tokens)
        return self.states.state(seq)

    def close(self) -> None:
        self.ctx.close()
        self.states.close()

    def __del__(self) -> None:  # the cache below drops references
        if hasattr(self, "states"):
            self.close()


@functools.lru_cache(maxsize=8)
def shared_reference(path: str, params: Params) -> Reference:
    """References are kept: to make one takes longer than most checks."""
    return Reference(path, params)


class Player:
    """A context under test, with what it must hold.

    Args:
        path: the model.
        params: the context.
        bitwise: logits must be equal; else `max_error` collects the largest difference.
        fresh: the reference decodes every path in a new context.
    """

    def __init__(self, path: str, params: Params, *, bitwise: bool = True, fresh: bool = False) -> None:
        self.path, self.params, self.bitwise = path, params, bitwise
        self.ctx = Context(path, params)
        key = dataclasses.replace(params, tree=0, n_ctx=BIG, n_rs_seq=0)
        self.ref = Reference(path, params, fresh=True) if fresh else shared_reference(path, key)
        self.committed: dict[int, list[int]] = {s: [] for s in range(params.n_seq_max)}
        self.pending: dict[int, tuple[Tree, list[int]]] = {}
        self.saved: dict[str, tuple[bytes, list[int]]] = {}
        self.copies = False  # with one cache per sequence the pin copies data at the next decode: states are stale until then
        self.max_error = 0.0
        self.n_compared = 0

    def close(self) -> None:
        self.ctx.close()
        if self.ref.fresh:
            self.ref.close()

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # what must hold

    def same(self, what: str, got: np.ndarray, want: np.ndarray) -> None:
        self.n_compared += 1
        error = float(np.abs(got - want).max())
        self.max_error = max(self.max_error, error if np.isfinite(error) else np.inf)
        if self.bitwise:
            assert np.array_equal(got, want), f"{what}: logits differ by up to {error:g}"

    def positions(self) -> None:
        """Every sequence ends at its last committed token."""
        got = {s: self.ctx.pos_max(s) for s in self.committed}
        assert got == {s: len(tokens) - 1 for s, tokens in self.committed.items()}, f"pos_max: {got}"

    def check_state(self, seq: int) -> None:
        """The whole state, byte by byte, is that of the committed tokens."""
        if self.copies:
            return
        if self.ctx.shares_window:
            self.check_continuation(seq)
            return
        got, want = self.ctx.state(seq), self.ref.state(self.committed[seq], seq)
        assert len(got) == len(want), f"state of sequence {seq}: {len(got)} bytes, expected {len(want)}"
        differ = np.flatnonzero(words(got) != words(want))
        assert not len(differ), (
            f"state of sequence {seq}: {len(differ)} of {len(want) // 4} words differ, the first at {differ[0]}"
        )

    def check_continuation(self, seq: int) -> None:
        """A new context that loads the state goes on as it should."""
        if not self.committed[seq]:
            return
        with Context(self.path, dataclasses.replace(self.params, tree=0)) as other:
            other.set_state(seq, self.ctx.state(seq))
            self.same(f"state of sequence {seq}", other.plain(seq, (3, 4)), self.ref.tail(self.committed[seq], (3, 4)))

    # steps

    def batch(self, work: Work, *, interleave: bool = False) -> tuple[Batch, dict[int, list[int]]]:
        """The rows of all sequences, one sequence after the other or dealt in turn, and their batch indices."""
        batch = Batch()
        idxs: dict[int, list[int]] = {}
        for seq, item in work.items():
            pos = len(self.committed[seq])
            idxs[seq] = batch.tree(seq, item, pos) if isinstance(item, Tree) else batch.plain(seq, item, pos)
        if interleave:
            rank = {i: k for rows in idxs.values() for k, i in enumerate(rows)}
            order = sorted(rank, key=lambda i: (rank[i], i))
            new = {old: i for i, old in enumerate(order)}
            rows = [batch.rows[old] for old in order]
            batch.rows = [(s, t, p, None if parent is None else new[parent], o) for s, t, p, parent, o in rows]
            idxs = {seq: [new[i] for i in rows] for seq, rows in idxs.items()}
        return batch, idxs

    def decode(self, work: Work, interleave: bool = False) -> None:
        """Decode one batch and compare every row."""
        batch, idxs = self.batch(work, interleave=interleave)
        status = self.ctx.process(batch)
        assert status == 0, f"status {status}: {self.ctx.log(4)}"
        self.copies = False
        got = {seq: [self.ctx.logits(i) for i in rows] for seq, rows in idxs.items()}
        for seq, item in work.items():
            if isinstance(item, Tree):
                want = self.ref.nodes(self.committed[seq], item)
                self.pending[seq] = (item, idxs[seq])
            else:
                want = dict(enumerate(self.ref.tail(self.committed[seq], item)))
                self.committed[seq] += item
            for i, row in enumerate(got[seq]):
                self.same(f"sequence {seq}, row {i} of {item}", row, want[i])
        self.positions()

    def refused(self, work: Work, status: int, words: str = "") -> None:
        """A decode that is refused: nothing changes, and the log says why."""
        batch, _ = self.batch(work)
        self.ctx.clear_log()
        got = self.ctx.process(batch)
        assert got == status, f"status {got}, expected {status}: {self.ctx.log(4)}"
        text = "\n".join(self.ctx.log(10))
        assert words in text, f"expected {words!r} in {text!r}"
        self.positions()

    def accept(self, seq: int, node: int) -> None:
        """Accept the path to `node`."""
        tree, idxs = self.pending.pop(seq)
        assert self.ctx.accept(seq, [idxs[i] for i in tree.path(node)]), f"accept was refused: {self.ctx.log(3)}"
        self.committed[seq] += tree.words(node)
        self.positions()

    def accept_refused(self, seq: int, nodes: Iterable[int] = ()) -> None:
        """A refused accept changes nothing."""
        idxs = self.pending[seq][1] if seq in self.pending else list(range(64))
        assert not self.ctx.accept(seq, [idxs[i] if i < len(idxs) else i for i in nodes]), "accept was taken"
        self.positions()

    def drop(self, seq: int, how: str = "accept") -> None:
        """Drop the pending tree: by an empty accept, or by removing its positions."""
        del self.pending[seq]
        if how == "accept":
            assert self.ctx.accept(seq, []), f"the empty accept was refused: {self.ctx.log(3)}"
        else:
            assert self.ctx.seq_rm(seq, len(self.committed[seq]), -1), "seq_rm was refused"
        self.positions()

    def remove(self, seq: int) -> None:
        assert self.ctx.seq_rm(seq)
        self.pending.pop(seq, None)
        self.committed[seq] = []
        self.positions()

    def trim(self, seq: int, n: int) -> None:
        """Remove the last n tokens; attention models only."""
        keep = max(0, len(self.committed[seq]) - n)
        assert self.ctx.seq_rm(seq, keep, -1)
        self.pending.pop(seq, None)
        del self.committed[seq][keep:]
        self.positions()

    def copy(self, src: int, dst: int) -> None:
        if dst == src:
            return
        self.remove(dst)
        if self.committed[src]:
            self.ctx.seq_cp(src, dst)
            self.copies = not self.params.kv_unified
        self.committed[dst] = list(self.committed[src])
        self.positions()

    def keep(self, seq: int) -> None:
        """Only for a unified cache: with one cache per sequence the pin leaves the others' cells where they are."""
        self.ctx.seq_keep(seq)
        for other in self.committed:
            if other != seq:
                self.committed[other] = []
                self.pending.pop(other, None)
        self.positions()

    def clear(self) -> None:
        self.ctx.clear()
        self.pending.clear()
        self.committed = {s: [] for s in self.committed}
        self.positions()

    def save(self, seq: int, name: str) -> None:
        if self.copies or not self.committed[seq]:  # the pin loads an empty state without removing the attention cells
            return
        self.check_state(seq)
        self.saved[name] = (self.ctx.state(seq), list(self.committed[seq]))
        self.positions()

    def load(self, name: str, seq: int) -> None:
        if name not in self.saved or self.copies:
            return
        state, tokens = self.saved[name]
        self.ctx.set_state(seq, state)
        self.pending.pop(seq, None)
        self.committed[seq] = list(tokens)
        self.positions()

    def finish(self) -> None:
        """Drop what is pending, then every sequence continues, and holds the right state."""
        for seq in list(self.pending):
            self.drop(seq)
        self.decode({seq: (7 + seq, 8) for seq in self.committed})
        if self.bitwise:
            for seq in self.committed:
                self.check_state(seq)


def play(path: str, params: Params, steps: Sequence[Step], *, bitwise: bool = True, fresh: bool = False) -> tuple[int, float]:
    """Run steps of (method of Player, arguments..); the number of rows compared and their largest error."""
    with Player(path, params, bitwise=bitwise, fresh=fresh) as player:
        for i, (name, *args) in enumerate(steps):
            try:
                getattr(player, name)(*args)
            except AssertionError as e:
                raise AssertionError(f"step {i}, {name}{tuple(args)}: {e}") from e
        player.finish()
        return player.n_compared, player.max_error


@functools.cache
def noise_floor(path: str, params: Params) -> float:
    """The largest error of plain decoding against one-by-one decoding, over a few texts.

    Plain decoding here means batches, and batches with the cells of another sequence between their own, which is what
    siblings in the cache are to a path. One text alone may happen to have no error at all.
    """
    one_by_one = dataclasses.replace(params, tree=0, n_seq_max=2, kv_unified=False)
    floor = 0.0
    with Context(path, one_by_one) as clean, Context(path, dataclasses.replace(one_by_one, kv_unified=True)) as both:
        for start, n_prompt, n_words in ((1, 3, 5), (40, 12, 16), (77, 40, 8), (5, 5, 33), (150, 120, 12)):
            text = [(start + i * i * 7 + 3 * i) % 300 for i in range(n_prompt + n_words)]
            prompt, words = text[:n_prompt], text[n_prompt:]
            clean.clear()
            want = clean.plain(0, text, 0, n_batch=1)
            clean.clear()
            floor = max(floor, float(np.abs(clean.plain(0, text, 0) - want).max()))
            for width in (1, 2, 3, 4):
                both.clear()
                both.plain(0, prompt, 0)
                batch = Batch()
                idxs: list[int] = []
                for i, word in enumerate(words):
                    batch.plain(1, range(width), i * width)
                    idxs += batch.plain(0, [word], n_prompt + i)
                assert both.process(batch) == 0
                got = np.stack([both.logits(i) for i in idxs])
                floor = max(floor, float(np.abs(got - want[n_prompt:]).max()))
    return floor
