"""scripts/gpu_split.py: pieces of a round from a small made-up trace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts")]

import gpu_split  # noqa: E402

US = 1000
TARGET, DRAFT = 7, 9


def one_round(t: int) -> list[tuple[int, int, int, str, int, str]]:
    """Start and end in microseconds, stream, kind, size, name; 10 ms long, the GPU busy for 7.1 ms of them."""
    return [
        (t, t + 2000, TARGET, "K", 1, "gated_delta_net_tree_cuda"),
        (t + 2005, t + 5000, TARGET, "K", 1, "mul_mat_q"),  # 5 us behind: queued
        (t + 5000, t + 5100, TARGET, "C2", 4096, "memcpy"),
        (t + 5600, t + 5700, DRAFT, "C1", 4096, "memcpy"),  # the host took 500 us
        (t + 5700, t + 6000, DRAFT, "K", 0, "mul_mat_f"),
        (t + 5800, t + 6200, TARGET, "K", 1, "gated_delta_net_commit_cuda"),  # beside the draft
        (t + 6400, t + 7400, DRAFT, "K", 1, "flash_attn_ext_f16"),
        (t + 7400, t + 7600, DRAFT, "K", 1, "top_k"),
        (t + 9700, t + 10000, TARGET, "K", 1, "rms_norm"),
    ]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "tree.trace"
    lines = [" ".join(map(str, (a * US, b * US, *rest))) for i in range(8) for a, b, *rest in one_round(1000 + 10_000 * i)]
    path.write_text("\n".join([*lines, ""]))
    return path


def test_pieces_are_told_by_stream_and_name(trace: Path) -> None:
    found = gpu_split.split(gpu_split.read(trace), None)
    # Of eight rounds seven are whole, and the first ones warm up.
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, 7 - gpu_split.N_WARM_UP)
    expected = {
        "verify": 5.295,
        "outputs_to_host": 0.1,
        "commit": 0.4,
        "inject": 0.3,
        "draft": 1.2,
        "walk": 0.5,
        "launch_gaps": 0.005,
    }
    for name, ms in expected.items():
        assert found[name] == pytest.approx([ms] * 3), name
    assert found["gpu_busy"] == pytest.approx([4.995 + 0.1 + 0.6 + 1.2 + 0.3] * 3)
    assert found["host_gaps"] == pytest.approx([10 - 7.195 - 0.005] * 3)
    assert (found["kernels"], found["graph_kernels"]) == ([7] * 3, [6] * 3)


def test_the_time_without_a_trace_sets_the_gaps(trace: Path) -> None:
    found = gpu_split.split(gpu_split.read(trace), 8.0)
    assert found["host_gaps"] == pytest.approx([8 - 7.195 - 0.005] * 3)


def test_kernels_are_summed(trace: Path) -> None:
    lines = gpu_split.kernels(gpu_split.read(trace), 2).splitlines()
    assert lines[0] == "7.39 ms in 9 launches"  # 7.395
    assert [line.split()[-1] for line in lines[1:]] == ["mul_mat_q", "gated_delta_net_tree_cuda"]


def test_a_trace_without_trees_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chain.trace"
    path.write_text("0 10 7 K 1 mul_mat_q\n")
    monkeypatch.setattr(sys, "argv", ["gpu_split.py", str(path)])
    assert gpu_split.main() == 1
    assert "no verify rounds of a draft tree, expected kernels named gated_delta_net_tree" in capsys.readouterr().err
