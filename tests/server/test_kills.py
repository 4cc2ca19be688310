"""Clients that hang up in the middle of a drafted answer leave nothing behind: no slot, no text, no memory."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from matrix_cases import CODE, LONG, SHORT

from llama_dflash.builds import Build
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

N_SLOTS = 4
# More clients than slots, so that waiting requests are killed too.
N_CLIENTS = 6
FLAGS = ("-t", "1", "-tb", "1", "-c", "32768", "--cache-ram", "0", "--ctx-checkpoints", "0")
IDLE_TIMEOUT_S = 60.0


def bodies() -> list[dict[str, Any]]:
    """Requests that differ in length, prompt and sampling; half of them may use the slot's cache."""
    rng = random.Random(3)
    out = []
    for i in range(16):
        sampling = {"temperature": 0} if i % 3 == 0 else {"temperature": 0.8, "seed": i}
        prompt = LONG[i % 8] if i % 5 == 0 else SHORT[i % 8]
        limits = {"n_predict": rng.choice((8, 30, 60, 120)), "ignore_eos": i % 2 == 0, "cache_prompt": i % 4 < 2}
        out.append({"prompt": prompt, "return_tokens": True, **limits, **sampling})
    return out


@dataclass
class Client:
    """Sends one request over a socket of its own; may hang up."""

    server: Server
    texts: dict[int, str] = field(default_factory=dict)
    n_killed: int = 0
    n_killed_after_text: int = 0

    def send(self, body: dict[str, Any]) -> socket.socket:
        data = json.dumps(body).encode()
        lines = ("Host: localhost", "Connection: close", "Content-Type: application/json", f"Content-Length: {len(data)}")
        head = "\r\n".join((f"POST {CODE} HTTP/1.1", *lines, "", ""))
        link = socket.create_connection((self.server.host, self.server.port), timeout=120)
        link.sendall(head.encode() + data)
        return link

    def finish(self, i: int, body: dict[str, Any]) -> None:
        with self.send(body) as link:
            raw = b""
            while chunk := link.recv(65536):
                raw += chunk
        head, _, payload = raw.partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], raw[:500]
        self.texts[i] = json.loads(payload)["content"]

    def kill(self, body: dict[str, Any], rng: random.Random) -> None:
        """Hang up after some events of a stream, or after a while without having read anything."""
        stream = rng.random() < 0.7
        n_events, delay_s = rng.randrange(body["n_predict"]), rng.uniform(0, 0.3)
        with self.send({**body, "stream": stream}) as link:
            if not stream:
                time.sleep(delay_s)
            seen = b""
            while stream and seen.count(b"data: ") <= n_events:
                chunk = link.recv(256)
                if not chunk:
                    break
                seen += chunk
        self.n_killed += 1
        self.n_killed_after_text += seen.count(b"data: ") > 0


def send_all(server: Server, requests: range, wanted: list[dict[str, Any]]) -> Client:
    """Send the numbered requests from several threads; one in three is killed."""
    client = Client(server)
    numbers = iter(requests)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        while True:
            with lock:
                i = next(numbers, None)
            if i is None:
                return
            body = wanted[i % len(wanted)]
            try:
                if i % 3 == 1:
                    client.kill(body, random.Random(i))
                else:
                    client.finish(i, body)
            except Exception as e:
                failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(N_CLIENTS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, f"{failures[:3]}; exit code {server.returncode}; log:\n" + "\n".join(server.log_tail())
    return client


def wait_idle(server: Server) -> None:
    """Fail if a slot is still busy after a while."""
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    while time.monotonic() < deadline_s:
        busy = [slot["id"] for slot in server.client.get("/slots") if slot["is_processing"]]
        if not busy:
            return
        time.sleep(0.05)
    raise AssertionError(f"slots {busy} are stuck; log:\n" + "\n".join(server.log_tail()))


def rss_bytes(server: Server) -> int:
    assert server._process is not None
    for line in Path(f"/proc/{server._process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.fixture(scope="module")
def solo(reference: Build, pair: tuple[Path, Path]) -> list[str]:
    """Each text by the unpatched pin without drafts, alone."""
    with Server(reference, RunConfig(pair[0]), extra=("-np", "1", *FLAGS)) as server:
        return [server.client.post(CODE, {**body, "cache_prompt": False})["content"] for body in bodies()]


@pytest.mark.parametrize("n_requests", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_requests_leave_nothing_behind(exact: Build, pair: tuple[Path, Path], solo: list[str], n_requests: int) -> None:
    wanted = bodies()
    with Server(exact, RunConfig(*pair, 15, budget=15).checked(), extra=("-np", str(N_SLOTS), "-no-kvu", *FLAGS)) as server:
        assert server.client.effective_mode()["mode"] == "tree"
        first = send_all(server, range(n_requests // 4), wanted)
        wait_idle(server)
        early_bytes = rss_bytes(server)
        rest = send_all(server, range(n_requests // 4, n_requests), wanted)
        wait_idle(server)
        late_bytes = rss_bytes(server)
        fresh = [server.client.post(CODE, {**wanted[i], "id_slot": i, "cache_prompt": False}) for i in range(N_SLOTS)]
    texts = {**first.texts, **rest.texts}
    assert len(texts) + first.n_killed + rest.n_killed == n_requests
    assert first.n_killed + rest.n_killed == len(range(1, n_requests, 3))
    assert first.n_killed_after_text + rest.n_killed_after_text > n_requests // 8, "few were killed in the middle of a text"
    wrong = [i for i, text in texts.items() if text != solo[i % len(wanted)]]
    assert not wrong, f"requests {wrong} differ from their solo runs"
    assert [r["content"] for r in fresh] == solo[:N_SLOTS]
    assert all(r["timings"]["draft_n"] > 0 for r in fresh if r["timings"]["predicted_n"] > 16)
    print(f"RSS after a quarter {early_bytes}, at the end {late_bytes}")
    assert late_bytes == pytest.approx(early_bytes, rel=0.02)
