"""`pull` against a server on loopback that speaks as much of the hub's API as huggingface_hub asks for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import checkpoints
import pytest

from llama_dflash import files, pull
from llama_dflash.cli import main
from llama_dflash.errors import DFlashError, PairingError
from llama_dflash.presets import PRESETS

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PREFIX = "llama-dflash: error: "
TARGET = PRESETS["qwen3.8-27b"].target
DRAFT = PRESETS["qwen3.8-27b"].draft


@dataclass
class Hub:
    """What the server has and does, and what it was asked for.

    Attributes:
        repos: repository to file name to content.
        gated: repositories whose files need the token "secret".
        cuts: how many bytes of a file's next answers are sent before the connection breaks; None sends all.
        short: files of which the server has less than it lists.
        status: answers everything with this, if it is set.
        asked: method, path and `Range` of every request.
    """

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cuts: list[int | None] = field(default_factory=list)
    short: set[str] = field(default_factory=set)
    status: int = 0
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    def ranges(self, name: str) -> list[str | None]:
        """`Range` of the requests for a file's content."""
        return [r for method, path, r in self.asked if method == "GET" and path.endswith("/" + name)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)", path)
        content = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repo = (listing or content)[1] if listing or content else ""
        if self.hub.status:
            self.reply(self.hub.status)
        elif repo not in self.hub.repos:
            # The hub does not tell a missing repository from a private one.
            self.reply(401, X_Error_Code="RepoNotFound", X_Error_Message="Invalid username or password.")
        elif listing:
            self.reply(200, json.dumps(self.listed(repo)).encode(), Content_Type="application/json")
        elif repo in self.hub.gated and self.headers.get("Authorization") != "Bearer secret":
            self.reply(403, X_Error_Code="GatedRepo", X_Error_Message="Access to this model is restricted.")
        elif content:
            self.file(repo, content[3])

    def listed(self, repo: str) -> dict[str, object]:
        siblings = [{"rfilename": name, "size": len(data), "blobId": "x"} for name, data in self.hub.repos[repo].items()]
        return {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "siblings": siblings}

    def file(self, repo: str, name: str) -> None:
        data = self.hub.repos[repo].get(name)
        if data is None:
            return self.reply(404, X_Error_Code="EntryNotFound")
        data = data[: len(data) // 2] if name in self.hub.short else data
        headers = {"X_Repo_Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept_Ranges": "bytes"}
        if self.command == "HEAD":
            return self.reply(200, data, **headers)
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        first = int(start[1]) if start else 0
        if start:
            headers["Content_Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        cut = self.hub.cuts.pop(0) if self.hub.cuts else None
        if cut is None:
            return self.reply(206 if start else 200, data[first:], **headers)
        self.send_response(206 if start else 200)
        for key, value in {"Content-Length": str(len(data) - first), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data[first : first + cut])
        self.wfile.flush()
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        return None


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub on loopback."""
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": state}))
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Run:
    """Run `pull` in a process of its own, since huggingface_hub reads its environment once; exit code, stdout, stderr."""

    def pull_(*args: str, **env: str) -> tuple[int, str, str]:
        own = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        own |= {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DOWNLOAD_TIMEOUT": "5",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        command = [sys.executable, "-W", "error", "-c", "from llama_dflash.cli import main; main()", "pull", *args]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=own | env, timeout=120)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return pull_


def failed(result: tuple[int, str, str], exit_code: int) -> str:
    """The one line of a run that must fail, without the prefix."""
    code, out, err = result
    assert (code, out) == (exit_code, ""), err
    last = err.splitlines()[-1]
    assert last.startswith(PREFIX)
    assert err.count(PREFIX) == 1
    return last.removeprefix(PREFIX)


@pytest.fixture
def models(tmp_path: Path) -> dict[str, bytes]:
    """Small files by kind."""
    draft = checkpoints.write_draft(tmp_path / "draft.gguf", checkpoints.FACTS2)
    written = {
        "target": checkpoints.write_target(tmp_path / "target.gguf"),
        "wide": checkpoints.write_target(tmp_path / "wide.gguf", n_embd=64),
        "draft": draft,
        "old": checkpoints.write_old(draft, tmp_path / "old.gguf", "dflash-draft"),
    }
    out = {name: path.read_bytes() for name, path in written.items()}
    for path in written.values():
        path.unlink()
    return out


def test_a_preset(hub: Hub, run: Run, models: dict[str, bytes], tmp_path: Path) -> None:
    hub.repos = {TARGET.repo: {TARGET.file: models["target"], "other.gguf": b"x"}, DRAFT.repo: {DRAFT.file: models["draft"]}}
    code, out, err = run("qwen3.8-27b")
    assert code == 0
    target, draft = f"models/{TARGET.repo}/{TARGET.file}", f"models/{DRAFT.repo}/{DRAFT.file}"
    assert out.splitlines() == [target, draft, f"llama-dflash serve -m {target} -md {draft}"]
    assert [(tmp_path / path).read_bytes() for path in (target, draft)] == [models["target"], models["draft"]]
    assert err.splitlines() == [
        f"{TARGET.repo}/{TARGET.file}: 0.00 GB, to fetch",
        f"{DRAFT.repo}/{DRAFT.file}: 0.00 GB, to fetch",
    ]
    # Fetched at the commit that was listed, nothing else, and not again.
    assert hub.ranges(TARGET.file) == hub.ranges(DRAFT.file) == [None]
    assert all(f"/resolve/{COMMIT}/" in path for _, path, _ in hub.asked if "/resolve/" in path)
    again = run("Qwen3.8-27B")
    assert (again[0], again[1]) == (0, out)
    assert again[2].splitlines()[0].endswith(", there")
    assert hub.ranges(TARGET.file) == hub.ranges(DRAFT.file) == [None]


def test_json(hub: Hub, run: Run, models: dict[str, bytes], tmp_path: Path) -> None:
    hub.repos = {"me/draft": {"d.gguf": models["draft"], "README.md": b"hello"}}
    code, out, _ = run("me/draft", "--dir", str(tmp_path / "my models"), "--json")
    path = str(tmp_path / "my models" / "me" / "draft" / "d.gguf")
    assert (code, json.loads(out)) == (
        0,
        {
            "schema": 1,
            "command": "pull",
            "name": "me/draft",
            "files": [
                {"repo": "me/draft", "file": "d.gguf", "revision": COMMIT, "size_bytes": len(models["draft"]), "path": path}
            ],
            "next": ["llama-dflash", "serve", "-m", "TARGET.gguf", "-md", path],
        },
    )


def test_a_preset_whose_pair_does_not_fit(hub: Hub, run: Run, models: dict[str, bytes]) -> None:
    hub.repos = {TARGET.repo: {TARGET.file: models["wide"]}, DRAFT.repo: {DRAFT.file: models["draft"]}}
    assert "the draft reads 2 layers of width 32, the target's hidden size is 64" in failed(run("qwen3.8-27b"), 1)


def test_a_preset_whose_file_is_gone(hub: Hub, run: Run) -> None:
    hub.repos = {TARGET.repo: {"Qwen3.8-27B-Q8_0.gguf": b"x"}, DRAFT.repo: {DRAFT.file: b"x"}}
    line = failed(run("qwen3.8-27b"), 1)
    assert line.startswith(f"{TARGET.repo} has no {TARGET.file} any more, expected one of: Qwen3.8-27B-Q8_0.gguf; choose one")


def test_a_pattern(hub: Hub, run: Run, models: dict[str, bytes]) -> None:
    split = {f"BF16/m-BF16-{i:05}-of-00003.gguf": models["target"] for i in (1, 2, 3)}
    hub.repos = {"me/m": {"m-Q4_K_M.gguf": models["target"], "m-Q8_0.gguf": models["wide"], "mmproj.gguf": b"x", **split}}
    line = failed(run("me/m"), 2)
    assert line.startswith("me/m has 4 GGUF models, expected --file to choose: BF16/m-BF16-00001-of-00003.gguf, ")
    assert line.endswith("m-Q4_K_M.gguf, m-Q8_0.gguf, mmproj.gguf; such as --file '*Q4_K_M*'")
    line = failed(run("me/m", "--file", "*Q5*"), 1)
    assert line.startswith("me/m has no file '*Q5*', expected one of: BF16/m-BF16-00001-of-00003.gguf, ")
    code, out, _ = run("me/m", "--file", "*Q4_K_M*")
    assert (code, out.splitlines()) == (0, ["models/me/m/m-Q4_K_M.gguf", "llama-dflash serve -m models/me/m/m-Q4_K_M.gguf"])
    # A split file comes with all its parts.
    code, out, _ = run("me/m", "--file", "m-BF16-00001*")
    paths = [f"models/me/m/{name}" for name in split]
    assert (code, out.splitlines()) == (0, [*paths, f"llama-dflash serve -m {paths[0]}"])


def test_a_checkpoint_is_fetched_for_convert(hub: Hub, run: Run) -> None:
    kept = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}
    hub.repos = {"z-lab/Some-DFlash": kept | {"assets/picture.png": b"png", "README.md": b"hello"}}
    code, out, _ = run("z-lab/Some-DFlash")
    folder = "models/z-lab/Some-DFlash"
    command = f"llama-dflash convert {folder} draft.gguf --target TARGET.gguf"
    assert (code, out.splitlines()) == (0, [*(f"{folder}/{name}" for name in kept), command])


def test_an_older_draft_is_to_be_converted(hub: Hub, run: Run, models: dict[str, bytes]) -> None:
    hub.repos = {"me/old": {"dflash-draft-3.6-q8_0.gguf": models["old"]}}
    code, out, _ = run("me/old")
    path = "models/me/old/dflash-draft-3.6-q8_0.gguf"
    assert (code, out.splitlines()) == (0, [path, f"llama-dflash convert {path} draft.gguf --target TARGET.gguf"])


# What goes wrong, each in one line.


def test_repositories_that_are_not_there(hub: Hub, run: Run) -> None:
    assert failed(run("me/nothing"), 1) == (
        f"me/nothing is not on {hub.url}, or it is private, expected a repository OWNER/NAME; "
        f"check the name; for a private one 'hf auth login' or set HF_TOKEN"
    )
    hub.repos = {"me/text": {"README.md": b"hello"}}
    assert "has neither GGUF files nor safetensors, expected a model; it has: README.md" in failed(run("me/text"), 1)
    hub.status = 404
    assert f"{hub.url} answered 404 for me/nothing" in failed(run("me/nothing"), 1)
    hub.status = 500
    assert f"{hub.url} answered 500 for me/nothing, expected the file; try again later" in failed(run("me/nothing"), 1)


def test_a_gated_repository_needs_a_token(hub: Hub, run: Run, models: dict[str, bytes]) -> None:
    hub.repos, hub.gated = {"me/gated": {"d.gguf": models["draft"]}}, {"me/gated"}
    line = failed(run("me/gated"), 1)
    assert line.startswith("me/gated/d.gguf is gated, expected a token of an account that has access; accept its terms at ")
    assert line.endswith(f"{hub.url}/me/gated, then 'hf auth login' or set HF_TOKEN")
    assert run("me/gated", HF_TOKEN="secret")[0] == 0


def test_without_a_network(hub: Hub, run: Run) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: refuses connections
        closed = f"http://127.0.0.1:{held.getsockname()[1]}"
        line = failed(run("me/m", HF_ENDPOINT=closed), 1)
    assert line.startswith(f"me/m cannot be fetched from {closed} (")
    assert line.endswith("expected the hub to answer; check the network and HF_ENDPOINT, then run the command again")
    line = failed(run("me/m", HF_HUB_OFFLINE="1"), 1)
    assert line == "me/m cannot be fetched: huggingface_hub is offline, expected the network; unset HF_HUB_OFFLINE"
    assert hub.asked == []


def test_names_that_cannot_be_meant(hub: Hub, run: Run) -> None:
    expected = "is neither a preset nor a repository, expected qwen3.5-27b, qwen3.6-27b, qwen3.8-27b or OWNER/NAME"
    for name in ("qwen", "a/b/c", "", "https://huggingface.co/me/m"):
        assert f"{name!r} {expected}" in failed(run(name), 2)
    assert "'-x/--y' is no repository id" in failed(run("--", "-x/--y"), 2)
    assert "--file is '*Q4*' with the preset qwen3.8-27b, expected a repository" in failed(
        run("qwen3.8-27b", "--file", "*Q4*"), 2
    )
    assert hub.asked == []


def test_a_file_that_is_shorter_than_listed(hub: Hub, run: Run, models: dict[str, bytes]) -> None:
    hub.repos, hub.short = {"me/m": {"d.gguf": models["draft"]}}, {"d.gguf"}
    size = len(models["draft"])
    assert f"d.gguf has {size // 2} bytes, expected {size}; delete it and run" in failed(run("me/m"), 1)


def test_a_broken_connection_is_taken_up_again(hub: Hub, run: Run, tmp_path: Path) -> None:
    # huggingface_hub writes 10 MiB at a time.
    data = checkpoints.write_target(tmp_path / "t.gguf", n_embd=1_600_000).read_bytes()
    hub.repos, hub.cuts = {"me/m": {"big.gguf": data}}, [15 << 20, 4 << 20]
    code, out, err = run("me/m")
    assert code == 0, err
    assert hub.ranges("big.gguf") == [None, f"bytes={10 << 20}-", f"bytes={10 << 20}-"]
    assert (tmp_path / out.splitlines()[0]).read_bytes() == data


def test_a_connection_that_stays_broken_is_one_line_and_the_next_run_goes_on(
    hub: Hub, run: Run, models: dict[str, bytes], tmp_path: Path
) -> None:
    hub.repos = {TARGET.repo: {TARGET.file: models["target"]}, DRAFT.repo: {DRAFT.file: models["draft"]}}
    hub.cuts = [None, *[100] * 6]
    line = failed(run("qwen3.8-27b"), 1)
    assert line.startswith(f"{DRAFT.repo}/{DRAFT.file} cannot be fetched from {hub.url} (")
    assert len(hub.ranges(DRAFT.file)) == 6
    there = [p.name for p in (tmp_path / "models").rglob("*") if p.suffix in (".gguf", ".incomplete")]
    assert there == [TARGET.file]
    assert run("qwen3.8-27b")[0] == 0
    assert (len(hub.ranges(TARGET.file)), len(hub.ranges(DRAFT.file))) == (1, 7)


# Without a server.


def test_room_is_checked_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [pull.RemoteFile("me/m", name, COMMIT, 3_000_000_000) for name in ("a.gguf", "b.gguf")]
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5_000_000_000})())
    folder = tmp_path / "not" / "there"
    with pytest.raises(DFlashError, match=r"there has 5\.0 GB free, expected 6\.0 GB for the files; make room"):
        pull.fetch(wanted, folder)
    assert not folder.exists()


def test_a_vision_projector_is_no_target(tmp_path: Path, make_gguf: Callable[..., Path]) -> None:
    projector, target = make_gguf("a.gguf", "clip", {}, {}), checkpoints.write_target(tmp_path / "t.gguf")
    assert pull.next_command([projector, target]) == ["llama-dflash", "serve", "-m", str(target)]
    assert pull.next_command([projector]) == []


def test_next_command_of_a_pair_that_does_not_fit(tmp_path: Path) -> None:
    paths = [
        checkpoints.write_target(tmp_path / "t.gguf", n_layer=4),
        checkpoints.write_draft(tmp_path / "d.gguf", checkpoints.FACTS),
    ]
    with pytest.raises(PairingError, match=r"d\.gguf does not fit t\.gguf"):
        pull.next_command(paths)
    assert pull.next_command([tmp_path / "README.md"]) == []


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_two_gguf_files_of_one_model(name: str) -> None:
    preset = PRESETS[name]
    for part in (preset.target, preset.draft):
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", part.repo)
        assert part.file.endswith(".gguf")
        assert name in part.file.lower()
    assert "dflash" not in preset.target.file.lower()
    assert "dflash" in preset.draft.file.lower()


def test_the_help_lists_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    main(["pull", "--help"])
    assert f"Presets: {', '.join(PRESETS)}." in capsys.readouterr().out
