"""`serve`, `run`, `demo`, `bench` and `verify` as a user types them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from llama_dflash.builds import Build

PROGRAM = str(Path(sys.executable).parent / "llama-dflash")
FIXED_KEYS = {"schema", "command", "build", "models", "prompts", "n_predict", "sampling", "modes"}


def dflash(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *args], capture_output=True, text=True, timeout=300, cwd=cwd)


def start_serve(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([PROGRAM, "serve", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("how", "rollback"), [(signal.SIGINT, "snapshot"), (signal.SIGTERM, "replay")])
def test_serve_announces_answers_and_stops_cleanly(how: signal.Signals, rollback: str, port: int) -> None:
    process = start_serve("--port", str(port), "--rollback", rollback)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"http://127.0.0.1:{port}  mode = chain")
    assert "n_max = 15" in line
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as reply:
        assert reply.status == 200
    process.send_signal(how)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert err.splitlines()[0].startswith("llama-dflash: one slot (-np 1): ") == (rollback == "snapshot")
    assert err.splitlines()[-1] == "llama-dflash: stopped"
    with socket.socket() as s:  # the child is gone too
        assert s.connect_ex(("127.0.0.1", port)) != 0


def test_serve_and_run_draft_trees_by_budget(exact: Build, port: int) -> None:
    native = ("--native", str(exact.package.parent))
    process = start_serve("--port", str(port), "--budget", "15", "--top-k", "4", *native)
    assert process.stdout is not None
    line = process.stdout.readline()
    process.terminate()
    process.communicate(timeout=20)
    assert line.startswith(f"http://127.0.0.1:{port}  mode = tree, type = draft-dflash")
    assert "n_max = 15, budget = 15, top_k = 4, spine = 0, rollback = replay" in line
    same = ("-p", "def fib(n):", "-n", "40", *native, "--", "--temp", "0", "-t", "1")
    done, chain = dflash("run", "--budget", "15", *same), dflash("run", *same)
    assert done.returncode == chain.returncode == 0, done.stderr
    assert done.stderr.startswith("[mode = tree, type = draft-dflash")
    assert done.stdout == chain.stdout != ""


def test_serve_says_why_llama_server_died(port: int) -> None:
    process = start_serve("--port", str(port), "--", "--no-such-flag")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith("llama-dflash: error: llama-server exited with code 1: error: invalid argument: --no-such-flag")


def test_serve_shows_the_log_when_llama_server_is_killed(port: int) -> None:
    process = start_serve("--port", str(port), "--json")
    assert process.stdout is not None
    while process.stdout.readline() != "}\n":
        pass
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.is_file():
        pytest.skip("the kernel does not list children")
    server_pid = int(children.read_text().split()[0])
    os.kill(server_pid, signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "llama-server was killed by signal 9" in err
    assert len(err.splitlines()) > 3


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (["--port", "1234"], "--port stands behind '--', expected it before"),
        (["--spec-draft-n-max", "0"], "the server runs in mode ar, expected chain: the maximum draft length is 0"),
    ],
)
def test_serve_refuses_what_it_would_have_to_lie_about(flags: list[str], want: str, port: int) -> None:
    done = dflash("serve", "--port", str(port), "--", *flags)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert f"llama-dflash: error: {want}" in done.stderr


def test_serve_works_behind_a_proxy_and_with_a_key(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    process = start_serve("--port", str(port), "--", "--api-key", "secret")
    assert process.stdout is not None
    assert "mode = chain" in process.stdout.readline()
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stopped_command_leaves_no_server(tmp_path: Path, how: signal.Signals) -> None:
    process = subprocess.Popen([PROGRAM, "bench", "--repeats", "50", "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and not children.read_text():
        time.sleep(0.05)
    server_pid = int(children.read_text().split()[0])
    process.send_signal(how)
    process.communicate(timeout=30)
    assert process.returncode == (130 if how is signal.SIGINT else 128 + how)
    assert not Path(f"/proc/{server_pid}").exists()


def test_run_refuses_a_prompt_that_does_not_fit() -> None:
    done = dflash("run", "-p", "def f(x):\n    return x\n" * 200, "-c", "256")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("llama-dflash: error: request (")
    assert "exceeds the available context size" in done.stderr


def test_run_works_without_the_timings_line() -> None:
    done = dflash("run", "-p", "def f(x):", "-n", "300", "--", "--no-show-timings")
    with_timings = dflash("run", "-p", "def f(x):", "-n", "300", "--", "--temp", "0")
    assert done.returncode == with_timings.returncode == 0
    assert len(done.stdout) > 300
    assert "Exiting" not in done.stdout + with_timings.stdout


def test_serve_refuses_a_port_in_use() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        done = dflash("serve", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"llama-dflash: error: port {port} on 127.0.0.1 cannot be used (Address already in use), expected a free port; "
        "stop the program that holds it, or choose another with --port"
    ]


def test_serve_passes_flags_on(port: int) -> None:
    process = start_serve("--port", str(port), "--", "-c", "512", "--alias", "mine")
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/props", timeout=10) as reply:
            props = json.load(reply)
        assert props["model_alias"] == "mine"
        assert props["default_generation_settings"]["n_ctx"] <= 512
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_run_completes_a_prompt_from_another_folder(tmp_path: Path) -> None:
    done = dflash("run", "-p", "def fib(n):", "-n", "40", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 20
    assert done.stderr.startswith("[mode = chain, type = draft-dflash")
    assert "rounds:" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("prompt", ["x" * 700 + "\n    ", 'print("a\\n")\n', "# ümlaut\ndef f():\n"])
def test_run_separates_the_answer_from_its_surroundings(prompt: str) -> None:
    done = dflash("run", "-p", prompt, "-n", "24")
    assert done.returncode == 0, done.stderr
    assert "llama" not in done.stdout
    assert "available commands" not in done.stdout
    assert "[ Prompt" not in done.stdout
    assert prompt.strip() not in done.stdout


def test_run_chats_over_stdin() -> None:
    done = subprocess.run([PROGRAM, "run", "-n", "8"], input="def f():\n/exit\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "speculative: mode = chain" in done.stdout


def test_demo_prints_the_comparison() -> None:
    done = dflash("demo", "--prompts", "3", "--n-predict", "48")
    assert done.returncode == 0, done.stderr
    for word in ("ar", "chain 15", "tree 15", "fewer rounds (chain).", "fewer rounds (tree).", "gains rounds, not time"):
        assert word in done.stdout
    assert done.stdout.count("Same text in") == 2


def test_verify_json(tmp_path: Path) -> None:
    args = ("verify", "--mode", "chain", "--prompts", "4", "--n-predict", "64", "--native", "exact", "--json", "--out", str(tmp_path))
    done = dflash(*args)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) >= FIXED_KEYS
    chain = result["modes"]["chain"]
    assert (chain["identical"], chain["diverged"], chain["n_max"]) == (4, [], 15)
    assert result["reference"]["kind"] == "unpatched pin"
    assert result["modes"]["ar"]["rounds"] == 4 * 63 > chain["rounds"]
    assert chain["mean_accepted"] == round(4 * 63 / chain["rounds"], 4)
    rows = json.loads((tmp_path / "tokens.json").read_text())
    assert [len(row["tokens"]) for row in rows] == [64] * 8
    assert json.loads((tmp_path / "result.json").read_text()) == result


def verify_exact(exact: Build, out: Path, *args: str) -> dict[str, Any]:
    """Result of a `verify` that passed; one thread, as threads that wait for each other crawl on a busy machine."""
    fixed = ("--prompts", "4", "--n-predict", "64", "--native", str(exact.package.parent), "-t", "1", "--json", "--out", str(out))
    done = dflash("verify", *fixed, *args)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["passed"]
    assert all(result["checks"].values())
    return result


@pytest.mark.parametrize(
    ("budget", "sampling"), [(4, ()), (15, ()), (31, ()), (15, ("--temperature", "0.8", "--seed", "7"))], ids=["4", "15", "31", "15-sampled"]
)
def test_verify_of_trees(exact: Build, tmp_path: Path, budget: int, sampling: tuple[str, ...]) -> None:
    result = verify_exact(exact, tmp_path, "--mode", "tree", "--budget", str(budget), *sampling)
    assert result["reference"]["kind"] == "unpatched pin"
    assert list(result["modes"]) == ["ar", "chain", "tree"]
    assert set(result["checks"]) == {
        "effective mode", "drafts were verified", "fewer rounds than AR", "nodes per round", "fewer rounds than the chain", "all ids equal",
    }  # fmt: skip
    chain, tree = result["modes"]["chain"], result["modes"]["tree"]
    assert (chain["identical"], tree["identical"], chain["diverged"], tree["diverged"]) == (4, 4, [], [])
    assert tree["rounds"] < chain["rounds"] < result["modes"]["ar"]["rounds"] == 4 * 63
    assert (chain["n_max"], tree["n_max"]) == (min(budget, 15), 15)
    assert (tree["effective"]["mode"], tree["budget"], tree["top_k"], tree["spine"], tree["rollback"]) == ("tree", budget, 16, 0, "replay")
    # 16 children are enough for a smaller budget even at the last token but one; 31 nodes need two.
    assert tree["nodes_per_round"] == budget if budget <= 16 else budget - 1 < tree["nodes_per_round"] <= budget
    rows = json.loads((tmp_path / "tokens.json").read_text())
    assert [(row["mode"], len(row["tokens"])) for row in rows] == [(mode, 64) for mode in ("ar", "chain", "tree") for _ in range(4)]


def test_verify_of_trees_passes_their_options_on(exact: Build, tmp_path: Path) -> None:
    tree = verify_exact(exact, tmp_path, "--mode", "tree", "--top-k", "2", "--spine", "4", "--n-max", "7")["modes"]["tree"]
    assert (tree["n_max"], tree["budget"], tree["top_k"], tree["spine"]) == (7, 15, 2, 4)
    assert len(tree["accept_per_position"]) == 7


def test_a_tree_without_branches_is_the_chain(exact: Build, tmp_path: Path) -> None:
    result = verify_exact(exact, tmp_path, "--mode", "tree", "--top-k", "1")
    same = ("rounds", "drafted", "accepted", "nodes_per_round", "accept_per_position")
    chain, tree = result["modes"]["chain"], result["modes"]["tree"]
    assert {name: tree[name] for name in same} == {name: chain[name] for name in same}
    assert "fewer rounds than the chain" not in result["checks"]


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_verify_of_chains_by_rollback(exact: Build, tmp_path: Path, rollback: str) -> None:
    chain = verify_exact(exact, tmp_path, "--mode", "chain", "--rollback", rollback)["modes"]["chain"]
    assert (chain["identical"], chain["rollback"], chain["effective"]["rollback"]) == (4, rollback, rollback)


def test_serve_refuses_to_draft_chains_where_trees_were_asked_for(exact: Build, port: int) -> None:
    args = ("--budget", "15", "--native", str(exact.package.parent), "--port", str(port))
    done = dflash("serve", *args, "--", "--spec-draft-tree", "0", "--spec-rollback", "snapshot")
    assert (done.returncode, done.stdout) == (1, "")
    assert "llama-dflash: error: the server runs in mode chain, expected tree" in done.stderr


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_verify_of_an_inexact_build_reports_noise(tmp_path: Path, temperature: str) -> None:
    args = ("verify", "--prompts", "20", "--n-predict", "64", "--temperature", temperature, "--seed", "1", "--json")
    done = dflash(*args, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["reference"]["kind"] == "same build"
    found = result["modes"]["chain"]["diverged"]
    assert result["modes"]["chain"]["identical"] == 20 - len(found)
    for d in found:
        assert set(d) == {"prompt", "position", "reference", "got", "top2_gap", "noise_floor"}
        assert temperature != "0" or d["top2_gap"] < 10 * d["noise_floor"]
    assert ("not_judged" in result) == (temperature != "0" and found != [])


def test_bench_writes_all_its_files(tmp_path: Path) -> None:
    done = dflash("bench", "--modes", "ar,chain,tree", "--prompts", "2", "--n-predict", "24", "--repeats", "2", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) >= FIXED_KEYS
    assert list(result["modes"]) == ["ar", "chain", "tree"]
    assert (result["modes"]["tree"]["budget"], "| tree 15 |" in (tmp_path / "result.md").read_text()) == (15, True)
    assert all(len(m["tok_s_repeats"]) == 2 for m in result["modes"].values())
    assert {p.name for p in tmp_path.iterdir()} == {"result.json", "tokens.json", "result.md", "plot.png"}
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
