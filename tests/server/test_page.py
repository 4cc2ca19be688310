"""The web page in headless Chromium: a message, a reply that streams, figures that are those of its timings."""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llama_dflash import builds
from llama_dflash.builds import Build
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Pair = tuple[Path, Path]
# .ci/run sets it: there what is missing is a failure.
MUST_RUN = bool(os.environ.get("LLAMA_DFLASH_TEST_PAGE"))
FLAGS = ("-c", "1024", "-n", "600", "--temp", "0", "-t", "1")
# The page asks whether the server has tools; a 403 is the server's way to say no, and the browser logs it.
HARMLESS = re.compile(r"status of 403 .* \S+/tools$")
# Figures of the row below a reply; a dot for the slash, which playwright's selectors do not take.
SPEED = r"\bt.s\s*$"
FIGURES = (r"^\s*(chain|tree)\s*$", r"\bt.round\b", "accepted")
RECORD_LENGTHS = """() => {
    window.lengths = [];
    new MutationObserver(() => {
        const reply = document.querySelector('.agentic-text');
        const n = reply ? reply.textContent.length : 0;
        if (n !== window.lengths.at(-1)) window.lengths.push(n);
    }).observe(document.body, {childList: true, subtree: true, characterData: true});
}"""


def need(reason: str) -> None:
    """Skip for `reason`, or fail where the page must be tested."""
    (pytest.fail if MUST_RUN else pytest.skip)(reason)


@pytest.fixture(scope="module")
def built() -> Build:
    """The installed build, with the page."""
    build = builds.resolve(builds.INSTALLED)
    if build.info["page"] != "built":
        need(f"the build has no page: {build.info['page_reason']}")
    return build


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium; playwright's own download is not used."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        need("no chromium found; on Debian: apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        # Chromium's sandbox does not start for root, as which CI runs; it sees our own server only.
        opened = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


class Visit:
    """One visit of a server's page, with what the browser complained of."""

    def __init__(self, browser: Browser, server: Server, width: int = 1100) -> None:
        self.page: Page = browser.new_page(viewport={"width": width, "height": 800})
        self.page.set_default_timeout(60_000)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda e: self.errors.append(f"exception: {e}"))
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.errors.append(f"{m.type}: {m.text} {m.location['url']}"))
        self.page.goto(server.client.url)

    def send(self, text: str) -> None:
        """Send a message."""
        self.page.get_by_placeholder("Type a message").fill(text)
        self.page.get_by_role("button", name="Send").click()  # waits until the page knows the model

    def ask(self, text: str) -> tuple[str, dict[str, Any]]:
        """Send a message, wait for the end of the reply, return its text and its last timings."""
        with self.page.expect_response(lambda r: r.url.endswith("/v1/chat/completions")) as reply:
            self.send(text)
        lines = [line.removeprefix("data: ") for line in reply.value.text().splitlines() if line.startswith("data: {")]
        self.badge(SPEED).wait_for()
        self.page.get_by_role("button", name="Stop", exact=True).wait_for(state="detached")
        events = [json.loads(line) for line in lines]
        pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        return "".join(pieces), [event for event in events if "timings" in event][-1]["timings"]

    def badge(self, pattern: str) -> Any:
        """A figure below the reply."""
        return self.page.get_by_role("button", name=re.compile(pattern)).last

    def figures(self) -> tuple[str, float, float]:
        """Mode, tokens per round and accepted percent, as shown."""
        mode, per_round, accepted = (self.badge(p).inner_text().strip() for p in FIGURES)
        return mode, float(per_round.removesuffix(" t/round")), float(accepted.removesuffix("% accepted"))

    def complaints(self) -> list[str]:
        return [line for line in self.errors if not HARMLESS.search(line)]


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_a_reply_streams_and_its_figures_are_those_of_its_timings(
    built: Build, browser: Browser, pair: Pair, tmp_path: Path, mode: str
) -> None:
    config = RunConfig(*pair, 15, budget=15 if mode == "tree" else None)
    with Server(built, config, extra=FLAGS) as server:
        visit = Visit(browser, server)
        visit.page.evaluate(RECORD_LENGTHS)
        text, t = visit.ask("def add(a, b):")
        visit.page.screenshot(path=tmp_path / f"page-{mode}.png")
        lengths = visit.page.evaluate("window.lengths")
        assert sorted(lengths) == lengths
        assert len([n for n in lengths if 0 < n < lengths[-1]]) > 1, "the text came in pieces"
        assert visit.page.locator(".agentic-text").inner_text().split() == text.split() != []
        mode_shown, per_round, accepted = figures = visit.figures()
        assert mode_shown == mode
        assert per_round == pytest.approx((t["predicted_n"] - 1) / t["rounds"], abs=0.0051)
        assert accepted == pytest.approx(100 * t["draft_n_accepted"] / t["draft_n"], abs=0.051)
        assert per_round > 1
        assert ("draft_n_tree_nodes" in t) == (mode == "tree")
        visit.page.reload()
        assert visit.figures() == figures
        assert visit.complaints() == []


def test_figures_come_while_it_streams_and_stay_after_a_stop(built: Build, browser: Browser, pair: Pair) -> None:
    with Server(built, RunConfig(*pair, 15), extra=("-c", "8192", *FLAGS[2:], "-n", "6000")) as server:
        visit = Visit(browser, server)
        visit.send("def add(a, b):")
        visit.badge(FIGURES[1]).wait_for()
        visit.page.get_by_role("button", name="Stop", exact=True).click()
        visit.page.get_by_role("button", name="Send").wait_for()
        figures = visit.figures()
        assert figures[0] == "chain"
        assert figures[1] > 1
        visit.page.reload()
        assert visit.figures() == figures
        assert visit.complaints() == []


def test_without_a_draft_the_row_ends_with_the_speed(built: Build, browser: Browser, pair: Pair) -> None:
    with Server(built, RunConfig(pair[0]), extra=FLAGS) as server:
        visit = Visit(browser, server)
        _, t = visit.ask("def add(a, b):")
        assert "draft_n" not in t
        assert visit.page.get_by_role("button", name=re.compile("|".join(FIGURES))).count() == 0
        assert visit.complaints() == []


def test_the_row_fits_a_narrow_screen(built: Build, browser: Browser, pair: Pair, tmp_path: Path) -> None:
    with Server(built, RunConfig(*pair, 15, budget=15), extra=FLAGS) as server:
        visit = Visit(browser, server, width=360)
        visit.ask("def add(a, b):")
        visit.page.screenshot(path=tmp_path / "page-narrow.png")
        box = visit.badge("accepted").bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 360


def test_without_the_page_the_address_says_what_it_is(exact: Build, pair: Pair) -> None:
    assert exact.info["page"] == "none"
    with Server(exact, RunConfig(pair[0]), extra=("-c", "256", "--api-key", "secret")) as server:
        url = server.client.url
        with urllib.request.urlopen(f"{url}/", timeout=60) as reply:  # no key: it is as open as the page is
            text = reply.read().decode()
            assert reply.headers["Content-Type"].startswith("text/plain")
        assert text.count("\n") == 1
        assert text.startswith("llama-server, built without its web page; the API is at /v1. ")
        assert "npm" in text
        request = urllib.request.Request(f"{url}/sw.js", headers={"X-Api-Key": "secret"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert b"unregister" in reply.read(), "the worker of an earlier page would go on showing it"
