"""A sliding window, one cache for several sequences and a decode of several ubatches: no row misses its window."""

from __future__ import annotations

import numpy as np
import pytest
import tree_models
from tree_lib import Batch, CheckFailed, Context, Params, worker

from llama_dflash.builds import Build


def rows_keep_their_window(path: str) -> None:
    """The second ubatch takes cells that leave the window of sequence 1 only once the first ubatch is decoded."""
    params = Params(n_seq_max=3, kv_unified=True, n_ubatch=20, tree=0)
    with Context(path, params) as ctx, Context(path, Params(n_seq_max=1, tree=0)) as alone:
        for rows in ([(1, (0,)), (2, (0,))], [(1, (0,) * 4)], [(1, (0,) * 20), (2, (0, 0))]):
            batch = Batch()
            idxs = [batch.plain(seq, tokens, ctx.pos_max(seq) + 1) for seq, tokens in rows]
            assert ctx.process(batch) == 0
        got = np.stack([ctx.logits(i) for i in idxs[0]])
        want = alone.plain(0, (0,) * 25)[5:]
        assert np.array_equal(got, want), f"logits differ by up to {np.abs(got - want).max():g}"


def test_rows_keep_their_window(exact: Build) -> None:
    worker(exact.package).run(rows_keep_their_window, tree_models.path("gemma3"))


def test_the_unpatched_pin_loses_it(reference: Build) -> None:
    """What the patch is for; when a new pin passes this, drop the patch."""
    with pytest.raises(CheckFailed, match="logits differ"):
        worker(reference.package).run(rows_keep_their_window, tree_models.path("gemma3"))
