"""Run llama-server of one of the two builds and ask it; the base build knows fewer timings than ours."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_dflash.client import Client
from llama_dflash.errors import ServerError
from llama_dflash.server import hold_port, stop_process

READY_TIMEOUT_S = 300.0
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


def gpu_used_mb() -> float | None:
    """Memory in use on the first GPU, by whomever, in MiB; None without one."""
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=False)
        return float(done.stdout.splitlines()[0]) if done.returncode == 0 and done.stdout.strip() else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


@dataclass
class Run:
    """A server that answers."""

    client: Client
    before_mb: float | None = None
    peak_mb: float | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def note_memory(self) -> float | None:
        """The most GPU memory that was in use since the start, less what was in use before it."""
        used = None if self.before_mb is None else gpu_used_mb()
        if used is not None and self.before_mb is not None:
            self.peak_mb = max(self.peak_mb or 0.0, used - self.before_mb)
        return self.peak_mb

    def watch(self) -> None:
        """Note the memory while the server loads and warms up; what is timed must not share the driver with nvidia-smi."""
        while self.before_mb is not None and not self._stop.wait(0.5):
            self.note_memory()

    def stop_watching(self) -> None:
        """End watch()."""
        self._stop.set()

    def ask(self, prompt: Sequence[int] | str, n_predict: int, **fields: Any) -> dict[str, Any]:
        """Timings and tokens of one greedy completion that runs to its limit."""
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "return_tokens": True, **fields}
        reply = self.client.post("/completion", body)
        return {**reply["timings"], "tokens": reply["tokens"]}


@contextlib.contextmanager
def serve(program: Path, flags: Sequence[str], log: Path) -> Iterator[Run]:
    """Start the program, wait until it answers, stop it in the end."""
    before = gpu_used_mb()
    log.parent.mkdir(parents=True, exist_ok=True)
    with hold_port() as held, log.open("w") as out:
        port = held.getsockname()[1]
        process = subprocess.Popen([str(program), "--port", str(port), *flags], stdout=out, stderr=subprocess.STDOUT)
        run = Run(Client(f"http://127.0.0.1:{port}"), before_mb=before)
        watcher = threading.Thread(target=run.watch, daemon=True)
        watcher.start()
        try:
            deadline_s = time.monotonic() + READY_TIMEOUT_S
            while not run.client.is_healthy():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise ServerError(f"{program.name} did not get ready, expected a server", f"see {log.name} in the logs")
                time.sleep(0.1)
            yield run
        finally:
            run.stop_watching()
            watcher.join()
            stop_process(process)


def rounds(timings: dict[str, Any]) -> int:
    """Target passes after the prompt: every pass emits its accepted drafts and one token more."""
    return int(timings["predicted_n"]) - 1 - int(timings.get("draft_n_accepted", 0))


def round_ms(timings: dict[str, Any]) -> float:
    """Milliseconds a round, drafting and sampling included."""
    return float(timings["predicted_ms"]) / rounds(timings)


def tok_s(timings: dict[str, Any]) -> float:
    """Tokens a second behind the first one, which the prompt gives."""
    return 1e3 * (int(timings["predicted_n"]) - 1) / float(timings["predicted_ms"])
