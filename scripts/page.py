#!/usr/bin/env python3
"""Build llama-server's web page from the vendored tools/ui with npm, or find it in the cache.

Standard library only: CMake runs this inside `pip install`, before anything of ours is installed.

    page.py tools                       say whether npm and Node.js can build the page
    page.py build SOURCE DEST           put the page of SOURCE (a tools/ui) in DEST

The last line on stdout says what was done, or why there is no page; then the exit status is 3.
Packages come from the lock file, which has a hash for each, and none of their scripts is run. A
page is keyed by the files of SOURCE, Node.js and npm, and kept outside the build folder: npm takes
minutes, and native builds are made anew often.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import vendor

NODE_WANTED = "Node.js 20.19, 22.13 or 24 and newer"
GENERATED = ("node_modules", "dist", ".svelte-kit")
KEEP_PAGES = 8
TIMEOUT_S = 1800
NO_PAGE = 3


class NoPageError(Exception):
    """Why there is no page, in one line."""


def log(message: str) -> None:
    """Progress goes to stderr; stdout carries the result only."""
    print(f"llama-dflash: page: {message}", file=sys.stderr, flush=True)


def node_fits(version: str) -> bool:
    """Whether the packages of the lock file run on this Node.js (`v20.19.0`)."""
    match = re.match(r"v(\d+)\.(\d+)\.", version)
    if not match:
        return False
    major, minor = int(match[1]), int(match[2])
    return (major == 20 and minor >= 19) or (major == 22 and minor >= 13) or major >= 24


def find_tools(env: Mapping[str, str] = os.environ) -> tuple[str, str, str]:
    """Path of npm, and the versions of npm and Node.js.

    Raises:
        NoPageError: one of them is missing or too old.
    """
    npm = shutil.which("npm", path=env.get("PATH"))
    if npm is None:
        raise NoPageError(f"no npm found; expected npm and {NODE_WANTED}")
    versions = [vendor.output_of(env, tool, "--version").partition(" ") for tool in ("node", npm)]
    (node_rc, _, node), (npm_rc, _, npm_version) = [(rc, sep, text.strip()) for rc, sep, text in versions]
    if node_rc != "0" or not node_fits(node):
        raise NoPageError(f"Node.js is {node if node_rc == '0' else 'missing'}; expected {NODE_WANTED}")
    if npm_rc != "0":
        raise NoPageError(f"npm does not run; expected npm and {NODE_WANTED}")
    return npm, npm_version, node.removeprefix("v")


def page_key(source: Path, *facts: str) -> str:
    """16 hex digits over the files of `source` and the tools' versions."""
    h = hashlib.sha256("\0".join(facts).encode())
    for folder, names, files in os.walk(source):
        names[:] = sorted(name for name in names if name not in GENERATED)
        for path in sorted(Path(folder) / name for name in files):
            h.update(path.relative_to(source).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return h.hexdigest()[:16]


def npm_failure(step: str, text: str, log_file: Path) -> NoPageError:
    """The line of npm's output that tells most."""
    lines = [re.sub(r"^npm (error|ERR!) *", "", line).strip() for line in text.splitlines() if re.match(r"npm (error|ERR!)", line)]
    lines = [line for line in lines if line and not line.startswith(("A complete log", "code ", "syscall ", "errno "))]
    return NoPageError(f"{step} failed: {lines[0][:200] if lines else 'no reason told'}; the full log is {log_file}")


def run_npm(step: str, cmd: Sequence[str], work: Path, log_file: Path, env: Mapping[str, str]) -> None:
    """One step of npm with its output in the log; raises NoPageError with the reason."""
    try:
        done = subprocess.run(
            cmd, cwd=work, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NoPageError(f"{step} failed: {e}") from e
    with log_file.open("a") as f:
        f.write(f"$ {shlex.join(cmd)}\n{done.stdout}")
    if done.returncode:
        raise npm_failure(step, done.stdout, log_file)


def build_with_npm(npm: str, source: Path, dest: Path, version: str, env: Mapping[str, str] = os.environ) -> None:
    """Install the locked packages beside a copy of `source`, build, and move the page to `dest` in one rename."""
    work = vendor.cache_dir(env) / "work" / f"page-{dest.name}"
    log_file = vendor.cache_dir(env) / "logs" / f"page-{dest.name}.log"
    shutil.rmtree(work, ignore_errors=True)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_file.write_text("")
    shutil.copytree(source, work / "ui", ignore=shutil.ignore_patterns(*GENERATED))
    out = work / "dist"
    env = {
        **env,
        "LLAMA_UI_OUT_DIR": str(out), "LLAMA_UI_VERSION": version, "LLAMA_BUILD_NUMBER": version,
        "npm_config_audit": "false", "npm_config_fund": "false", "npm_config_update_notifier": "false",
        # without a network npm would wait for minutes
        "npm_config_fetch_retry_mintimeout": "2000", "npm_config_fetch_retry_maxtimeout": "8000",
    }  # fmt: skip
    try:
        started_s = time.monotonic()
        log("npm ci, packages of the lock file")
        run_npm("npm ci", [npm, "ci", "--ignore-scripts", "--prefer-offline"], work / "ui", log_file, env)
        installed_s = time.monotonic()
        log(f"npm run build, minutes (npm ci took {installed_s - started_s:.0f} s)")
        run_npm("npm run build", [npm, "run", "build"], work / "ui", log_file, env)
        # npm exits with 0 when the last plugin fails: build.json is what it writes at the end
        missing = [name for name in ("index.html", "build.json", "sw.js") if not (out / name).is_file()]
        if missing:
            raise NoPageError(f"npm run build made no {', '.join(missing)}; the full log is {log_file}")
        dest.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(dest, ignore_errors=True)
        os.replace(out, dest)
        log(f"built in {time.monotonic() - started_s:.0f} s -> {dest}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def drop_old_pages(folder: Path, keep: int = KEEP_PAGES) -> None:
    """Keep the most recently used pages."""
    pages = sorted((p for p in folder.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in pages[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def build(source: Path, dest: Path, env: Mapping[str, str] = os.environ) -> str:
    """Put the page of `source` in `dest`; returns what it was built with.

    Raises:
        NoPageError: the tools are missing, or npm failed.
    """
    # What lies in `dest` from an earlier run would be embedded whatever happens here.
    shutil.rmtree(dest, ignore_errors=True)
    npm, npm_version, node = find_tools(env)
    if not (source / "package-lock.json").is_file():
        raise NoPageError(f"{source} has no package-lock.json; expected llama.cpp's tools/ui")
    version = vendor.read_pin().commit
    kept = vendor.cache_dir(env) / "page" / page_key(source, npm_version, node, version)
    with vendor.locked(vendor.cache_dir(env) / "locks" / f"page-{kept.name}"):
        if (kept / "index.html").is_file():
            log(f"found in the cache, {kept}")
        else:
            build_with_npm(npm, source, kept, version, env)
        os.utime(kept)
        shutil.copytree(kept, dest, copy_function=shutil.copy)
    drop_old_pages(kept.parent)
    return f"npm {npm_version}, Node.js {node}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; one line on stdout, exit status 3 when there is no page and 1 on another failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tools")
    make = commands.add_parser("build")
    make.add_argument("source", type=Path)
    make.add_argument("dest", type=Path)
    args = parser.parse_args(argv)
    try:
        if args.command == "tools":
            _, npm_version, node = find_tools()
            print(f"npm {npm_version}, Node.js {node}")
        else:
            print(build(args.source.resolve(), args.dest.resolve()))
    except NoPageError as e:
        print(re.sub(r"[\"\\;]+", "'", " ".join(str(e).replace("; ", ", ").split())))  # CMake and JSON take it as it is
        return NO_PAGE
    except (vendor.VendorError, OSError) as e:
        print(f"page: error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
