"""How large a compute buffer ggml makes for a graph: its graph allocator (ggml-alloc.c), replayed on sizes alone.

A closed formula would have to guess where the peak lies and what is lost to gaps between tensors; the replay has both.
"""

from __future__ import annotations

import math

ALIGNMENT = 64  # of the CPU backend; CUDA's 128 changes sums by a few hundred bytes


class Node:
    """A tensor of a graph: a leaf, a result, or a view of one; weights and caches are `external` and take no room."""

    __slots__ = ("external", "in_place", "is_output", "n_bytes", "n_children", "n_views", "offset", "shape", "sources", "view_of")

    def __init__(
        self,
        shape: tuple[int, ...],
        sources: tuple[Node, ...] = (),
        *,
        item_bytes: int = 4,
        in_place: bool = False,
        view_of: Node | None = None,
        external: bool = False,
    ) -> None:
        self.shape: tuple[int, ...] | None = shape
        self.n_bytes = math.prod(shape) * item_bytes
        self.sources = sources
        self.in_place = in_place
        self.view_of = view_of
        self.external = external
        self.is_output = False
        self.n_children = 0
        self.n_views = 0
        self.offset: int | None = None


class _Blocks:
    """Free room, sorted by address; the last block has no end."""

    def __init__(self) -> None:
        self.free: list[list[float]] = [[0, math.inf]]
        self.peak_bytes = 0

    def take(self, n_bytes: int) -> int:
        fits = [block for block in self.free[:-1] if block[1] >= n_bytes]
        best = self.free[-1]
        if fits:
            smallest = min(block[1] for block in fits)
            best = [block for block in fits if block[1] == smallest][-1]
        offset = int(best[0])
        best[0] += n_bytes
        best[1] -= n_bytes
        if best[1] == 0:
            self.free.remove(best)
        self.peak_bytes = max(self.peak_bytes, offset + n_bytes)
        return offset

    def give(self, offset: int, n_bytes: int) -> None:
        self.free.append([offset, n_bytes])
        self.free.sort()
        merged: list[list[float]] = []
        for block in self.free:
            if merged and merged[-1][0] + merged[-1][1] == block[0]:
                merged[-1][1] += block[1]
            else:
                merged.append(block)
        self.free = merged


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


class Graph:
    """Nodes in the order in which llama.cpp evaluates them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.leafs: list[Node] = []
        self._seen: set[int] = set()

    def leaf(self, *shape: int, item_bytes: int = 4) -> Node:
        """An input."""
        return Node(shape, item_bytes=item_bytes)

    def op(self, shape: tuple[int, ...], *sources: Node, in_place: bool = False, item_bytes: int = 4) -> Node:
        """The result of an operation; `in_place` for those that may take over the room of a source of the same layout."""
        return Node(shape, sources, in_place=in_place, item_bytes=item_bytes)

    def view(self, source: Node, shape: tuple[int, ...] | None = None) -> Node:
        """A part or another shape of a node; without a shape its layout is like no other's."""
        node = Node(shape or (), (source,), view_of=source.view_of or source)
        node.n_bytes = 0
        node.shape = shape
        return node

    def store(self, *sources: Node) -> None:
        """Copy into a cache: its room is not the graph's."""
        self.expand(Node((), sources, external=True))

    def expand(self, node: Node) -> Node:
        """Append a node and all that it needs, sources from left to right, as ggml_build_forward_expand does."""
        stack: list[tuple[Node, int]] = [(node, 0)]
        while stack:
            top, i = stack.pop()
            if i == 0:
                if id(top) in self._seen:
                    continue
                self._seen.add(id(top))
            if i < len(top.sources):
                stack.append((top, i + 1))
                if id(top.sources[i]) not in self._seen:
                    stack.append((top.sources[i], 0))
                continue
            (self.nodes if top.sources else self.leafs).append(top)
        return node

    def output(self, node: Node) -> Node:
        """Append a node that is read after the graph has run: its room is never used again."""
        (node.view_of or node).is_output = True
        node.is_output = True
        return self.expand(node)

    def peak_bytes(self) -> int:
        """Size of the compute buffer."""
        blocks = _Blocks()
        for leaf in self.leafs:
            self._allocate(leaf, blocks)
        for node in self.nodes:
            if node.view_of:
                node.view_of.n_views += 1
            for source in node.sources:
                source.n_children += 1
        for node in self.nodes:
            self._allocate(node, blocks)
            for source in node.sources:
                source.n_children -= 1
                if source.n_children == 0 and source.n_views == 0:
                    self._release(source, blocks)
        return blocks.peak_bytes

    def _allocate(self, node: Node, blocks: _Blocks) -> None:
        if node.external or node.view_of or node.offset is not None:
            return
        if node.in_place:
            for parent in node.sources:
                root = parent.view_of or parent
                if root.offset is None or root.is_output or parent.is_output or parent.shape != node.shape:
                    continue
                alone = parent.n_children == 1 and parent.n_views == 0
                if alone and (root is parent or (root.n_views == 1 and root.n_children == 0)):
                    node.offset = root.offset
                    spare = _padded(root.n_bytes) - _padded(node.n_bytes)
                    if spare > 0:
                        blocks.give(node.offset + _padded(node.n_bytes), spare)
                    root.offset = None
                    return
        node.offset = blocks.take(_padded(node.n_bytes))

    def _release(self, node: Node, blocks: _Blocks) -> None:
        root = node.view_of or node
        if node.view_of:
            root.n_views -= 1
        if root.n_views == 0 and root.n_children == 0 and root.offset is not None and not root.is_output:
            blocks.give(root.offset, _padded(root.n_bytes))
            root.offset = None
