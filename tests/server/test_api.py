"""The HTTP interfaces that users' clients speak, with drafting on."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_dflash.builds import Build
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

BODY = {"model": "any", "max_tokens": 32, "temperature": 0, "prompt": "def add(a, b):\n",
        "messages": [{"role": "user", "content": "def add(a, b):\n"}]}  # fmt: skip
COUNTERS = ("rounds", "draft_n", "draft_n_accepted", "draft_n_rounds")
PATHS = ("chat/completions", "completions", "messages")


@pytest.fixture(scope="module")
def server(exact: Build, pair: tuple[Path, Path]) -> Iterator[Server]:
    with Server(exact, RunConfig(*pair, 15)) as s:
        yield s


def ask(server: Server, path: str, stream: bool) -> list[dict[str, Any]]:
    """One answer, or the events of a streamed one."""
    body = json.dumps({**BODY, "stream": stream}).encode()
    request = urllib.request.Request(f"{server.client.url}/v1/{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        text = reply.read().decode()
    if not stream:
        return [json.loads(text)]
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(event) for event in events if event != "[DONE]"]


def content(path: str, stream: bool, events: list[dict[str, Any]]) -> str:
    """The generated text, whichever way it came."""
    parts = []
    for e in events:
        if path == "messages":
            blocks = e.get("content", []) if not stream else [e.get("delta", {})]
            parts += [b["text"] for b in blocks if "text" in b]
        elif path == "completions":
            parts += [c["text"] for c in e["choices"]]
        else:
            parts += [(c["delta"] if stream else c["message"]).get("content") or "" for c in e["choices"]]
    return "".join(parts)


@pytest.mark.parametrize("path", PATHS)
def test_stream_and_answer_agree_and_count_drafts(server: Server, path: str) -> None:
    whole, events = ask(server, path, False), ask(server, path, True)
    assert content(path, False, whole) == content(path, True, events) != ""
    for timings in (whole[0]["timings"], [e for e in events if "timings" in e][-1]["timings"]):
        assert timings["predicted_n"] == 32
        assert all(timings[name] > 0 for name in COUNTERS)
        assert timings["rounds"] + timings["draft_n_accepted"] == 31


def test_chat_and_messages_give_the_same_text(server: Server) -> None:
    assert content("messages", False, ask(server, "messages", False)) == content("chat/completions", False, ask(server, "chat/completions", False))


def test_several_plain_slots_at_once_give_each_its_own_text(exact: Build, pair: tuple[Path, Path]) -> None:
    """Plain only: the pin's chains on a hybrid do not hold this, unpatched neither (README, Limits)."""
    prompts = ["def add(a, b):\n", "class Stack:\n", "import os\n\ndef walk(path):\n", "for i in range(10):\n"]

    def texts(server: Server, together: bool) -> dict[str, str]:
        out: dict[str, str] = {}

        def one(prompt: str) -> None:
            body = {"prompt": prompt, "n_predict": 48, "temperature": 0, "cache_prompt": False}
            out[prompt] = server.client.post("/completion", body)["content"]

        threads = [threading.Thread(target=one, args=(p,)) for p in prompts]
        for t in threads:
            t.start()
            if not together:
                t.join()
        for t in threads:
            t.join()
        return out

    with Server(exact, RunConfig(pair[0]), extra=["-np", "4", "-c", "4096"]) as server:
        assert texts(server, together=True) == texts(server, together=False)
