"""Divergences, the noise that explains them, and reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from rich.console import Console

from llama_dflash import gguf
from llama_dflash.bench import compare, report
from llama_dflash.bench.cases import Case
from llama_dflash.bench.run import Job, Pass
from llama_dflash.builds import Build
from llama_dflash.client import Completion, Sampling
from llama_dflash.spec import RunConfig

CASES = [Case("a", "text a"), Case("b", "text b"), Case("c", "text c")]
FIXED_KEYS = {"schema", "command", "build", "models", "prompts", "n_predict", "sampling", "modes"}


def make_pass(*texts: list[int]) -> Pass:
    return Pass({"mode": "ar"}, [Completion(tokens, "".join(map(str, tokens)), {"predicted_ms": 1.0}) for tokens in texts])


def test_divergences_name_prompt_position_and_tokens() -> None:
    found = compare.divergences(CASES, make_pass([1, 2, 3], [4, 5], [6, 7]), make_pass([1, 2, 3], [4, 9], [6]))
    assert found == [
        {"prompt": "b", "position": 1, "reference": 5, "got": 9},
        {"prompt": "c", "position": 1, "reference": 7, "got": None},
    ]


def test_divergences_need_the_same_prompts() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare.divergences(CASES, make_pass([1], [2], [3]), make_pass([1], [2]))


@pytest.mark.parametrize(("gap", "is_explained"), [(0.0, True), (1.2499, True), (1.25, False), (1.2501, False)])
def test_unexplained_begins_at_ten_noise_floors(gap: float, is_explained: bool) -> None:
    found = [{"prompt": "a", "top2_gap": gap}]
    assert compare.unexplained(found, 0.125) == ([] if is_explained else found)


def test_without_noise_nothing_is_explained() -> None:
    found = [{"prompt": "a", "top2_gap": 0.0}]
    assert compare.unexplained(found, 0.0) == found


class FakeServer:
    """Plain decoding whose batch form is off by 0.01 at token 5, and by 0.04 in the text of prompt c."""

    seen: list[RunConfig] = []

    def __init__(self, build: Build, config: RunConfig, *, extra: tuple[str, ...]) -> None:
        self.seen.append(config)
        self.client = self
        assert extra == ("-np", "1", "-t", "2")

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/tokenize":
            return {"tokens": [100 + ord(body["content"][-1])]}
        assert body["ignore_eos"] is True
        row = {"top_logprobs": [{"id": 5, "logprob": -1.0}, {"id": 6, "logprob": -1.5}, {"id": 7, "logprob": -3.0}]}
        n = body["n_predict"]
        return {"tokens": list(range(n)), "completion_probabilities": [row] * n}

    def top_logprobs(self, ids: list[int], n_top: int) -> dict[int, float]:
        return {6: -1.5, 5: -1.0, 8: -9.0} if ids[0] != 100 + ord("c") else {5: -1.0, 6: -1.54}


def test_explain_adds_gap_and_floor(monkeypatch: pytest.MonkeyPatch, make_build: Callable[..., Build]) -> None:
    monkeypatch.setattr(compare, "Server", FakeServer)
    job = Job(CASES, 8, Sampling(), server_flags=("-t", "2"))
    found: list[dict[str, Any]] = [{"prompt": "b", "position": 1, "reference": 5, "got": 9}]
    config = RunConfig(Path("t"), Path("d"), 3)
    floor = compare.explain(make_build(), config, job, make_pass([1, 2], [4, 5], [6, 7]), found)
    # The floor comes from all prompts, diverged or not.
    assert floor == pytest.approx(0.04)
    assert found[0]["top2_gap"] == 0.5
    assert found[0]["noise_floor"] == 0.04
    # Noise is measured without drafts.
    assert FakeServer.seen == [RunConfig(Path("t"))]


@pytest.fixture
def small_pair(make_target: Callable[..., Path], make_draft: Callable[..., Path]) -> tuple[Path, Path]:
    return make_target(**{"general.name": "small-target"}), make_draft()


@pytest.fixture
def result(make_build: Callable[..., Build], small_pair: tuple[Path, Path]) -> dict[str, Any]:
    out = report.header("bench", make_build(), RunConfig(*small_pair, 7), Job(CASES, 8, Sampling()))
    ar = {"tok_s": 100.04, "tok_s_mad": 1.25, "tok_s_repeats": [99.0, 100.04, 102.0], "ms_per_round": 9.996}
    chain = {"tok_s": 250.0, "tok_s_mad": 0.0, "tok_s_repeats": [250.0], "ms_per_round": 12.5}
    out["modes"] = {
        "ar": {**ar, "mean_accepted": 1.0, "rounds": 21},
        "chain": {
            **chain,
            "mean_accepted": 3.0,
            "rounds": 7,
            "n_max": 15,
            "identical": 2,
            "accept_per_position": [0.9, 0.5],
        },
        "tree": {**chain, "mean_accepted": 4.2, "rounds": 5, "n_max": 15, "budget": 22, "identical": 3, "accept_per_position": [0.9, 0.7]},
    }
    return out


ROWS = [
    ["mode", "tokens/round", "rounds", "tok/s", "± MAD", "ms/round", "equal to AR"],
    ["ar", "1.00", "21", "100.0", "1.2", "10.00", "-"],
    ["chain 15", "3.00", "7", "250.0", "-", "12.50", "2 of 3"],
    ["tree 22", "4.20", "5", "250.0", "-", "12.50", "3 of 3"],
]


def test_header_has_the_fixed_keys(result: dict[str, Any], small_pair: tuple[Path, Path]) -> None:
    assert set(result) >= FIXED_KEYS
    assert (result["schema"], result["command"], result["prompts"], result["n_predict"]) == (1, "bench", 3, 8)
    assert result["sampling"] == {"temperature": 0}
    assert set(result["build"]) >= {"series_digest", "pin", "backend", "compiler"}
    assert result["models"] == {"target": gguf.read(small_pair[0]).summary, "draft": gguf.read(small_pair[1]).summary}
    assert set(result["models"]["target"]) == {"name", "arch", "quant", "sha256"}
    json.dumps(result)


def test_header_of_plain_decoding_has_no_draft(make_build: Callable[..., Build], small_pair: tuple[Path, Path]) -> None:
    job = Job(CASES, 8, Sampling(0.8, 3))
    out = report.header("verify", make_build(), RunConfig(small_pair[0]), job)
    assert set(out["models"]) == {"target"}
    assert out["modes"] == {}
    assert out["sampling"] == {"temperature": 0.8, "seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def test_rows(result: dict[str, Any]) -> None:
    assert report.rows(result) == ROWS


def test_table_shows_every_cell(result: dict[str, Any]) -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(result))
    console.file.close()
    text = console.export_text()
    assert "3 prompts x 8 tokens, small-target" in text
    assert [cell for row in ROWS for cell in row if cell not in text] == []


def test_markdown(result: dict[str, Any]) -> None:
    lines = report.markdown(result).splitlines()
    assert lines[1] == "|---|---:|---:|---:|---:|---:|---:|"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]
    assert cells == ROWS


def test_plot_writes_a_png(result: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "plot.png"
    report.plot(path, result)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(content[16:20], "big") == 9 * 120


def test_write_json_and_tokens(result: dict[str, Any], tmp_path: Path) -> None:
    report.write_json(tmp_path / "new" / "result.json", result)
    text = (tmp_path / "new" / "result.json").read_text()
    assert text.endswith("}\n")
    assert json.loads(text) == result
    report.write_tokens(tmp_path / "tokens.json", CASES, {"ar": make_pass([1], [2, 3], [4])})
    rows = json.loads((tmp_path / "tokens.json").read_text())
    assert rows[1] == {"mode": "ar", "prompt": "b", "tokens": [2, 3], "text": "23", "timings": {"predicted_ms": 1.0}}
    assert len(rows) == 3


def test_cpu_name_is_a_name() -> None:
    assert report.cpu_name().strip()
