"""scripts/gpu_bench.py and gpu_report.py: figures, merging, flags, tables, and a run against programs that only look like llama.cpp's."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_bench  # noqa: E402
import gpu_report  # noqa: E402
from gpu import build, figures, measure, modes, plots, serve, table  # noqa: E402
from gpu.record import Record  # noqa: E402

import vendor  # noqa: E402
from llama_dflash.errors import DFlashError  # noqa: E402

SHAPES = ROOT / "bench" / "shapes" / "tiny-pair.txt"
HEAD = {"schema": 1, "device": "Some GPU", "series_digest": "0123456789abcdef", "date": "2026-01-02"}

# Answers as a llama-server that needs 10 ms a round; drafts are accepted to 3 tokens a round where a length is given.
FAKE_SERVER = """
import http.server, json, socketserver, sys
argv = sys.argv[1:]
value = lambda name: argv[argv.index(name) + 1] if name in argv else None

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def reply(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self): self.reply({"status": "ok"})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        n = asked["n_predict"]
        accepted = (n - 1) * 2 // 3 if value("--spec-synth-len") else 0
        timings = {"predicted_n": n, "predicted_ms": 10.0 * (n - 1 - accepted), "prompt_n": 1}
        if value("-md"): timings |= {"draft_n": 15, "draft_n_accepted": accepted}
        self.reply({"timings": timings, "tokens": list(range(n)), "content": ""})

if value("--spec-draft-tree") == "63":
    sys.exit("no memory")
print(json.dumps(argv), flush=True)

class Server(socketserver.ThreadingTCPServer):  # http.server's asks for the name of the host
    allow_reuse_address = True
    daemon_threads = True

Server(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
"""
FAKE_BENCH = """
import json, sys
argv = sys.argv[1:]
for n in map(int, argv[argv.index("-p") + 1].split(",")):
    times = [9e9, *(1e6 * (10 + n) for _ in range(int(argv[argv.index("-r") + 1]) - 1))]
    print(json.dumps({"n_prompt": n, "samples_ns": times}))
"""


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """A folder with both programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("llama-server", FAKE_SERVER), ("llama-bench", FAKE_BENCH)):
        (folder / name).write_text(f"#!{sys.executable}\n{text}")
        (folder / name).chmod(stat.S_IRWXU)
    return folder


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine with a GPU, memory is not looked at."""
    monkeypatch.setattr(serve, "NVIDIA_SMI", ("no-such-program",))


def fig(*values: float) -> dict[str, Any]:
    return figures.figure(values)


def result() -> dict[str, Any]:
    """A small made-up result."""
    synth = {"4.8": {"tok_s": fig(150, 151, 152), "tokens_per_round": fig(4.8), "round_ms": fig(32)}}
    base = {"ar_ms": fig(12, 12.5, 13), "chain15_round_ms": fig(40), "rows": {"1": fig(12), "16": fig(20)}, "pp2048_tok_s": fig(3000)}
    base |= {"mem_ar_mb": fig(17000), "sessions": {"ar": {"tok_s": fig(80)}}, "synth_chain": synth}
    base["depths"] = {"ar": {"0": {}, "8192": {"round_ms": fig(14)}}}
    ours = {**base, "chain15_round_ms": fig(30), "tree15_round_ms": fig(35), "mem_tree15_mb": None, "synth_tree15": synth}
    ours["round_split_ms"] = {"draft": fig(3, 4), "host_gaps": fig(0.5), "mode": "tree15"}
    equal = {"prompts": 3, "equal_to_base_ar": 2, "equal_to_own_ar": 3, "parts": [{"prompt": "a", "at": 7}]}
    tiny = {"ar_tok_s": fig(900), "ar_tokens_per_round": fig(1), "equality": {"ar": equal}, "conditions": "trained pair"}
    return {**HEAD, "driver": "570", "base": base, "ours": ours, "tiny": tiny, "conditions": {"weights": "random", "acceptance": "synthetic"}}


def test_a_figure_has_median_spread_and_values() -> None:
    assert figures.figure([3, 1, 2.00049]) == {"median": 2.0, "min": 1.0, "max": 3.0, "values": [3.0, 1.0, 2.0]}
    assert figures.figure([1, 2])["median"] == 1.5


@pytest.mark.parametrize("key", ["median", "min", "max"])
def test_wrong_figures_are_found(key: str) -> None:
    data = json.loads(json.dumps(result()))
    assert figures.wrong(data) == []
    data["ours"]["rows"]["16"][key] += 0.5
    assert len(figures.wrong(data)) == 1
    assert figures.wrong(data)[0].startswith(f"ours.rows.16: {key} is 20.5, expected 20")


def test_a_figure_without_values_or_spread_is_wrong() -> None:
    assert "no values" in figures.wrong({"a": {"median": 1, "values": []}})[0]
    assert figures.wrong({"a": {"median": 1, "min": 1, "values": [1]}}) == ["a: max is None, expected 1.0"]


def test_what_is_not_measured_is_named() -> None:
    lacking = figures.lacking(result())
    assert {"base.chain7_round_ms", "ours.tree63_round_ms", "ours.mem_tree15_mb", "tiny.tree_tok_s"} <= set(lacking)
    assert "base.ar_ms" not in lacking


def test_merging_replaces_figures_whole_and_keeps_the_rest() -> None:
    merged = figures.merge({"a": {"x": fig(1, 2), "y": 1}, "b": [1]}, {"a": {"x": fig(3)}, "b": [2]})
    assert merged == {"a": {"x": fig(3), "y": 1}, "b": [2]}


def test_a_record_goes_on_on_the_same_device_only(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    Record(path, HEAD).put({"base": {"ar_ms": fig(1)}})
    again = Record(path, {**HEAD, "date": "2026-01-03"})
    again.put({"base": {"rows": {"1": fig(2)}}})
    data = json.loads(path.read_text())
    assert data["base"] == {"ar_ms": fig(1), "rows": {"1": fig(2)}}
    assert data["date"] == "2026-01-02"
    for key in ("device", "series_digest"):
        with pytest.raises(DFlashError, match=key):
            Record(path, {**HEAD, key: "other"})


def test_a_step_that_fails_is_kept_and_the_next_one_runs(tmp_path: Path) -> None:
    record = Record(tmp_path / "r.json", HEAD)
    with record.step("modes", "base", "ar"):
        raise OSError("gone")
    with record.step("modes", "ours", "ar", n_ctx=8):
        pass
    steps = json.loads(record.path.read_text())["steps"]
    assert [step.get("failed") for step in steps] == ["OSError: gone", None]
    assert steps[1]["n_ctx"] == 8
    assert len(record.failures) == 1


def plan(**more: Any) -> modes.Plan:
    return modes.Plan(Path("t.gguf"), Path("d.gguf"), SHAPES, **more)


def test_flags_of_each_mode() -> None:
    flags = {mode.name: " ".join(plan(flags=("-t", "1")).server_flags(mode)) for mode in modes.modes()}
    assert list(flags) == ["ar", "chain7", "chain15", "tree15", "tree22", "tree31", "tree63"]
    assert all(text.endswith("-t 1") for text in flags.values())
    assert not any(word in flags["ar"] for word in ("-md", "spec"))
    assert "-md d.gguf -ngld 999 --spec-type draft-dflash --spec-draft-n-max 7 -t 1" in flags["chain7"]
    assert "synth" not in flags["chain15"]
    assert "--spec-draft-n-max 15 --spec-draft-tree 31 --spec-synth-len" in flags["tree31"]
    assert f"--spec-synth-tree {SHAPES}" in flags["tree31"]


def test_a_length_by_lot_makes_up_for_flat_trees() -> None:
    assert modes.asked_length([15], 6.1) == pytest.approx(6.1, abs=1e-3)
    assert modes.asked_length([3, 5, 12], 4.0) > 4.2
    assert modes.asked_length([2, 3], 8.3) == 16
    assert all(len(modes.depths_of(SHAPES, budget)) == 64 for budget in modes.BUDGETS)


def test_sides_take_turns_and_trees_are_ours() -> None:
    sides = [modes.Side("base", Path("b")), modes.Side("ours", Path("o"))]
    order = [(side.name, mode.name) for side, mode in modes.turns(sides, modes.modes([15]))]
    chains = [("ours", "chain7"), ("base", "chain7"), ("base", "chain15"), ("ours", "chain15")]
    assert order == [("base", "ar"), ("ours", "ar"), *chains, ("ours", "tree15")]


def test_rounds_are_those_of_emitted_tokens() -> None:
    timings = {"predicted_n": 24, "draft_n_accepted": 9, "predicted_ms": 140.0}
    assert (serve.rounds(timings), serve.round_ms(timings), round(serve.tok_s(timings), 2)) == (14, 10.0, 164.29)


def test_texts_that_part_are_named_with_the_place() -> None:
    found = measure.equality({"base_ar": [[1, 2], [3, 4]], "ar": [[1, 2], [3, 5]], "tree": [[1, 2], [3, 5]]}, ["a", "b"])
    assert found["tree"] == {"prompts": 2, "equal_to_base_ar": 1, "equal_to_own_ar": 2, "parts": [{"prompt": "b", "at": 1}]}


def bench(fakes: Path, out: Path, *more: str) -> int:
    sides = ["--base", str(fakes), "--ours", str(fakes), "--target", "t.gguf", "--draft", "d.gguf"]
    return gpu_bench.main([*sides, "--device", "nothing", "--out", str(out), "--n-predict", "16", *more])


def test_parts_against_a_fake_server(fakes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    assert bench(fakes, out, "--part", "modes", "--budget", "15") == 0
    assert bench(fakes, out, "--part", "passes,depths,synth", "--budget", "15", "--repeats", "2", "--rows", "1,8", "--prefill", "64") == 0
    data = json.loads(out.read_text())
    for side in ("base", "ours"):
        assert data[side]["ar_ms"] == fig(*[10.0] * 5)
        assert data[side]["mem_ar_mb"] is None
        assert data[side]["rows"] == {"1": fig(11, 11), "8": fig(18, 18)}
        assert data[side]["pp64_tok_s"]["median"] == pytest.approx(865, abs=1)
        assert sorted(data[side]["depths"]["chain15"]) == ["0", "32768", "8192"]
        assert sorted(data[side]["synth_chain"]) == ["4.8", "6.1", "8.3"]
    assert "tree15_round_ms" in data["ours"]
    assert "tree15_round_ms" not in data["base"]
    assert data["ours"]["sessions"]["tree15"]["tokens_per_round"]["median"] > 2.9
    order = [(step["side"], step["what"]) for step in data["steps"] if step["part"] == "modes"]
    assert order[:4] == [("base", "ar"), ("ours", "ar"), ("ours", "chain7"), ("base", "chain7")]
    assert data["conditions"]["weights"] == "random"
    assert (tmp_path / "r" / "logs" / "modes-ours-tree15.log").is_file()
    assert gpu_bench.main(["--check", str(out)]) == 0
    assert "base.mem_ar_mb" in capsys.readouterr().out
    data["base"]["ar_ms"]["median"] = 9
    out.write_text(json.dumps(data))
    assert gpu_bench.main(["--check", str(out)]) == 1
    assert "base.ar_ms: median is 9, expected 10" in capsys.readouterr().out


def test_the_tiny_pair_against_a_fake_server(fakes: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    sides = ["--base", str(fakes), "--ours", str(fakes), "--device", "nothing", "--out", str(out), "--n-predict", "8"]
    assert gpu_bench.main([*sides, "--part", "tiny", "--prompts", "2", "--repeats", "3"]) == 0
    tiny = json.loads(out.read_text())["tiny"]
    assert tiny["tree_tok_s"] == fig(100, 100, 100)
    assert tiny["equality"]["tree"] == {"prompts": 2, "equal_to_base_ar": 2, "equal_to_own_ar": 2, "parts": []}


def test_a_server_that_dies_fails_its_step_only(fakes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    assert bench(fakes, out, "--part", "modes", "--mode", "tree63,tree15", "--repeats", "1") == 1
    data = json.loads(out.read_text())
    assert "tree15_round_ms" in data["ours"]
    assert "tree63_round_ms" not in data["ours"]
    assert "did not get ready" in data["steps"][1]["failed"]
    assert "no memory" in (tmp_path / "r" / "logs" / "modes-ours-tree63.log").read_text()


def test_memory_is_the_peak_less_what_was_there(fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi, seen = tmp_path / "smi", tmp_path / "seen"
    smi.write_text(f"#!/bin/sh\nif [ -e {seen} ]; then echo 1500; else touch {seen}; echo 1000; fi\n")
    smi.chmod(stat.S_IRWXU)
    monkeypatch.setattr(serve, "NVIDIA_SMI", (str(smi),))
    assert bench(fakes, tmp_path / "r.json", "--part", "modes", "--mode", "ar", "--repeats", "2") == 0
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["base"]["mem_ar_mb"] == fig(500, 500)
    assert data["ours"]["mem_ar_mb"] == fig(0, 0)


def test_wrong_options_are_told(fakes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    for options, words in ((["--part", "mode"], "--part mode"), (["--part", "modes", "--mode", "tree7"], "--mode tree7")):
        assert bench(fakes, out, *options) == 1
        assert words in capsys.readouterr().err
    assert gpu_bench.main(["--device", "nothing", "--part", "modes"]) == 1
    assert "--base is missing" in capsys.readouterr().err
    assert gpu_bench.main(["--build"]) == 1
    assert "--work is missing" in capsys.readouterr().err


def test_pieces_of_a_round_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, source = tmp_path / "r.json", tmp_path / "split.json"
    pieces = {key: [1.0, 3.0, 2.0] for key in gpu_bench.SPLIT}
    source.write_text(json.dumps({**pieces, "mode": "tree15"}))
    command = ["--split", str(source), "--device", "nothing", "--out", str(out)]
    assert gpu_bench.main(command) == 0
    split = json.loads(out.read_text())["ours"]["round_split_ms"]
    assert split["verify"]["median"] == 2
    assert split["mode"] == "tree15"
    source.write_text(json.dumps({**pieces, "walk": []}))
    assert gpu_bench.main(command) == 1
    assert "--split: walk is []" in capsys.readouterr().err


def test_a_build_of_another_series_is_refused(tmp_path: Path) -> None:
    assert build.facts("ours", tmp_path)["series_digest"].startswith("unknown")
    (tmp_path / "gpu_bench.json").write_text(json.dumps({"series_digest": vendor.digest([])}))
    assert build.facts("base", tmp_path)["series_digest"] == vendor.digest([])
    with pytest.raises(vendor.VendorError, match="build it again"):
        build.facts("ours", tmp_path)


def test_the_table_puts_base_beside_ours() -> None:
    text = table.markdown(result(), "bench/results/x.json")
    for line in (
        "| plain decoding, ms a token | 12.50 [12.00, 13.00] | 12.50 [12.00, 13.00] | 1.000 |",
        "| chain of 15, ms a round | 40.00 [40.00, 40.00] | 30.00 [30.00, 30.00] | 0.750 |",
        "| tree of 15 nodes, ms a round | - | 35.00 [35.00, 35.00] | - |",
        "| pass over 16 rows, ms | 20.00 [20.00, 20.00] | 20.00 [20.00, 20.00] | 1.000 |",
        "| ar behind 8192 tokens, ms a token | 14.00 [14.00, 14.00] | 14.00 [14.00, 14.00] | 1.000 |",
        "| ours, tree 15 | 4.8 | 4.80 [4.80, 4.80] | 151.0 [150.0, 152.0] | 1.887 |",
        "| host gaps | 0.500 [0.500, 0.500] |",
        "| ours, ar | 1.00 [1.00, 1.00] | 900.0 [900.0, 900.0] | 2 of 3 |",
    ):
        assert line in text.splitlines(), line
    assert "random weights, synthetic acceptance" in text
    for words in ("Some GPU", "driver 570", "2026-01-02", "0123456789abcdef", "([data](bench/results/x.json))"):
        assert words in text
    assert "mem_" not in text
    assert "tree15, MiB" not in text


def test_a_stale_table_is_found(tmp_path: Path) -> None:
    empty = f"a\n<!-- gpu-table:begin -->\n{gpu_report.NONE}\n<!-- gpu-table:end -->\nb\n"
    assert gpu_report.problem(empty, tmp_path) is None
    assert "names no JSON" in str(gpu_report.problem(empty.replace("no GPU", "a GPU"), tmp_path))
    assert "has no" in str(gpu_report.problem("", tmp_path))
    path = tmp_path / "bench" / "results" / "x.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result()))
    full = gpu_report.filled(empty, gpu_report.text_of(path, tmp_path))
    assert gpu_report.problem(full, tmp_path) is None
    assert gpu_report.filled(full, gpu_report.NONE) == empty
    assert "is stale" in str(gpu_report.problem(full.replace("12.50", "11.50"), tmp_path))
    wrong = result()
    wrong["base"]["ar_ms"]["median"] = 1
    path.write_text(json.dumps(wrong))
    assert "wrong result" in str(gpu_report.problem(full, tmp_path))
    path.unlink()
    assert "does not exist" in str(gpu_report.problem(full, tmp_path))


def test_plots_are_the_same_for_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are of the bench extra")
    paths = plots.write(result(), tmp_path / "a")
    assert [path.name for path in paths] == ["rows.svg", "rounds.svg", "speed.svg"]
    for path, other in zip(paths, plots.write(result(), tmp_path / "b"), strict=True):
        assert path.read_bytes() == other.read_bytes()


def test_readme_has_the_table_of_its_result() -> None:
    assert gpu_report.problem((ROOT / "README.md").read_text()) is None


def test_committed_results_are_right() -> None:
    found = [path for path in (ROOT / "bench" / "results").glob("*.json") if "builds" in json.loads(path.read_text())]
    for path in found:
        assert figures.wrong(json.loads(path.read_text())) == [], path.name


def test_the_script_imports_little() -> None:
    """A machine with a GPU has Python and numpy; gguf, the bindings and matplotlib only where they are needed."""
    code = "import sys; sys.modules.update(dict.fromkeys(['gguf', 'llama_cpp', 'matplotlib', 'yaml', 'diskcache', 'jinja2'])); import gpu_bench"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "scripts", check=True)
