"""The HTTP client against small servers, and Server against programs that only look like llama-server."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_dflash import server
from llama_dflash.builds import Build
from llama_dflash.client import Client, Completion, Sampling
from llama_dflash.errors import ServerError
from llama_dflash.server import Server, check_port
from llama_dflash.spec import RunConfig

CONFIG = RunConfig(Path("target.gguf"))


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by path; POST /completion keeps the request."""

    requests: list[dict[str, Any]] = []
    replies: dict[str, tuple[int, bytes]] = {
        "/health": (200, b'{"status": "ok"}'),
        "/loading/health": (503, b'{"error": {"message": "Loading model"}}'),
        "/json-error": (404, b'{"error": {"code": 404, "message": "File Not Found"}}'),
        "/text-error": (500, b"  went\nwrong "),
        "/list-error": (500, b"[1]"),
        "/empty-error": (500, b""),
        "/invalid": (200, b"{"),
        "/not-utf8": (200, b'{"a": "\xff"}'),
        "/props": (200, b'{"speculative": {"mode": "chain", "n_max": 15}, "default_generation_settings": {"n_ctx": 512}}'),
        "/old/props": (200, b"{}"),
        "/completion": (
            200,
            b'{"tokens": [1, 2], "content": "ab", "timings": {"rounds": 1, "draft_n_accepted_pos_1": 3,'
            b' "draft_n_accepted_pos_0": 4}, "completion_probabilities":'
            b' [{"top_logprobs": [{"id": 4, "logprob": -0.5}, {"id": 9, "logprob": -2}]}]}',
        ),
    }

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/garbage":
            self.wfile.write(b"garbage\r\n\r\n")
            return
        code, body = self.replies[self.path]
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.path == "/cut":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"{")
            return
        self.do_GET()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def test_get(url: str) -> None:
    assert Client(url).get("/health") == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/json-error", "/json-error: HTTP 404: File Not Found"),
        ("/text-error", "/text-error: HTTP 500: went\nwrong"),
        ("/list-error", "/list-error: HTTP 500: [1]"),
        ("/empty-error", "/empty-error: HTTP 500: no message"),
    ],
)
def test_http_errors_carry_the_server_s_message(url: str, path: str, expected: str) -> None:
    with pytest.raises(ServerError) as caught:
        Client(url).get(path)
    assert str(caught.value) == expected


@pytest.mark.parametrize("path", ["/invalid", "/not-utf8", "/garbage"])
def test_an_answer_that_is_not_json(url: str, path: str) -> None:
    with pytest.raises(ServerError, match=f"^{path}: no answer from {url} "):
        Client(url).get(path)


def test_an_answer_that_ends_early(url: str) -> None:
    with pytest.raises(ServerError, match=r"^/cut: no answer"):
        Client(url).post("/cut", {})


def test_connection_refused(port: int) -> None:
    client = Client(f"http://127.0.0.1:{port}")
    with pytest.raises(ServerError, match="Connection refused"):
        client.get("/health")
    assert not client.is_healthy()


def test_a_server_that_does_not_answer_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1)
        with pytest.raises(ServerError, match="timed out"):
            client.get("/health")


def test_health(url: str) -> None:
    assert Client(url).is_healthy()
    assert not Client(f"{url}/loading").is_healthy()


def test_effective_mode(url: str) -> None:
    assert Client(url).effective_mode() == {"mode": "chain", "n_max": 15}
    old = Client(f"{url}/old").effective_mode()
    assert (old["mode"], old["str"]) == ("unknown", "mode = unknown")
    assert old["reason"]


def test_n_ctx(url: str) -> None:
    assert Client(url).n_ctx() == 512


def test_complete(url: str) -> None:
    done = Client(url).complete("def", 7, Sampling(0.5, 10), 3, ignore_eos=True)
    assert done == Completion([1, 2], "ab", {"rounds": 1, "draft_n_accepted_per_pos": [4, 3]})
    assert Handler.requests[-1] == {
        "prompt": "def",
        "n_predict": 7,
        "cache_prompt": False,
        "return_tokens": True,
        "temperature": 0.5,
        "seed": 13,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "ignore_eos": True,
    }


def test_top_logprobs(url: str) -> None:
    assert Client(url).top_logprobs([1, 2, 3], 2) == {4: -0.5, 9: -2.0}
    assert Handler.requests[-1]["prompt"] == [1, 2, 3]
    assert Handler.requests[-1]["n_probs"] == 2


def test_sampling_summary() -> None:
    assert Sampling().summary == {"temperature": 0}
    assert Sampling(0.8, 4).summary == {"temperature": 0.8, "seed": 4, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"status": "ok"}')
port = int(sys.argv[sys.argv.index("--port") + 1])
print("listening on", port, flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HEALTHY


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def entering_fails(build: Build, **kwargs: Any) -> tuple[Server, str]:
    made = Server(build, CONFIG, **kwargs)
    with pytest.raises(ServerError) as caught, made:
        pytest.fail("the server was taken for ready")
    return made, str(caught.value)


def test_a_healthy_server(make_build: Callable[..., Build]) -> None:
    lines: list[str] = []
    with Server(make_build(HEALTHY), CONFIG, on_line=lines.append) as made:
        assert made.returncode is None
        assert made.client.is_healthy()
        assert made.log_lines("listening") == lines == [f"listening on {made.port}"]
        assert made._process is not None
        pid = made._process.pid
    assert made.returncode == -15
    assert not is_running(pid)
    made.stop()


def test_a_server_is_stopped_when_the_body_raises(make_build: Callable[..., Build]) -> None:
    made = Server(make_build(HEALTHY), CONFIG)
    with pytest.raises(KeyboardInterrupt), made:
        raise KeyboardInterrupt
    assert made.returncode == -15


def test_stop_kills_a_server_that_ignores_sigterm(make_build: Callable[..., Build]) -> None:
    with Server(make_build(STUBBORN), CONFIG) as made:
        started_s = time.monotonic()
        made.stop(timeout_s=0.2)
        assert 0.2 <= time.monotonic() - started_s < 5
        assert made.returncode == -9


def test_death_message_has_exit_code_and_first_error(make_build: Callable[..., Build]) -> None:
    text = (
        "print('loading')\n"
        "print('0.00 E init: this warning is normal during memory fitting')\n"
        "print('  load: error: no such tensor')\n"
        "print('failed to load')\n"
        "raise SystemExit(3)"
    )
    made, message = entering_fails(make_build(text))
    assert message.startswith("llama-server exited with code 3: load: error: no such tensor;")
    assert made.log_tail(2) == ["  load: error: no such tensor", "failed to load"]
    assert len(made.log_tail()) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise SystemExit(4)", "llama-server exited with code 4: nothing was logged;"),
        ("print('only this')", "llama-server exited with code 0: only this;"),
        ("import os\nos.kill(os.getpid(), 6)", "llama-server was killed by signal 6, expected it to go on"),
        ("import os\nos.write(1, b'\\xff failed\\n')\nraise SystemExit(1)", "llama-server exited with code 1: \ufffd failed;"),
    ],
)
def test_death_message_forms(make_build: Callable[..., Build], text: str, expected: str) -> None:
    assert entering_fails(make_build(text))[1].startswith(expected)


def test_only_the_last_lines_are_kept(make_build: Callable[..., Build]) -> None:
    made, _ = entering_fails(make_build("for i in range(1000): print(i)"))
    assert made.log_tail(10_000) == [str(i) for i in range(1000 - server.LOG_TAIL_LINES, 1000)]


def test_a_server_that_is_never_ready_is_stopped(make_build: Callable[..., Build], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READY_TIMEOUT_S", 0.3)
    made, message = entering_fails(make_build("import time\ntime.sleep(60)"))
    assert message.startswith("llama-server was not ready after 0.3 s")
    assert made.returncode == -15


def test_a_port_in_use_is_refused_before_starting(make_build: Callable[..., Build], tmp_path: Path) -> None:
    build = make_build(f"open({str(tmp_path / 'started')!r}, 'w').close()")
    # Bound but silent: without the check a request for health is refused at once, and the test fails instead of waiting.
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        made, message = entering_fails(build, port=port)
    assert message.startswith(f"port {port} on 127.0.0.1 cannot be used (Address already in use), expected a free port")
    assert made.returncode is None
    assert not (tmp_path / "started").exists()


def test_a_port_of_its_own_is_held_until_the_server_has_stopped(make_build: Callable[..., Build]) -> None:
    made = Server(make_build(HEALTHY), CONFIG)
    with socket.socket() as other, pytest.raises(OSError, match="already in use"):
        other.bind(("127.0.0.1", made.port))
    with made:
        assert made.client.is_healthy()
    check_port("127.0.0.1", made.port)


def test_check_port_of_an_address_that_is_not_ours(port: int) -> None:
    with pytest.raises(ServerError, match=r"192\.0\.2\.1 is not an address of this machine"):
        check_port("192.0.2.1", 1024)
    check_port("127.0.0.1", port)


@pytest.mark.parametrize(("exact", "expected"), [("ON", ["-fa", "on"]), ("OFF", [])])
def test_only_exact_builds_get_the_exact_flags(make_build: Callable[..., Build], exact: str, expected: list[str]) -> None:
    build = make_build("", exact=exact)
    made = Server(build, CONFIG, port=9, extra=("-np", "1"))
    program = str(build.package / "bin" / "llama-server")
    assert made.argv == [program, "-m", "target.gguf", "--host", "127.0.0.1", "--port", "9", *expected, "-np", "1"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]"), ("example.org", "example.org")],
)
def test_url_of_a_host(make_build: Callable[..., Build], host: str, expected: str) -> None:
    assert Server(make_build(""), CONFIG, host=host, port=9).client.url == f"http://{expected}:9"


def test_a_signal_waits_until_the_process_is_known() -> None:
    class Stopped(BaseException):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stopped

    def start() -> None:
        with server.signals_held():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            reached.append(True)

    before = signal.signal(signal.SIGTERM, stop)
    reached: list[bool] = []
    try:
        with pytest.raises(Stopped):
            start()
        assert reached == [True]
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
