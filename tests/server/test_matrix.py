"""Every request feature x {off, chain, tree} x {1 slot, 4 slots, 4 slots in one cache} against the unpatched pin.

A cell is one server that runs all cases of matrix_cases.py. What it answers (text, ids, finish reason, usage, probabilities, tool
calls, cached tokens, every event of a stream) must equal what the pin's llama-server answers without drafts to the same requests,
one at a time. Both builds are exact, so equality is literal.
"""

from __future__ import annotations

import queue
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from matrix_cases import CASES, CODE, LONG, SHORT, Case, Known
from matrix_session import Reply, Session
from matrix_template import CHAT_TEMPLATE

from llama_dflash.builds import Build
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

Pair = tuple[Path, Path]
MODES = ("off", "chain", "tree")
LAYOUTS = {"1 slot": ("-np", "1"), "4 slots": ("-np", "4", "-no-kvu"), "4 slots unified": ("-np", "4", "-kvu")}
# Exact builds refill no freed cell while a sequence lives, so drafts need room.
CONTEXT = "32768"
# (mode, layout, case) -> why it is not shown. Nothing is left out silently.
NOT_SHOWN: dict[tuple[str, str, str], str] = {}
# Features that no cell can show, and why.
NOT_IN_THE_MATRIX = {
    "thinking that the model ends itself": "the embedded pair was not trained to think; the budget ends it, which forces tokens in a path",
    "a call begun under tool_choice auto": "the pair begins none; a lazy grammar that a word triggers is shown instead (lazy_grammar)",
    "calls after thinking": "as above; a JSON schema after thinking is shown instead (thinking)",
    "--reasoning-budget": "the server reads the flag as the default of reasoning_budget_tokens, which the cases set",
    "sampled texts of /v1/messages": "the interface passes no seed on; its cases are greedy",
    "t_max_predict_ms": "depends on the clock",
    "context shift": "the pin refuses it for models with recurrent layers",
    "images, adapters, infill": "the embedded pair has no projector, no adapter and no tokens for infill",
    "post_sampling_probs with backend_sampling": "the graph's probabilities differ from the host's in the last digit, on the pin too",
}


def n_slots(layout: str) -> int:
    return int(LAYOUTS[layout][1])


def config(pair: Pair, mode: str) -> RunConfig:
    if mode == "off":
        return RunConfig(pair[0])
    return RunConfig(*pair, 15, budget=15 if mode == "tree" else None).checked()


def flags(layout: str, folder: Path) -> list[str]:
    fixed = ["-t", "1", "-tb", "1", "-c", CONTEXT, "--cache-ram", "0", "--metrics", "--jinja", "--chat-template", CHAT_TEMPLATE]
    return [*fixed, "--slot-save-path", str(folder), *LAYOUTS[layout]]


@dataclass
class Answers:
    """What one server gave.

    Attributes:
        mode: the effective mode that it tells.
        replies: by case; an exception stands in for what failed.
        timings: by case, with the counters of drafts.
        busy_slots: mean number of busy slots per decode.
    """

    mode: str = ""
    replies: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, list[Reply]] = field(default_factory=dict)
    busy_slots: float = 0.0

    def run(self, server: Server, name: str, slot: int | None, known: Known) -> None:
        session = Session(server, slot, f"{name}-{slot}")
        try:
            self.replies[name] = CASES[name].run(session, known)
        except Exception as e:  # told by the test of the case
            self.replies[name] = e
        self.timings[name] = session.timings


def ask_all(server: Server, n_slots: int, known: Known, wanted: Callable[[Case], bool] = lambda c: True) -> Answers:
    """Run the cases: those that a slot can be chosen for side by side, one per slot, then the others alone."""
    out = Answers(server.client.effective_mode()["mode"])
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name, c in CASES.items():
        if wanted(c) and not c.alone:
            names.put(name)

    def work(slot: int) -> None:
        while True:
            try:
                name = names.get_nowait()
            except queue.Empty:
                return
            out.run(server, name, slot, known)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(n_slots)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for name, c in CASES.items():
        if wanted(c) and c.alone:
            for slot in range(n_slots):
                Session(server, slot, name).slot_action("erase")
            out.run(server, name, None, known)
    out.busy_slots = busy_slots(server)
    return out


def busy_slots(server: Server) -> float:
    with urllib.request.urlopen(f"{server.client.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    values = [line.split()[1] for line in lines if line.startswith("llamacpp:n_busy_slots_per_decode ")]
    return float(values[0])


def know(server: Server) -> Known:
    """The pin's greedy text that cases are cut from: of the prompt whose text repeats itself least."""
    found = []
    for prompt in SHORT:
        ids = server.client.post("/tokenize", {"content": prompt})["tokens"]
        reply = Session(server, 0, "known").ask(CODE, prompt=ids, n_predict=32, n_probs=1, return_tokens=True, temperature=0)
        pieces = [p["token"] for p in reply["completion_probabilities"]]
        if reply["stop_type"] == "limit" and "\ufffd" not in "".join(pieces):
            found.append((prompt, ids, reply["tokens"], pieces))
    eos = server.client.post("/tokenize", {"content": server.client.get("/props")["eos_token"], "parse_special": True})["tokens"]
    return Known(*max(found, key=lambda f: len(set(f[2][:24]))), eos[0])


@dataclass(frozen=True)
class Pin:
    """What the unpatched pin answers: one slot, and four for the cases that need them."""

    known: Known
    one: Answers
    four: Answers

    def answers(self, name: str, layout: str) -> Any:
        return (self.four if CASES[name].by_slots and n_slots(layout) > 1 else self.one).replies[name]


@pytest.fixture(scope="module")
def pin(reference: Build, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pin:
    folder = tmp_path_factory.mktemp("slots")
    with Server(reference, RunConfig(pair[0]), extra=flags("1 slot", folder)) as server:
        known = know(server)
        one = ask_all(server, 1, known)
    with Server(reference, RunConfig(pair[0]), extra=flags("4 slots", folder)) as server:
        four = ask_all(server, 4, known, lambda c: c.by_slots)
    return Pin(known, one, four)


Cell = tuple[str, str]


@pytest.fixture(scope="module")
def cells(
    request: pytest.FixtureRequest, exact: Build, pair: Pair, pin: Pin, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Cell, Future[Answers]]]:
    """The cells that the chosen tests need, two at a time: each server computes in one thread."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = dict.fromkeys(p["cell"] for p in params if "cell" in p)
    folders = {cell: tmp_path_factory.mktemp("slots") for cell in wanted}

    def run(cell: Cell) -> Answers:
        mode, layout = cell
        with Server(exact, config(pair, mode), extra=flags(layout, folders[cell])) as server:
            return ask_all(server, n_slots(layout), pin.known)

    with ThreadPoolExecutor(2) as pool:
        yield {cell: pool.submit(run, cell) for cell in wanted}


@pytest.fixture(scope="module")
def cell(request: pytest.FixtureRequest, cells: dict[Cell, Future[Answers]]) -> tuple[str, str, Answers]:
    mode, layout = request.param
    return mode, layout, cells[mode, layout].result()


CELLS = [pytest.param((mode, layout), id=f"{mode}, {layout}") for mode in MODES for layout in LAYOUTS]
all_cells = pytest.mark.parametrize("cell", CELLS, indirect=True)


def first_difference(got: Any, want: Any, where: str = "") -> str:
    """Path and values of the first difference; whole replies are too long to read."""
    if isinstance(got, dict) and isinstance(want, dict):
        for key in sorted({*got, *want}):
            if got.get(key) != want.get(key) or (key in got) != (key in want):
                return first_difference(got.get(key, "(missing)"), want.get(key, "(missing)"), f"{where}.{key}")
    if isinstance(got, list) and isinstance(want, list):
        for i, (g, w) in enumerate(zip(got, want, strict=False)):
            if g != w:
                return first_difference(g, w, f"{where}[{i}]")
        return f"{where}: {len(got)} entries, expected {len(want)}"
    return f"{where}: {str(got)[:600]!r}, expected {str(want)[:600]!r}"


@pytest.mark.parametrize("name", CASES)
def test_the_pin_answers(pin: Pin, name: str) -> None:
    """The plain side of each comparison is no error, so that equality says something."""
    for replies in [pin.one.replies[name]] + ([pin.four.replies[name]] if CASES[name].by_slots else []):
        if isinstance(replies, Exception):
            raise replies
        refused = [r for r in replies if isinstance(r, dict) and "error" in r]
        assert CASES[name].errors or not refused, refused


@all_cells
@pytest.mark.parametrize("name", CASES)
def test_equals_the_pin_without_drafts(cell: tuple[str, str, Answers], pin: Pin, name: str) -> None:
    mode, layout, answers = cell
    if (mode, layout, name) in NOT_SHOWN:
        pytest.skip(NOT_SHOWN[mode, layout, name])
    got, want = answers.replies[name], pin.answers(name, layout)
    if isinstance(got, Exception):
        raise got
    assert got == want, first_difference(got, want, name)


@all_cells
def test_drafting_ran(cell: tuple[str, str, Answers]) -> None:
    """Effective mode, drafted nodes, and fewer rounds than tokens in every case that can draft."""
    mode, layout, answers = cell
    assert answers.mode == {"off": "ar"}.get(mode, mode)
    assert (answers.busy_slots > 1.5) == (n_slots(layout) > 1)
    for name, timings in answers.timings.items():
        full = [t for t in timings if "rounds" in t and t["predicted_n"] > 0]
        n_later = sum(t["predicted_n"] - 1 for t in full)
        n_rounds = sum(t["rounds"] for t in full)
        n_drafted, n_accepted = (sum(t.get(key, 0) for t in full) for key in ("draft_n", "draft_n_accepted"))
        assert n_rounds + n_accepted == n_later, name
        if mode == "off":
            assert n_drafted == 0, name
        elif not CASES[name].no_drafts:
            assert n_drafted > 0, name
            assert n_rounds < n_later, name


def test_what_is_not_shown_exists() -> None:
    for mode, layout, name in NOT_SHOWN:
        assert mode in MODES
        assert layout in LAYOUTS
        assert name in CASES


def narrow(s: Session) -> list[Any]:
    """Texts that end with the context, prompts that come back from the cache in memory, a prompt too long."""
    tail = {"n_predict": -1, "ignore_eos": True, "return_tokens": True, "cache_prompt": True}
    greedy, hot = {"temperature": 0}, {"temperature": 0.8, "seed": 2}
    replies = [s.ask(CODE, prompt=SHORT[i], **tail, **how) for i, how in ((1, greedy), (2, hot), (1, hot), (5, greedy), (2, greedy))]
    first = [r["tokens"] for r in replies]
    ids = [*s.server.client.post("/tokenize", {"content": SHORT[1]})["tokens"], *first[0][:30]]
    replies.append(s.ask(CODE, prompt=ids, n_predict=12, cache_prompt=True, return_tokens=True, **hot))
    assert all(r["truncated"] and r["stop_type"] == "limit" for r in replies[:5])
    assert any(r["timings"]["cache_n"] > 0 for r in replies[2:]), "no prompt came back"
    return [*replies, s.ask(CODE, prompt=LONG[0] + LONG[1], n_predict=4)]


def narrow_answers(build: Build, config: RunConfig) -> tuple[list[Any], list[Reply]]:
    extra = ["-t", "1", "-tb", "1", "-c", "4096", "-np", "1", "-kvu", "--kv-unified-per-slot", "160"]
    with Server(build, config, extra=extra) as server:
        session = Session(server, None, "narrow")
        return narrow(session), session.timings


@pytest.fixture(scope="module")
def pin_narrow(reference: Build, pair: Pair) -> list[Any]:
    return narrow_answers(reference, RunConfig(pair[0]))[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_narrow_context_equals_the_pin(exact: Build, pair: Pair, pin_narrow: list[Any], mode: str) -> None:
    got, timings = narrow_answers(exact, config(pair, mode))
    assert got == pin_narrow, first_difference(got, pin_narrow)
    assert "error" in pin_narrow[-1]
    assert (sum(t.get("draft_n", 0) for t in timings) > 0) == (mode != "off")
