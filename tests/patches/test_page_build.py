"""scripts/page.py: which tools it takes, what it keeps, and what it says when there is no page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import page
import pytest

import vendor

# Writes each call to calls.txt, then does what its step does; /bin/sh's own words only, as PATH has nothing else.
NPM = """#!/bin/sh
case "$1" in
  --version) echo 11.1.0; exit 0 ;;
esac
echo "$@" >>{calls}
{step}
if [ "$1" = run ]; then
  /bin/mkdir -p "$LLAMA_UI_OUT_DIR/_app"
  for name in {made}; do echo "$LLAMA_BUILD_NUMBER" >"$LLAMA_UI_OUT_DIR/$name"; done
fi
"""


class Tools:
    """A made-up npm and Node.js, and a tools/ui."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.source = folder / "ui"
        (self.source / "src").mkdir(parents=True)
        (self.source / "package-lock.json").write_text("{}")
        (self.source / "src" / "app.html").write_text("<p>")
        self.dest = folder / "build" / "dist"
        self.env = {"PATH": str(self.bin), "LLAMA_DFLASH_CACHE": str(folder / "cache")}
        self.node("v20.19.0")
        self.npm()

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def node(self, version: str) -> None:
        self.program("node", f"#!/bin/sh\necho {version}\n")

    def npm(self, step: str = "", made: str = "index.html build.json sw.js _app/version.json") -> None:
        self.program("npm", NPM.format(calls=self.folder / "calls.txt", step=step, made=made))

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls.txt"
        return path.read_text().splitlines() if path.is_file() else []

    def build(self) -> str:
        return page.build(self.source, self.dest, self.env)

    def pages(self) -> list[Path]:
        folder = self.folder / "cache" / "page"
        return sorted(folder.iterdir()) if folder.is_dir() else []


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path)


@pytest.mark.parametrize(
    ("version", "fits"),
    [("v18.20.4", False), ("v20.18.9", False), ("v20.19.0", True), ("v21.7.0", False), ("v22.12.0", False), ("v22.13.0", True),
     ("v23.9.0", False), ("v24.0.0", True), ("v100.0.0", True), ("none", False)],
)  # fmt: skip
def test_versions_of_node(version: str, fits: bool) -> None:
    assert page.node_fits(version) is fits


def test_the_versions_are_those_that_the_lock_file_asks_for(source: Path) -> None:
    lock = source / "tools" / "ui" / "package-lock.json"
    packages = [p for p in json.loads(lock.read_text())["packages"].values() if not p.get("optional")]
    wanted = {p["engines"]["node"] for p in packages if "node" in p.get("engines", {})}
    assert "^20.19.0 || ^22.13.0 || >=24" in wanted
    assert all("integrity" in p for p in packages if "resolved" in p), "every package is checked by its hash"


def test_what_is_missing_is_told(tools: Tools) -> None:
    def reason() -> str:
        with pytest.raises(page.NoPageError) as e:
            tools.build()
        return str(e.value)

    tools.node("v18.20.4")
    assert reason() == "Node.js is v18.20.4; expected Node.js 20.19, 22.13 or 24 and newer"
    (tools.bin / "node").unlink()
    assert reason().startswith("Node.js is missing; expected ")
    tools.node("v24.1.0")
    (tools.source / "package-lock.json").unlink()
    assert "has no package-lock.json; expected llama.cpp's tools/ui" in reason()
    (tools.bin / "npm").unlink()
    assert reason().startswith("no npm found; expected npm and ")
    assert tools.calls == []


def test_the_second_build_comes_from_the_cache(tools: Tools) -> None:
    assert tools.build() == "npm 11.1.0, Node.js 20.19.0"
    assert tools.calls == ["ci --ignore-scripts --prefer-offline", "run build"]
    assert (tools.dest / "build.json").read_text() == vendor.read_pin().commit + "\n"
    (tools.dest / "stale.js").touch()
    (tools.source / "node_modules").mkdir()
    (tools.source / "node_modules" / "x.js").touch()
    assert tools.build() == "npm 11.1.0, Node.js 20.19.0"
    assert len(tools.calls) == 2
    assert not (tools.dest / "stale.js").exists()
    assert (tools.dest / "_app" / "version.json").is_file()
    newest_source = max(p.stat().st_mtime for p in tools.source.rglob("*") if p.is_file() and "node_modules" not in p.parts)
    assert (tools.dest / "index.html").stat().st_mtime >= newest_source, "else tools/ui would run npm by itself"
    assert len(tools.pages()) == 1
    assert not list((tools.folder / "cache" / "work").iterdir())


def test_sources_names_and_node_make_another_page(tools: Tools) -> None:
    tools.build()
    (tools.source / "src" / "app.html").write_text("<b>")
    tools.build()
    (tools.source / "src" / "app.html").rename(tools.source / "src" / "main.html")
    tools.build()
    tools.node("v22.13.0")
    tools.build()
    assert len(tools.pages()) == 4
    assert tools.calls.count("run build") == 4


@pytest.mark.parametrize(
    ("step", "made", "words"),
    [
        ("echo npm error code ENOTFOUND; echo 'npm error network no such host \"x\"'; exit 1", "", "npm ci failed: network no such host"),
        ("[ $1 = ci ] || { echo oh; exit 2; }", "", "npm run build failed: no reason told"),
        ("", "index.html", "npm run build made no build.json, sw.js"),
    ],
)
def test_a_failure_leaves_nothing_and_is_told_in_one_line(tools: Tools, step: str, made: str, words: str) -> None:
    tools.build()
    (tools.source / "src" / "new.ts").touch()
    tools.npm(step, made)
    done = subprocess.run(
        [sys.executable, vendor.ROOT / "scripts" / "page.py", "build", tools.source, tools.dest],
        env={**os.environ, **tools.env}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == page.NO_PAGE
    assert done.stdout.startswith(words)
    assert done.stdout.count("\n") == 1
    assert not set('"\\;') & set(done.stdout)
    assert "full log is" in done.stdout
    assert not tools.dest.exists(), "an earlier page would be embedded"
    assert len(tools.pages()) == 1
    assert not list((tools.folder / "cache" / "work").iterdir())


def test_the_pages_used_last_are_kept(tools: Tools) -> None:
    tools.build()
    (first,) = tools.pages()
    for i in range(page.KEEP_PAGES):
        folder = first.parent / f"old-{i}"
        folder.mkdir()
        os.utime(folder, (i, i))
    tools.build()
    assert first in tools.pages()
    assert len(tools.pages()) == page.KEEP_PAGES
    assert not (first.parent / "old-0").exists()
