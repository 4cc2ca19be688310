#!/usr/bin/env python3
"""Build one preset into the build cache (or find it there) and print its folder.

Standard library only, so that it runs before the package is installed.

    native.py build PRESET [--upto NAME] [--broken FILE]
                                            PRESET: native, cpu, exact, cuda, asan, reference
    native.py path PRESET                   print the folder if it is built, else exit 1

A build is keyed by pin, series, options and compiler and kept outside the checkout, so a fresh
clone with the same patches compiles nothing. `reference` is the unpatched pin with the exact
test patch only: it is keyed by that patch alone and survives every change of the series.
`--broken` applies one more diff to the scratch copy of the sources: negative controls of the tests
(tests/native/broken) are such diffs, and never part of the series.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import vendor

ROOT = vendor.ROOT
PRESETS = ("native", "cpu", "exact", "cuda", "asan", "reference")
REFERENCE_PATCHES = ("ggml-cpu-reference-arithmetic-for-exact-builds.patch",)
KEEP_BUILDS = 32


def patches_of(preset: str, upto: str | None = None) -> list[str]:
    """The patches that go into a preset."""
    if preset == "reference" and upto is not None:
        raise vendor.VendorError(f"--upto {upto} with preset reference: it has the exact test patch only, expected another preset; "
                                 f"drop --upto or build 'exact'")  # fmt: skip
    series = vendor.read_series()
    return vendor.select(series, only=REFERENCE_PATCHES) if preset == "reference" else vendor.select(series, upto)


def entry(preset: str, names: Sequence[str], broken: Path | None = None) -> Path:
    """Folder of the cached build; it holds llama_dflash/ exactly as a wheel does."""
    key = vendor.cache_key(preset, names)
    if broken is not None:
        key += f"-{broken.stem}-{hashlib.sha256(broken.read_bytes()).hexdigest()[:8]}"
    return vendor.cache_dir() / "native" / key


def log(message: str) -> None:
    """Progress goes to stderr; stdout carries the folder only."""
    print(f"native: {message}", file=sys.stderr, flush=True)


def toolchain_env(work: Path, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of the build: ccache, when there is one, must not see the folder's name."""
    return {
        **{key: value for key, value in env.items() if key != "LLAMA_DFLASH_PREBUILT"},
        "CCACHE_DIR": env.get("CCACHE_DIR", str(vendor.cache_dir(env) / "ccache")),
        "CCACHE_BASEDIR": str(work),
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_MAXSIZE": env.get("CCACHE_MAXSIZE", "4G"),
    }


def configure_args(preset: str, work: Path, digest: str, prefix: Path, env: Mapping[str, str] = os.environ) -> list[str]:
    """Arguments of the cmake configure step."""
    args = ["--preset", preset, "-S", str(ROOT), "-B", str(work / "build")]
    args += [f"-DLLAMA_DFLASH_VENDOR_DIR={work / 'src'}", f"-DLLAMA_DFLASH_SERIES_DIGEST={digest}"]
    args += [f"-DCMAKE_INSTALL_PREFIX={prefix}", f"-DPython_EXECUTABLE={sys.executable}"]
    if shutil.which("ccache", path=env.get("PATH")):
        args += ["-DCMAKE_C_COMPILER_LAUNCHER=ccache", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
    return args + shlex.split(env.get("CMAKE_ARGS", ""))


def install_args(preset: str, work: Path) -> list[str]:
    """Arguments of the cmake install step."""
    args = ["--install", str(work / "build"), "--component", "llama_dflash"]
    return args if preset == "asan" else [*args, "--strip"]  # a sanitizer's report needs the symbols


def run_logged(cmd: Sequence[str], log_file: Path, env: Mapping[str, str]) -> None:
    """Run a step with its output in a log; on failure show the tail and say where the rest is."""
    with log_file.open("a") as f:
        f.write(f"$ {shlex.join(cmd)}\n")
        f.flush()
        process = subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        assert process.stdout is not None
        last_shown_s = time.monotonic()
        for line in process.stdout:
            f.write(line)
            if "llama-dflash:" in line:
                log(line.strip().removeprefix("-- "))
            elif line.startswith("[") and time.monotonic() - last_shown_s > 15:
                last_shown_s = time.monotonic()
                log(line.split("]")[0].lstrip("[") + " steps done")
        rc = process.wait()
    if rc:
        print("".join(log_file.read_text().splitlines(keepends=True)[-30:]), file=sys.stderr)
        raise vendor.VendorError(f"{cmd[0]} {cmd[1]} exited with {rc}; the full log is {log_file}")


def check_tools() -> None:
    """Name a missing tool before anything is unpacked."""
    cxx = os.environ.get("CXX", "c++")
    for tool, fix in (("git", "install git"), ("cmake", "pip install cmake"), ("ninja", "pip install ninja"),
                      (cxx, "install a C++17 compiler, or set CXX")):  # fmt: skip
        if not shutil.which(tool):
            raise vendor.VendorError(f"{tool} is not on PATH, and the build needs it: {fix}")


def compile_into(preset: str, names: Sequence[str], dest: Path, broken: Path | None = None) -> None:
    """Unpack, patch, compile and install to `dest` (made in one rename)."""
    check_tools()
    digest = vendor.digest(names)
    work = vendor.cache_dir() / "work" / dest.name
    shutil.rmtree(work, ignore_errors=True)
    (work / "src").mkdir(parents=True)
    log_file = vendor.cache_dir() / "logs" / f"{dest.name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_file.write_text("")
    started_s = time.monotonic()
    tree = work / "src" / "llama.cpp"
    vendor.prepare(tree, names)
    if broken is not None:
        run_logged(["git", "-C", str(tree), "apply", "--verbose", str(broken.resolve())], log_file, os.environ)
    shutil.rmtree(tree / ".git")  # else every checkout time stamp triggers a reconfigure
    env = toolchain_env(work)
    prefix = work / "install"
    log(f"building preset {preset}, series {digest}, log {log_file}")
    # Without GIT_DIR tricks cmake would ask the nearest repository above for its commit.
    env["GIT_CEILING_DIRECTORIES"] = str(work)
    os.chdir(ROOT)
    run_logged(["cmake", *configure_args(preset, work, digest, prefix)], log_file, env)
    run_logged(["cmake", "--build", str(work / "build"), "-j", str(os.cpu_count() or 2)], log_file, env)
    run_logged(["cmake", *install_args(preset, work)], log_file, env)
    dest.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(dest, ignore_errors=True)
    os.replace(prefix, dest)
    shutil.rmtree(work, ignore_errors=True)
    log(f"built {preset} in {time.monotonic() - started_s:.0f} s -> {dest}")


def build(preset: str, upto: str | None = None, broken: Path | None = None) -> Path:
    """Return the build's folder, compiling on first use.

    Args:
        preset: one of PRESETS.
        upto: last patch of the series to include; None for all.
        broken: a diff to apply behind the series, for a negative control; None for none.

    Raises:
        vendor.VendorError: a step failed; the message names the log.
    """
    names = patches_of(preset, upto)
    dest = entry(preset, names, broken)
    with vendor.locked(vendor.cache_dir() / "locks" / dest.name):
        if not (dest / "llama_dflash" / "BUILD_INFO.json").is_file():
            compile_into(preset, names, dest, broken)
    os.utime(dest)
    drop_old_builds(dest.parent)
    return dest


def drop_old_builds(folder: Path, keep: int = KEEP_BUILDS) -> None:
    """Keep the most recently used builds."""
    entries = sorted((p for p in folder.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in entries[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the folder on stdout, everything else on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "path"])
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--upto", help="last patch of the series to include")
    parser.add_argument("--broken", type=Path, help="diff to apply behind the series, for a negative control")
    args = parser.parse_args(argv)
    # The environment that runs this script may hold cmake and ninja without being activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        if args.command == "path":
            dest = entry(args.preset, patches_of(args.preset, args.upto), args.broken)
            if not (dest / "llama_dflash" / "BUILD_INFO.json").is_file():
                log(f"preset {args.preset} is not built; run 'python scripts/native.py build {args.preset}'")
                return 1
        else:
            dest = build(args.preset, args.upto, args.broken)
        info = json.loads((dest / "llama_dflash" / "BUILD_INFO.json").read_text())
        log(f"preset {args.preset}: {info['backend']} ({info['backend_reason']}), series {info['series_digest']}")
        log(f"web page: {info['page']} ({info['page_reason']})")
        print(dest)
    except (vendor.VendorError, OSError, json.JSONDecodeError) as e:
        print(f"native: error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
