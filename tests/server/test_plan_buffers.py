"""What `plan` says against what llama-server allocates: every buffer apart, by its load log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from llama_dflash import plan, shapes, synth
from llama_dflash.builds import Build
from llama_dflash.client import Sampling
from llama_dflash.server import Server
from llama_dflash.shapes import layout
from llama_dflash.spec import RunConfig

MIB = 2**20
# Of each buffer; what the log rounds to (0.01 MiB) comes on top.
TOLERANCE = 0.05
ROUNDING_BYTES = 0.011 * MIB
BUFFER = re.compile(r"(model|KV|RS|compute|output) buffer size = +([0-9.]+) MiB|tree (stash) size = +([0-9.]+) MiB")


@dataclass
class Log:
    """Buffer sizes of a run in bytes, those of the target and those of the draft."""

    target: dict[str, float]
    draft: dict[str, float]


def read_log(lines: list[str]) -> Log:
    """A context reserves its compute buffer again as it learns what is asked of it; its last size is the one that stays."""
    log = Log({}, {})
    current, loaded = log.target, False
    for line in lines:
        if "loading draft model" in line:
            current = log.draft
        if "speculative decoding context initialized" in line:
            current, loaded = log.target, True  # what comes with the first request is the target's
        match = BUFFER.search(line)
        if match and not (loaded and match[1] == "output"):
            current[match[1] or match[3]] = float(match[2] or match[4]) * MIB
    return log


def run(build: Build, config: RunConfig, s: plan.Settings) -> Log:
    lines: list[str] = []
    flags = [
        "-lv",
        "4",
        "-t",
        "1",
        "-fa",
        "on",
        "-c",
        str(s.n_ctx),
        "-np",
        str(s.n_slots),
        "-ctk",
        s.kv,
        "-ctv",
        s.kv,
        "--no-warmup",
    ]
    if config.draft is not None:
        flags += ["-ctkd", s.draft_kv, "-ctvd", s.draft_kv]
    with Server(build, config.checked(), extra=flags, on_line=lines.append) as server:
        server.client.complete("f", 1, Sampling(), ignore_eos=True)
    return read_log(lines)


@pytest.fixture(scope="module")
def random_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("random")
    files = {}
    for name in ("qwen3.5-0.8b", "qwen3.5-0.8b-dflash", "qwen3.5-0.8b-dflash2"):
        files[name] = folder / f"{name}.gguf"
        synth.write(layout.of(shapes.find(name), "q4_k_m"), files[name])
    yield files
    for path in files.values():
        path.unlink()


BASE = plan.Settings(2048)
CASES = {
    "ar": replace(BASE, mode="ar"),
    "ar-long-q4_0": replace(BASE, n_ctx=16384, mode="ar", kv="q4_0"),
    "ar-4-slots": replace(BASE, n_ctx=8192, mode="ar", n_slots=4),
    "chain-snapshot": replace(BASE, mode="chain", rollback="snapshot", kv="q8_0"),
    "chain-snapshot-2-slots": replace(BASE, n_ctx=4096, mode="chain", rollback="snapshot", n_slots=2, n_max=4),
    "chain-replay": replace(BASE, n_ctx=4096, mode="chain", n_max=7),
    "tree": BASE,
    "tree-2-slots": replace(BASE, n_ctx=8192, budget=31, n_slots=2, kv="q8_0", draft_kv="q4_0"),
}


def check(log: Log, made: plan.Plan, whole: int, draft_whole: int, s: plan.Settings) -> None:
    device = made.device
    pairs = {
        "weights": (log.target["model"], whole),
        "KV": (log.target["KV"], device["kv"]),
        "recurrent": (log.target["RS"], device["recurrent_state"] + device["snapshots"]),
        "stash": (log.target.get("stash", 0), device["stash"]),
        "compute": (log.target["compute"], device["compute"]),
    }
    if s.mode == "ar":
        pairs["logits"] = (log.target["output"], made.host["logits"])
    else:
        pairs |= {
            "draft weights": (log.draft["model"], draft_whole),
            "draft KV": (log.draft["KV"], device["draft_kv"]),
            "draft compute": (log.draft["compute"], device["draft_compute"]),
        }
    for name, (logged, planned) in pairs.items():
        error = planned / logged - 1 if logged else 0.0
        print(f"{name}: {logged / MIB:.2f} MiB, planned {planned / MIB:.2f}, {error:+.2%}")
    wrong = {n: (a / MIB, b / MIB) for n, (a, b) in pairs.items() if abs(a - b) > TOLERANCE * a + ROUNDING_BYTES}
    assert not wrong, f"{wrong} MiB (logged, planned)"


def compare(build: Build, target: Path, draft: Path | None, s: plan.Settings) -> None:
    drafts = s.mode != "ar"
    config = RunConfig(
        target, draft if drafts else None, s.n_max if drafts else None,
        budget=s.budget if s.mode == "tree" else None, rollback=s.rollback if drafts else None,
    )  # fmt: skip
    models = plan.from_file(target), plan.from_file(draft) if draft else None
    log = run(build, config, s)
    # On the CPU the embedding is in the same buffer as the rest.
    check(log, plan.make(*models, s), models[0].weight_bytes, models[1].weight_bytes if models[1] else 0, s)


@pytest.mark.parametrize("case", CASES)
def test_the_tiny_pair(exact: Build, pair: tuple[Path, Path], case: str) -> None:
    compare(exact, *pair, CASES[case])


@pytest.mark.parametrize("case", ["ar-long-q4_0", "ar-4-slots", "chain-snapshot", "tree-2-slots"])
def test_a_random_08b(exact: Build, random_files: dict[str, Path], case: str) -> None:
    compare(exact, random_files["qwen3.5-0.8b"], random_files["qwen3.5-0.8b-dflash"], CASES[case])


@pytest.mark.parametrize("case", ["chain-replay", "tree"])
def test_a_random_dflash2_draft(exact: Build, random_files: dict[str, Path], case: str) -> None:
    compare(exact, random_files["qwen3.5-0.8b"], random_files["qwen3.5-0.8b-dflash2"], CASES[case])
