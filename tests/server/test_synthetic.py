"""Synthetic acceptance of draft trees: mean length as asked for, shapes from the recorded file, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_dflash.builds import Build
from llama_dflash.client import Sampling
from llama_dflash.errors import ServerError
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

SHAPES = Path(__file__).resolve().parents[2] / "bench" / "shapes" / "tiny-pair.txt"
N_PREDICT = 1200


def rounds_of(build: Build, pair: tuple[Path, Path], *flags: str) -> dict[str, int]:
    """Timings of one synthetic run."""
    config = RunConfig(*pair, budget=15).checked()
    with Server(build, config, extra=("-np", "1", "-t", "1", "-c", "8192", *flags)) as server:
        timings = server.client.complete("def main():\n", N_PREDICT, Sampling(), ignore_eos=True).timings
    return {key: int(timings[key]) for key in ("rounds", "draft_n", "draft_n_rounds", "draft_n_accepted")}


@pytest.mark.parametrize("length", [2.0, 4.8])
def test_the_mean_length_is_met_where_trees_are_deep_enough(
    exact: Build, pair: tuple[Path, Path], tmp_path: Path, length: float
) -> None:
    chain = tmp_path / "chain.txt"
    chain.write_text(" ".join(str(i) for i in range(15)) + "\n")
    got = rounds_of(exact, pair, "--spec-synth-len", str(length), "--spec-synth-tree", str(chain))
    # The length of a round is geometric with a standard deviation below its mean; 250 rounds at least.
    assert (N_PREDICT - 1) / got["rounds"] == pytest.approx(length, rel=0.2)
    assert got["draft_n"] == pytest.approx(15 * got["draft_n_rounds"], abs=15 * 8)  # the last rounds are cut


def test_recorded_shapes_are_used(exact: Build, pair: tuple[Path, Path]) -> None:
    got = rounds_of(exact, pair, "--spec-synth-len", "3", "--spec-synth-tree", str(SHAPES))
    # Not all recorded trees are deep enough for every draw, so rounds may only be shorter.
    assert 1.5 < (N_PREDICT - 1) / got["rounds"] < 3.6
    assert got["draft_n_accepted"] == N_PREDICT - 1 - got["rounds"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--spec-synth-tree", str(SHAPES)), "--spec-synth-tree needs"),
        (("--spec-synth-len", "3", "--spec-synth-tree", "missing.txt"), "cannot be read"),
        (("--spec-synth-len", "3", "--spec-draft-tree", "14", "--spec-synth-tree", str(SHAPES)), "none of 14 nodes"),
    ],
)
def test_refusals(exact: Build, pair: tuple[Path, Path], flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ServerError) as error:
        rounds_of(exact, pair, *flags)
    assert words in str(error.value)
