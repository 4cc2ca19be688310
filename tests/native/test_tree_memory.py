"""Memory of the stash against snapshots: measured on the tiny pair, and by the same formula at the shape of Qwen3.5-27B."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest

MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """Gated delta net layers of a model; sizes in floats."""

    n_layer: int
    n_head_k: int
    n_head_v: int
    head: int
    conv_kernel: int

    @property
    def conv(self) -> int:
        return self.head * (2 * self.n_head_k + self.n_head_v)

    def stash_bytes(self, n_nodes: int, n_seq: int) -> int:
        """Convolution input, k, v, gate and beta of every node of every slot, and one row for the padding."""
        row = self.conv + self.head * (self.n_head_k + self.n_head_v) + 2 * self.n_head_v
        return 4 * self.n_layer * row * (n_nodes * n_seq + 1)

    def snapshot_bytes(self, n_snapshots: int, n_seq: int) -> int:
        """Whole states: convolution window and matrices."""
        state = (self.conv_kernel - 1) * self.conv + self.head * self.head * self.n_head_v
        return 4 * self.n_layer * state * n_snapshots * n_seq


def shape_of(path: Path) -> Shape:
    """From the header of a GGUF file."""
    fields = gguf.GGUFReader(path).fields
    arch = fields["general.architecture"].contents()
    value = {name: fields[f"{arch}.{name}"].contents() for name in
             ("block_count", "ssm.group_count", "ssm.time_step_rank", "ssm.state_size", "ssm.conv_kernel", "full_attention_interval",
              "nextn_predict_layers")}  # fmt: skip
    n_layer = value["block_count"] - value["nextn_predict_layers"]  # the MTP head is attention, and not loaded here
    n_attention = n_layer // value["full_attention_interval"]
    return Shape(n_layer - n_attention, value["ssm.group_count"], value["ssm.time_step_rank"],
                 value["ssm.state_size"], value["ssm.conv_kernel"])  # fmt: skip


@pytest.mark.parametrize(("n_seq", "n_nodes"), [(1, 16), (4, 33)])
def test_the_allocator_agrees_with_the_formula(exact_build: Path, pair: tuple[Path, Path], n_seq: int, n_nodes: int) -> None:
    def allocated(n_rs_seq: int, nodes: int) -> int:
        command = [exact_build / "tests" / "tree-memory", pair[0], str(n_seq), str(n_rs_seq), str(nodes)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)

    shape = shape_of(pair[0])
    plain = allocated(0, 0)
    stash = allocated(0, n_nodes) - plain
    snapshots = allocated(n_nodes - 1, 0) - plain
    # Buffers are rounded up to the alignment of their tensors, 5 a layer.
    assert 0 <= stash - shape.stash_bytes(n_nodes, n_seq) <= 5 * 64 * shape.n_layer
    assert 0 <= snapshots - shape.snapshot_bytes(n_nodes - 1, n_seq) <= 2 * 64 * shape.n_layer
    assert stash < snapshots / 5


def test_at_27b() -> None:
    """The figures of docs/design.md."""
    shape = Shape(n_layer=48, n_head_k=16, n_head_v=48, head=128, conv_kernel=4)
    assert round((shape.stash_bytes(17, 1) - shape.stash_bytes(1, 1)) / MIB) == 54
    assert round(shape.snapshot_bytes(16, 1) / MIB) == 2394
