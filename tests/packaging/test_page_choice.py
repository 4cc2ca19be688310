"""The page is built when npm can, or must be, or is left out; the reason is told (cmake/Page.cmake)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shell import ROOT, run

NPM = '#!/bin/sh\ntest "$1" = --version && echo 11.1.0 && exit 0\n{fail}\ntest "$1" = ci && exit 0\n' \
      '/bin/mkdir -p "$LLAMA_UI_OUT_DIR"\nfor n in index.html build.json sw.js; do echo >"$LLAMA_UI_OUT_DIR/$n"; done\n'  # fmt: skip


def configure(tmp_path: Path, tools: str, *defines: str) -> subprocess.CompletedProcess[str]:
    """Run Page.cmake with a made-up npm; `tools` is `none`, `good` or `offline`."""
    ui, bin_dir = tmp_path / "vendor" / "llama.cpp" / "tools" / "ui", tmp_path / "bin"
    for folder in (ui, bin_dir):
        folder.mkdir(parents=True)
    (ui / "package-lock.json").write_text("{}")
    stale = tmp_path / "build" / "llama.cpp" / "tools" / "ui" / "dist"
    stale.mkdir(parents=True)
    (stale / "index.html").write_text("stale")
    if tools != "none":
        fail = "echo npm error network getaddrinfo ENOTFOUND; exit 1" if tools == "offline" else ""
        for name, text in (("npm", NPM.format(fail=fail)), ("node", "#!/bin/sh\necho v22.13.0\n")):
            (bin_dir / name).write_text(text)
            (bin_dir / name).chmod(0o755)
    script = tmp_path / "run.cmake"
    script.write_text(
        f'set(Python_EXECUTABLE "{sys.executable}")\nset(vendor_dir "{tmp_path}/vendor")\n'
        f'set(CMAKE_CURRENT_SOURCE_DIR "{ROOT}")\nset(CMAKE_CURRENT_BINARY_DIR "{tmp_path}/build")\n'
        f'include("{ROOT}/cmake/Page.cmake")\nmessage(STATUS "LLAMA_BUILD_UI=${{LLAMA_BUILD_UI}}")\n'
    )
    cmake = shutil.which("cmake")
    assert cmake
    return run(cmake, *defines, "-P", script, env={"PATH": str(bin_dir), "LLAMA_DFLASH_CACHE": str(tmp_path / "cache")})


@pytest.mark.parametrize(
    ("tools", "defines", "want"),
    [
        ("good", (), "built: npm 11.1.0, Node.js 22.13.0"),
        ("good", ("-DLLAMA_DFLASH_PAGE=ON",), "built: npm 11.1.0, Node.js 22.13.0"),
        ("good", ("-DLLAMA_DFLASH_PAGE=OFF",), "none: LLAMA_DFLASH_PAGE=OFF"),
        ("none", (), "none: no npm found, expected npm and Node.js 20.19, 22.13 or 24 and newer"),
        ("offline", (), "none: npm ci failed: network getaddrinfo ENOTFOUND, the full log is "),
    ],
)
def test_what_is_built_and_why(tmp_path: Path, tools: str, defines: tuple[str, ...], want: str) -> None:
    done = configure(tmp_path, tools, *defines)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("-- ") for line in done.stdout.splitlines()]
    assert len(lines) == 2
    assert lines[0].startswith(f"llama-dflash: web page: {want}")
    built = want.startswith("built")
    assert lines[1] == f"LLAMA_BUILD_UI={'ON' if built else 'OFF'}"
    page = tmp_path / "build" / "llama.cpp" / "tools" / "ui" / "dist" / "index.html"
    assert page.is_file() is built, "what lies there is embedded"
    assert not built or page.read_text() != "stale"


@pytest.mark.parametrize(
    ("tools", "value", "words"),
    [
        ("none", "ON", "LLAMA_DFLASH_PAGE=ON, but there is no web page: no npm found"),
        ("offline", "ON", "LLAMA_DFLASH_PAGE=ON, but there is no web page: npm ci failed: network getaddrinfo ENOTFOUND"),
        ("good", "YES", "LLAMA_DFLASH_PAGE=YES, expected AUTO, ON or OFF"),
    ],
)
def test_what_was_asked_for_and_cannot_be_had_fails(tmp_path: Path, tools: str, value: str, words: str) -> None:
    done = configure(tmp_path, tools, f"-DLLAMA_DFLASH_PAGE={value}")
    assert done.returncode != 0
    assert words in " ".join(done.stderr.split())
