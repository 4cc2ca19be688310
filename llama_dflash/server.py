"""Start llama-server, wait until it is ready, stop it, and say why when it dies."""

from __future__ import annotations

import collections
import contextlib
import errno
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import IO, Any

from llama_dflash.argv import server_argv
from llama_dflash.builds import Build
from llama_dflash.client import Client
from llama_dflash.errors import ServerError
from llama_dflash.memory import flag_value
from llama_dflash.spec import RunConfig

LOG_TAIL_LINES = 400
READY_TIMEOUT_S = 600.0
# llama.cpp logs these as errors or failures in every run that drafts.
HARMLESS = ("this warning is normal during memory fitting", "failed to measure the memory of the extra model")


def hold_port() -> socket.socket:
    """A socket that keeps a free TCP port of this machine from other programs; llama-server may still listen there.

    It is bound and never listens: SO_REUSEADDR, which llama-server sets as well, lets the second socket in.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def check_port(host: str, port: int) -> None:
    """Raise ServerError if `port` cannot be bound."""
    if not host:
        raise ServerError("the host is empty, expected an address", "leave --host out for 127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except socket.gaierror as e:
            raise ServerError(
                f"the host {host!r} does not resolve ({e.strerror}), expected an address", "choose another --host"
            ) from e
        except OSError as e:
            if e.errno == errno.EADDRNOTAVAIL:
                raise ServerError(f"{host} is not an address of this machine, expected one", "choose another --host") from e
            raise ServerError(
                f"port {port} on {host} cannot be used ({e.strerror}), expected a free port",
                "stop the program that holds it, or choose another with --port",
            ) from e


def _url_host(host: str) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reachable}]" if ":" in reachable else reachable


def first_error(lines: Sequence[str]) -> str:
    """The first line of a llama.cpp log that tells of an error, else its first line."""
    telling = [line for line in lines if not any(words in line for words in HARMLESS)]
    errors = [line for line in telling if " E " in line or "error" in line.lower() or "failed" in line.lower()]
    return (errors or telling or ["nothing was logged"])[0].strip()


def stop_process(process: subprocess.Popen[Any], timeout_s: float = 10.0) -> None:
    """Ask a process to end, then insist: a signal that comes while a model loads may be lost."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold back signals that have a handler: one that comes inside Popen would leave a process that nobody knows."""
    came: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and callable(signal.getsignal(number)):
                handlers[number] = signal.signal(number, lambda n, _frame: came.append(n))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class Server:
    """A llama-server process as a context manager.

    Args:
        build: the native build to run.
        config: checked configuration (RunConfig.checked).
        host: address to listen on.
        port: TCP port; None takes a free one.
        extra: further llama-server flags.
        on_line: called with each log line, in a thread of its own.

    Raises:
        ServerError: on entry, when it dies or is not ready in time; the last log lines are in the message.
    """

    def __init__(
        self,
        build: Build,
        config: RunConfig,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        extra: Sequence[str] = (),
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.host = host
        self._held = None
        if port is None:
            self._held = hold_port()
            port = int(self._held.getsockname()[1])
        self.port = port
        self.argv = [str(build.program("llama-server"))]
        self.argv += server_argv(config, host, self.port, exact=build.is_exact, extra=extra)
        keys = (flag_value(extra, "--api-key") or "").split(",")
        self.client = Client(f"http://{_url_host(host)}:{self.port}", api_key=keys[0] or None)
        self._on_line = on_line
        self._lines: collections.deque[str] = collections.deque(maxlen=LOG_TAIL_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def returncode(self) -> int | None:
        """Exit code of the process, None while it runs."""
        return self._process.poll() if self._process else None

    def __enter__(self) -> Server:
        if self._held is None:
            check_port(self.host, self.port)
        try:
            with signals_held():
                # A group of its own: Ctrl-C reaches us alone, and we stop the server in order.
                self._process = subprocess.Popen(
                    self.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
                assert self._process.stdout is not None
                self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
                self._reader.start()
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.append(line.rstrip("\n"))
            if self._on_line:
                self._on_line(line.rstrip("\n"))
        stream.close()

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.returncode is not None:
                raise ServerError(self.death_message(), "see the lines above")
            if self.client.is_healthy():
                return
            time.sleep(0.05)
        raise ServerError(f"llama-server was not ready after {READY_TIMEOUT_S:g} s", "see its log with -v")

    def log_tail(self, n_lines: int = 12) -> list[str]:
        """The last log lines."""
        if self._reader and self.returncode is not None:
            self._reader.join(timeout=2)
        return list(self._lines)[-n_lines:]

    def log_lines(self, needle: str) -> list[str]:
        """Log lines (of the last LOG_TAIL_LINES) that contain `needle`."""
        return [line for line in self._lines if needle in line]

    def death_message(self) -> str:
        """One line with the exit code and the first error in the log; the tail is for log_tail."""
        if self._reader:
            self._reader.join(timeout=2)
        code = self.returncode
        if code is not None and code < 0:
            return f"llama-server was killed by signal {-code}, expected it to go on"
        return f"llama-server exited with code {code}: {first_error(list(self._lines))}"

    def wait(self) -> int:
        """Block until the process ends; returns its exit code."""
        assert self._process is not None
        return self._process.wait()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ask the process to end, then insist."""
        if self._held is not None:
            self._held.close()
        if self._process is None:
            return
        stop_process(self._process, timeout_s)
        if self._reader:
            self._reader.join(timeout=2)
