#!/usr/bin/env python3
"""Compile the CUDA files that the patch series adds or changes, for every architecture; no GPU is needed.

Standard library only.

    cuda_compile.py [--cublas FOLDER] [--resources]
                                            the series, in a patched tree of its own in the cache
    cuda_compile.py --source FOLDER --since REV ..
                                            a git tree, with all that changed in it since a revision
    cuda_compile.py --tools                 say whether nvcc and cuBLAS' headers are there

One line on stdout per file. What compiled once is kept in the cache by its content, that of all headers,
the flags and the compilers, and is not compiled again. --resources also prints the registers and
spilled bytes of each kernel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import vendor

ARCHITECTURES = (75, 80, 86, 89, 90)
SM = " ".join(f"sm_{arch}" for arch in ARCHITECTURES)
CUDA = "ggml/src/ggml-cuda"
INCLUDE_FOLDERS = ("ggml/include", "ggml/src", CUDA)
HEADERS = ("ggml/include/*.h", "ggml/src/*.h", f"{CUDA}/**/*.cuh", f"{CUDA}/**/*.h")
# A release build of shared libraries. Left out: what shapes the object file alone (-compress-mode), and warnings.
FLAGS = ("-c", "-std=c++17", "-O3", "-DNDEBUG", "-Xcompiler", "-fPIC,-Wno-pedantic", "-Xptxas", "-v")
DEFINES = ("GGML_CUDA_USE_GRAPHS", "GGML_SCHED_MAX_COPIES=4", "GGML_SHARED", "GGML_BACKEND_BUILD", "GGML_BACKEND_SHARED")
KEY_VARIABLES = ("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH")
KEEP_RECORDS = 256


@dataclass(frozen=True)
class Kernel:
    """What a kernel takes on one architecture, as ptxas tells it."""

    name: str
    sm: str
    n_registers: int
    spill_bytes: int


@dataclass(frozen=True)
class Compiler:
    """nvcc, its version, and the folder with cuBLAS' headers; None where nvcc finds them by itself."""

    nvcc: str
    version: str
    cublas: Path | None


def log(message: str) -> None:
    """Progress and errors go to stderr; stdout carries a line per file."""
    print(f"cuda_compile: {message}", file=sys.stderr, flush=True)


def find_compiler(cublas: Path | None = None, env: Mapping[str, str] = os.environ) -> Compiler:
    """Look for nvcc on PATH, and for cuBLAS' headers: in `cublas`, beside nvcc, in this Python's packages.

    Raises:
        vendor.VendorError: one of them is missing; the message says what to do.
    """
    nvcc = shutil.which("nvcc", path=env.get("PATH"))
    if nvcc is None:
        raise vendor.VendorError(
            "nvcc is not on PATH, and CUDA files need it: install the CUDA toolkit, or add its bin folder to PATH"
        )
    version = vendor.output_of(env, nvcc, "--version")
    if not version.startswith("0 "):
        raise vendor.VendorError(
            f"{nvcc} --version does not run, expected the version of nvcc: mend the CUDA toolkit, or correct PATH"
        )
    if cublas is not None:
        for folder in (cublas, cublas / "include"):
            if (folder / "cublas_v2.h").is_file():
                return Compiler(nvcc, version, folder.resolve())
        raise vendor.VendorError(f"--cublas {cublas}: no cublas_v2.h there, expected the folder that has it")
    if _finds_cublas(nvcc, env):
        return Compiler(nvcc, version, None)
    found = [path.parent for folder in sys.path if folder for path in sorted(Path(folder).glob("nvidia/*/include/cublas_v2.h"))]
    if not found:
        raise vendor.VendorError("cublas_v2.h is neither beside nvcc nor in this Python's packages, and ggml's CUDA files include it: "
                                 "pip install nvidia-cublas, or name its folder with --cublas FOLDER")  # fmt: skip
    return Compiler(nvcc, version, found[0])


def _finds_cublas(nvcc: str, env: Mapping[str, str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cu"
        probe.write_text("#include <cublas_v2.h>\n")
        return subprocess.run([nvcc, "-E", str(probe)], capture_output=True, env=dict(env), timeout=60).returncode == 0


def named_by_patches(texts: Iterable[str]) -> list[str]:
    """Files under CUDA that patches leave changed, added or renamed; one that is deleted later is named as well."""
    found = (match[1] for text in texts for match in re.finditer(r"^(?:\+\+\+ b/|rename to )(\S+)$", text, re.M))
    return sorted({name for name in found if name.startswith(f"{CUDA}/")})


def changed_since(tree: Path, rev: str) -> list[str]:
    """Files under CUDA that differ from `rev`, uncommitted and new ones too."""
    lists = [("diff", "--name-only", "--no-renames", "-z", rev, "--", CUDA),
             ("ls-files", "--others", "--exclude-standard", "-z", "--", CUDA)]  # fmt: skip
    return sorted({name for args in lists for name in vendor.git(tree, *args).stdout.split("\0") if name})


class Includes:
    """Which files of a tree a file includes, directly or not; each is read once."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self._direct: dict[str, list[str]] = {}

    def direct(self, name: str) -> list[str]:
        """Files of the tree in the `#include` lines of `name`, those under `#if` too."""
        if name not in self._direct:
            text = (self.tree / name).read_text(errors="replace")
            folders = (os.path.dirname(name), *INCLUDE_FOLDERS)
            paths = [[os.path.normpath(f"{folder}/{line}") for folder in folders]
                     for line in re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', text, re.M)]  # fmt: skip
            found = [next((path for path in options if (self.tree / path).is_file()), None) for options in paths]
            self._direct[name] = [path for path in found if path is not None]
        return self._direct[name]

    def reached(self, name: str) -> set[str]:
        """All files that the compiler reads for `name`, without itself."""
        seen: set[str] = set()
        todo = [name]
        while todo:
            for path in self.direct(todo.pop()):
                if path not in seen:
                    seen.add(path)
                    todo.append(path)
        return seen


def named_like(source: str, header: str) -> bool:
    """Whether a header belongs to a .cu file by its name: `mmq.cuh` and `mmq-vec-dot.cuh` to `mmq.cu`."""
    stem, whole = (Path(name).stem.replace("_", "-") for name in (source, header))
    return whole == stem or whole.startswith(f"{stem}-")


def select(tree: Path, changed: Sequence[str]) -> list[str]:
    """The .cu files to compile for the files that changed.

    These are the changed ones, and of those that include a changed header the ones that are named like it. A common header
    has dozens of users: one that none of these includes brings its smallest user, so that it is compiled at all.
    """
    present = [name for name in changed if (tree / name).is_file()]
    chosen = {name for name in present if name.endswith(".cu")}
    headers = [name for name in present if name.endswith((".cuh", ".h"))]
    if not headers:
        return sorted(chosen)
    includes = Includes(tree)
    sources = sorted(str(path.relative_to(tree)) for path in (tree / CUDA).rglob("*.cu"))
    reached = {source: includes.reached(source) for source in sources}
    users = {header: [source for source in sources if header in reached[source]] for header in headers}
    chosen |= {source for header in headers for source in users[header] if named_like(source, header)}
    for header in headers:
        if not users[header]:
            log(f"{header} changed, but no .cu file includes it")
        elif not chosen.intersection(users[header]):
            chosen.add(min(users[header], key=lambda source: ((tree / source).stat().st_size, source)))
    return sorted(chosen)


def flags_of(tree: Path) -> list[str]:
    """Flags for every file, include folders aside; those of CUDA code as ggml's own CMake file has them."""
    path = tree / CUDA / "CMakeLists.txt"
    match = re.search(r"^\s*set\(CUDA_FLAGS\s+([^)$]+)\)", path.read_text(), re.M)
    if not match:
        raise vendor.VendorError(
            f"{path} has no 'set(CUDA_FLAGS ..)', expected the flags there: correct flags_of in cuda_compile.py"
        )
    codes = [part for arch in ARCHITECTURES for part in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
    return [*FLAGS, *shlex.split(match[1]), *(f"-D{define}" for define in DEFINES), *codes]


def state_key(tree: Path, compiler: Compiler, flags: Sequence[str], env: Mapping[str, str] = os.environ) -> bytes:
    """Digest of all that counts for a file besides itself: headers, flags, compilers."""
    host = vendor.output_of(env, env.get("NVCC_CCBIN") or "g++", "--version")
    h = hashlib.sha256("\0".join([*flags, compiler.version, host, *(env.get(name, "") for name in KEY_VARIABLES)]).encode())
    headers = sorted({path for pattern in HEADERS for path in tree.glob(pattern)})
    named = [(str(path.relative_to(tree)), path) for path in headers]
    if compiler.cublas is not None:
        named += [(path.name, path) for path in sorted(compiler.cublas.glob("cublas*.h"))]
    for name, path in named:
        h.update(f"\0{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return h.digest()


def kernels_of(report: str) -> list[Kernel]:
    """Read ptxas' report (-v): an entry function, then its spills, then its registers."""
    found = []
    name, sm, spill_bytes = "", "", 0
    for line in report.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            name, sm, spill_bytes = match[1], match[2], 0
        elif match := re.search(r"(\d+) bytes spill stores", line):
            spill_bytes = max(spill_bytes, int(match[1]))
        elif (match := re.search(r"Used (\d+) registers", line)) and name:
            found.append(Kernel(name, sm, int(match[1]), spill_bytes))
            name = ""
    return found


def without_report(text: str) -> str:
    """What nvcc says, less ptxas' report."""
    return "\n".join(line for line in text.splitlines() if not re.match(r"ptxas info|\s+\d+ bytes stack frame", line))


def resource_lines(kernels: Sequence[Kernel]) -> list[str]:
    """A line per kernel: registers on each architecture, and what is spilled."""
    names = list(dict.fromkeys(kernel.name for kernel in kernels))
    shown = names
    if names and shutil.which("c++filt"):
        shown = subprocess.run(
            ["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True
        ).stdout.splitlines()
    lines = []
    for name, label in zip(names, shown, strict=True):
        own = sorted((kernel for kernel in kernels if kernel.name == name), key=lambda kernel: kernel.sm)
        registers = ", ".join(f"{kernel.sm} {kernel.n_registers}" for kernel in own)
        spills = ", ".join(f"{kernel.sm} {kernel.spill_bytes} bytes" for kernel in own if kernel.spill_bytes)
        lines.append(f"  {label}: registers {registers}; spilled {spills or 'nothing'}")
    return lines


def compile_file(tree: Path, name: str, compiler: Compiler, flags: Sequence[str]) -> tuple[int, str, float]:
    """Run nvcc once for all architectures; exit status, what it said, seconds."""
    folders = [f"-I{tree / folder}" for folder in INCLUDE_FOLDERS]
    if compiler.cublas is not None:
        folders += ["-isystem", str(compiler.cublas)]  # behind nvcc's own folders: a package may bring other CUDA headers
    with tempfile.TemporaryDirectory() as work:
        command = [compiler.nvcc, *flags, "--threads", "2", *folders, "-o", f"{work}/out.o", str(tree / name)]
        started_s = time.monotonic()
        done = subprocess.run(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        return done.returncode, done.stdout, time.monotonic() - started_s


def compile_all(tree: Path, names: Sequence[str], compiler: Compiler, resources: bool = False) -> list[str]:
    """Compile what the cache does not have, and print a line for each file; returns the files that failed."""
    flags = flags_of(tree)
    state = state_key(tree, compiler, flags)
    records = vendor.cache_dir() / "cuda" / "records"
    records.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        key = hashlib.sha256(state + name.encode() + b"\0" + (tree / name).read_bytes()).hexdigest()[:16]
        record = records / f"{Path(name).stem}-{key}.json"
        if record.is_file():
            os.utime(record)
            facts = json.loads(record.read_text())
            print(f"{name}: {SM}: 0.0 s (compiled before, in {facts['seconds']:.1f} s)", flush=True)
            kernels = [Kernel(**kernel) for kernel in facts["kernels"]]
        else:
            rc, said, seconds = compile_file(tree, name, compiler, flags)
            if rc:
                failed.append(name)
                print(f"{name}: {SM}: failed after {seconds:.1f} s", flush=True)
                print(without_report(said), file=sys.stderr, flush=True)
                continue
            print(f"{name}: {SM}: {seconds:.1f} s", flush=True)
            kernels = kernels_of(said)
            part = record.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"seconds": seconds, "kernels": [asdict(kernel) for kernel in kernels]}))
            os.replace(part, record)
        if resources:
            print("\n".join(resource_lines(kernels)) or "  no kernels", flush=True)
    for old in sorted(records.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)[KEEP_RECORDS:]:
        old.unlink(missing_ok=True)
    return failed


def run(tree: Path, changed: Sequence[str], what: str, cublas: Path | None, resources: bool) -> int:
    """Compile what `changed` calls for; the exit status."""
    names = select(tree, changed)
    if not names:
        print(f"{what}: no CUDA file to compile")
        return 0
    failed = compile_all(tree, names, find_compiler(cublas), resources)
    if failed:
        log(f"error: {len(failed)} of {len(names)} files failed: {', '.join(failed)}; see nvcc's messages above")
    return 1 if failed else 0


def run_series(cublas: Path | None, resources: bool) -> int:
    """Compile what the series changes, in a tree that is patched anew only when the series is another."""
    names = vendor.read_series()
    changed = named_by_patches(vendor.patch_path(name).read_text(errors="replace") for name in names)
    if not changed:
        print("patches/series: no patch changes a CUDA file")
        return 0
    find_compiler(cublas)  # say what is missing before anything is unpacked
    folder = vendor.cache_dir() / "cuda"
    with vendor.locked(folder / "lock"):  # another checkout may want another series in the same tree
        vendor.prepare(folder / "llama.cpp", names)
        return run(folder / "llama.cpp", changed, "patches/series", cublas, resources)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 when a file does not compile or a tool is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="a git tree of llama.cpp in place of the series")
    parser.add_argument("--since", metavar="REV", help="with --source: the revision to compare with")
    parser.add_argument("--cublas", type=Path, metavar="FOLDER", help="folder with cublas_v2.h")
    parser.add_argument("--resources", action="store_true", help="print registers and spilled bytes of each kernel")
    parser.add_argument("--tools", action="store_true", help="say whether the tools are there, and compile nothing")
    args = parser.parse_args(argv)
    if (args.source is None) != (args.since is None):
        parser.error("--source and --since go together")
    try:
        if args.tools:
            compiler = find_compiler(args.cublas)
            print(f"nvcc is {compiler.nvcc}, cuBLAS' headers are {compiler.cublas or 'where it looks for them'}")
            return 0
        if args.source is None:
            return run_series(args.cublas, args.resources)
        tree = args.source.resolve()
        if not ((tree / ".git").exists() and (tree / CUDA).is_dir()):
            raise vendor.VendorError(f"--source {tree}: no .git or no {CUDA} there, expected the root of a git tree of llama.cpp")
        return run(tree, changed_since(tree, args.since), f"{tree} since {args.since}", args.cublas, args.resources)
    except (vendor.VendorError, OSError) as e:
        print(f"cuda_compile: error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
