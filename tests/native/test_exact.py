"""Exact arithmetic: plain logits do not depend on the width of the batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from llama_dflash import builds
from llama_dflash.builds import Build

# Decodes the same tokens one by one and in batches, in a process of its own (one libllama a process).
_BATCH_SCRIPT = """
import sys, json
import numpy as np
import llama_dflash._bindings as b
llama_cpp = b.llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_ctx=2048, n_batch=1024, n_ubatch=1024, flash_attn=True, logits_all=True, verbose=False, n_threads=1)
rng = np.random.default_rng(0)
ids = [int(i) for i in rng.integers(10, 4000, 620)]
llm.eval(ids)
whole = np.array(llm.scores[:620])
out = {}
for width in (1, 2, 16, 33):
    llm.reset()
    for i in range(0, 620, width):
        llm.eval(ids[i:i + width])
    out[width] = float(np.abs(np.array(llm.scores[:620]) - whole).max())
print(json.dumps(out))
"""


def batch_differences(native: str, target: Path) -> dict[str, float]:
    """Largest logit difference between one batch of 620 tokens and batches of each width."""
    env = {**os.environ, "LLAMA_DFLASH_NATIVE": native}
    done = subprocess.run([sys.executable, "-c", _BATCH_SCRIPT, str(target)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_logits_do_not_depend_on_batch_width(exact: Build, pair: tuple[Path, Path]) -> None:
    assert batch_differences(str(exact.package), pair[0]) == {"1": 0.0, "2": 0.0, "16": 0.0, "33": 0.0}


def test_without_exact_arithmetic_they_do(pair: tuple[Path, Path]) -> None:
    """The negative control of the test above: the installed build is not exact, and the check sees it."""
    installed = builds.resolve(builds.INSTALLED)
    assert not installed.is_exact
    assert max(batch_differences(str(installed.package), pair[0]).values()) > 1e-4
