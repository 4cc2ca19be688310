#!/usr/bin/env python3
"""Fetch the pinned source distribution, verify it, unpack it and apply the patch series.

Standard library only: this runs inside `pip install`, before anything of ours is installed.
One file, though long: CMake, the wheel's recipe and the tests each take it alone.

    vendor.py prepare [--dest DIR] [--upto NAME | --only NAME ...]
    vendor.py digest            series digest (names and contents, in order)
    vendor.py key PRESET        key of the build cache for one preset
    vendor.py fetch             path of the verified source distribution
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llama-cpp-python"
IDENTITY = {
    "GIT_AUTHOR_NAME": "llama-dflash",
    "GIT_AUTHOR_EMAIL": "patches@llama-dflash.invalid",
    "GIT_COMMITTER_NAME": "llama-dflash",
    "GIT_COMMITTER_EMAIL": "patches@llama-dflash.invalid",
}
EPOCH = "2000-01-01T00:00:00Z"
# git < 2.32 ignores GIT_CONFIG_GLOBAL: what in a user's configuration would change or stop a commit is named too.
OWN_CONFIG = ("core.autocrlf=false", "commit.gpgsign=false", f"core.hooksPath={os.devnull}")
PAGE_PRESETS = ("native", "cpu", "cuda")  # those without LLAMA_DFLASH_PAGE=OFF in CMakePresets.json
PROBE_PRESETS = ("cpu", "exact", "asan")  # those with LLAMA_DFLASH_PROBE in CMakePresets.json
KEY_VARIABLES = ("CMAKE_ARGS", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDAFLAGS", "CPATH")


class VendorError(Exception):
    """One clear line for the user: what, value, what was expected, what to do."""


@dataclass(frozen=True)
class Pin:
    """What vendor/pin.txt says."""

    version: str
    sha256: str
    commit: str
    tree: str


def read_pin(root: Path = ROOT) -> Pin:
    """Parse vendor/pin.txt; raises VendorError when a field is missing."""
    path = root / "vendor" / "pin.txt"
    text = path.read_text()
    req = re.search(rf"^{PACKAGE}==(\S+)\s+--hash=sha256:([0-9a-f]{{64}})$", text, re.M)
    commit = re.search(r"^# upstream-commit: ([0-9a-f]{7,40})$", text, re.M)
    tree = re.search(r"^# tree: ([0-9a-f]{40})$", text, re.M)
    if not (req and commit and tree):
        raise VendorError(f"{path}: expected a '{PACKAGE}==V --hash=sha256:..' line, '# upstream-commit:' and '# tree:'")
    return Pin(req[1], req[2], commit[1], tree[1])


def read_series(root: Path = ROOT) -> list[str]:
    """Patch file names in order, comments and blank lines dropped."""
    lines = (root / "patches" / "series").read_text().splitlines()
    names = [line.split("#")[0].strip() for line in lines]
    return [name for name in names if name]


def select(series: Sequence[str], upto: str | None = None, only: Sequence[str] | None = None) -> list[str]:
    """A prefix of the series ending at `upto` ('base' = none), or just the names in `only`."""
    wanted = list(only) if only is not None else [upto] if upto is not None and upto != "base" else []
    missing = [name for name in wanted if name not in series]
    if missing:
        raise VendorError(f"patches/series has no {missing[0]!r}; it has: {', '.join(series) or 'nothing'}")
    if only is not None:
        return [name for name in series if name in only]
    if upto == "base":
        return []
    return list(series[: series.index(upto) + 1]) if upto else list(series)


def digest(names: Sequence[str], root: Path = ROOT) -> str:
    """16 hex digits over the pin and the ordered (name, content) pairs."""
    h = hashlib.sha256(read_pin(root).sha256.encode())
    for name in names:
        h.update(name.encode() + b"\0")
        h.update(hashlib.sha256(patch_path(name, root).read_bytes()).digest())
    return h.hexdigest()[:16]


def patch_path(name: str, root: Path = ROOT) -> Path:
    """Path of a patch that the series names; raises VendorError when there is no such file."""
    path = root / "patches" / name
    if not path.is_file():
        raise VendorError(f"patches/series names {name}, which is not in patches/; remove the line or restore the file")
    return path


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where downloads and builds are kept, outside any checkout; raises VendorError when no folder can be told."""
    own, base = env.get("LLAMA_DFLASH_CACHE"), env.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser().resolve()
        return ((Path(base).expanduser() if base else Path.home() / ".cache") / "llama-dflash").resolve()
    except RuntimeError as e:  # no HOME and no such user, or an unknown ~user
        raise VendorError(f"LLAMA_DFLASH_CACHE={own or ''}: {e}; expected a folder for downloads and builds: "
                          f"set LLAMA_DFLASH_CACHE to an absolute path") from e  # fmt: skip


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, where the platform has one; the system releases it when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as f:
        if fcntl is not None:
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    h = hashlib.sha256()
    with path.open("rb") as f:
        for piece in iter(lambda: f.read(1 << 20), b""):
            h.update(piece)
    return h.hexdigest()


def fetch(root: Path = ROOT, env: Mapping[str, str] = os.environ) -> Path:
    """Return the source distribution, its sha256 checked; downloads it through pip if need be."""
    pin = read_pin(root)
    if env.get("LLAMA_DFLASH_SDIST"):
        path = Path(env["LLAMA_DFLASH_SDIST"])
        if not path.is_file():
            raise VendorError(f"LLAMA_DFLASH_SDIST={path}: no such file; expected {PACKAGE} {pin.version}'s .tar.gz")
    else:
        path = cache_dir(env) / "sdist" / f"{pin.sha256}.tar.gz"
        if not path.is_file():
            _download(pin, path, root)
    got = _sha256(path)
    if got != pin.sha256:
        own = bool(env.get("LLAMA_DFLASH_SDIST"))
        fix = f"point LLAMA_DFLASH_SDIST at {PACKAGE} {pin.version}, or unset it" if own else "delete the file and try again"
        raise VendorError(f"{path}: sha256 is {got}, expected {pin.sha256}; {fix}")
    return path


def _download(pin: Pin, path: Path, root: Path) -> None:
    tmp = path.parent / f"download-{os.getpid()}"
    tmp.mkdir(parents=True, exist_ok=True)
    # Naming the package keeps pip from building its own build tools from source (as ':all:' would).
    cmd = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", PACKAGE]
    cmd += ["--require-hashes", "-r", str(root / "vendor" / "pin.txt"), "-d", str(tmp)]
    log(f"fetching {PACKAGE} {pin.version} (hash-checked)")
    try:
        done = subprocess.run(cmd, capture_output=True, text=True)
        found = sorted(tmp.glob("*.tar.gz"))
        if done.returncode or not found:
            tail = done.stderr.strip().splitlines()[-1:] or ["no output"]
            raise VendorError(f"pip could not fetch {PACKAGE} {pin.version}: {tail[0]}; set LLAMA_DFLASH_SDIST to a local copy")
        os.replace(found[0], path)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def log(message: str) -> None:
    """Progress goes to stderr; stdout carries results only."""
    print(f"vendor: {message}", file=sys.stderr, flush=True)


def git(tree: Path, *args: str, date: str | None = EPOCH, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run git in `tree` with a fixed identity and without the user's configuration."""
    if not (tree / ".git").exists():
        # Inside a subfolder of another repository `git apply` skips every file and exits 0.
        raise VendorError(f"{tree} has no .git of its own; delete it and run 'make vendor'")
    return _run_git(tree, *args, date=date, check=check)


def check_git() -> None:
    """Raise VendorError when there is no git."""
    if not shutil.which("git"):
        raise VendorError("git is not on PATH, and unpacking and patching llama.cpp needs it: install git")


def _run_git(tree: Path, *args: str, date: str | None, check: bool) -> subprocess.CompletedProcess[str]:
    check_git()
    # A git hook sets GIT_DIR and GIT_INDEX_FILE: they would send every command to the repository of the hook.
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, **IDENTITY}
    env["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
    if date:
        env |= {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    config = [arg for item in OWN_CONFIG for arg in ("-c", item)]
    done = subprocess.run(["git", "-C", str(tree), *config, *args], env=env, capture_output=True, text=True)
    if check and done.returncode:
        name = next(arg for arg in args if arg != "-c" and "=" not in arg)
        reason = "; ".join((done.stderr or done.stdout).strip().splitlines()) or f"exit status {done.returncode}"
        raise VendorError(f"git {name} failed in {tree}: {reason}")
    return done


def unpack(dest: Path, bindings: Path, root: Path = ROOT, env: Mapping[str, str] = os.environ) -> None:
    """Unpack llama.cpp to `dest` and the bindings to `bindings`; commit the base; check its tree id."""
    check_git()
    pin = read_pin(root)
    sdist = fetch(root, env)
    top = f"llama_cpp_python-{pin.version}/"
    for path in (dest, bindings):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    try:
        with tarfile.open(sdist, "r:gz") as tar:
            _extract(tar, top, dest, bindings)
    except tarfile.TarError as e:
        raise VendorError(f"{sdist}: {e}, expected a .tar.gz; correct --hash in vendor/pin.txt") from e
    _run_git(dest, "init", "-q", date=None, check=True)
    git(dest, "add", "-A", "-f")
    git(dest, "commit", "-q", "--no-verify", "-m", base_subject(pin))
    tree = git(dest, "rev-parse", "HEAD^{tree}").stdout.strip()
    if tree != pin.tree:
        raise VendorError(f"{dest}: tree id is {tree}, expected {pin.tree}; correct '# tree:' in vendor/pin.txt if it is new")
    git(dest, "tag", "base")


def _extract(tar: tarfile.TarFile, top: str, dest: Path, bindings: Path) -> None:
    for member in tar:
        for prefix, out in ((f"{top}vendor/llama.cpp/", dest), (f"{top}llama_cpp/", bindings)):
            if member.name.startswith(prefix) and member.name != f"{prefix}.git":
                member.name = member.name[len(prefix) :]
                _extract_member(tar, member, out)
        if member.name == f"{top}LICENSE.md":
            member.name = "LICENSE.md"
            _extract_member(tar, member, bindings)


def _extract_member(tar: tarfile.TarFile, member: tarfile.TarInfo, out: Path) -> None:
    if hasattr(tarfile, "data_filter"):
        tar.extract(member, out, filter="data")
        return
    # Python before 3.11.4 (Debian 12) has no filters; the archive is pinned by its sha256, so this is belt and braces.
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise VendorError(f"{PACKAGE}: archive member is {member.name!r}, expected a relative path without '..'; "
                          f"correct --hash in vendor/pin.txt")  # fmt: skip
    # Root would hand the files to the archive's owner, and git refuses a tree of another user.
    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    tar.extract(member, out)


def base_subject(pin: Pin) -> str:
    """Subject of the base commit; it tells which distribution a tree and the bindings beside it come from."""
    return f"base: {PACKAGE} {pin.version}, llama.cpp {pin.commit}"


def apply_patches(dest: Path, names: Sequence[str], root: Path = ROOT) -> None:
    """Check out the base and apply the named patches as commits; no fuzz, no partial result."""
    git(dest, "checkout", "-q", "-f", "--detach", "base")
    git(dest, "clean", "-fdxq")
    for name in names:
        path = patch_path(name, root)
        done = git(dest, "am", "-q", "--keep-non-patch", "--committer-date-is-author-date", str(path), date=None, check=False)
        if done.returncode:
            git(dest, "am", "--abort", date=None, check=False)
            reason = (done.stderr or done.stdout).strip().splitlines()
            raise VendorError(f"{name} does not apply: {reason[0] if reason else 'git am failed'}; "
                              f"see docs/patches.md 'A patch does not apply'")  # fmt: skip


def stamp_path(dest: Path) -> Path:
    """The stamp stands beside the tree, so that `git clean` in it leaves the stamp alone."""
    return dest.parent / f".{dest.name}.stamp"


def read_stamp(dest: Path) -> tuple[str, str] | None:
    """Series digest and HEAD that `prepare` left; HEAD is '-' while it runs. None when it never ran here."""
    stamp = stamp_path(dest)
    words = stamp.read_text().split() if stamp.is_file() else []
    return (words[0], words[1]) if len(words) == 2 else None


def write_stamp(dest: Path, state: str, head: str | None = None) -> None:
    """Record what is in the tree; `head` defaults to its HEAD."""
    head = git(dest, "rev-parse", "HEAD").stdout.strip() if head is None else head
    stamp_path(dest).write_text(f"{state} {head}\n")


def unexported_work(dest: Path) -> str | None:
    """Say what is in the tree that patches/ does not have, and what to do with it, or None."""
    stamp = read_stamp(dest)
    if not (dest / ".git").exists() or stamp is None or stamp[1] == "-":
        return None
    fix = "run 'make refresh' to export them, or delete the folder to drop them"
    if git(dest, "status", "--porcelain").stdout.strip():
        return f"uncommitted changes; {fix}"
    ignored = ignored_files(dest)
    if ignored:
        return ignored
    if git(dest, "rev-parse", "HEAD").stdout.strip() != stamp[1]:
        return f"commits that are not exported; {fix}"
    return None


def ignored_files(dest: Path) -> str | None:
    """Name the new files that .gitignore hides (no commit takes them, and `git clean` would remove them), or None."""
    lines = git(dest, "status", "--porcelain", "--ignored").stdout.splitlines()
    names = [line[3:] for line in lines if line.startswith("!! ")]
    if not names:
        return None
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"files that git ignores: {', '.join(names[:5])}{more}; force-add them with 'git add -f' or delete them"


def drop_killed_am(dest: Path) -> None:
    """Remove what a killed `git am` left; else the next one stops and a good patch gets the blame."""
    shutil.rmtree(dest / ".git" / "rebase-apply", ignore_errors=True)
    for name in ("index.lock", "HEAD.lock"):
        (dest / ".git" / name).unlink(missing_ok=True)


def prepare(dest: Path, names: Sequence[str], root: Path = ROOT, env: Mapping[str, str] = os.environ) -> str:
    """Make `dest` the pinned tree with `names` applied; returns the digest. Does nothing when it is already so."""
    check_git()
    with locked(dest.parent / f".{dest.name}.lock"):
        return _prepare(dest, names, root, env)


def _prepare(dest: Path, names: Sequence[str], root: Path, env: Mapping[str, str]) -> str:
    pin, want = read_pin(root), digest(names, root)
    bindings = dest.parent / "llama_cpp"
    stamp = read_stamp(dest)
    work = unexported_work(dest)
    if work:
        raise VendorError(f"{dest} has {work}")
    if stamp is None and dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        # Unpacking empties the folder, so it must be one that an earlier run made.
        raise VendorError(f"{dest} is not empty and has no {stamp_path(dest).name} beside it; expected a tree that vendor.py "
                          f"made: delete it or give another --dest")  # fmt: skip
    base_ok = (dest / ".git").exists() and (bindings / "__init__.py").is_file() and stamp is not None
    if base_ok and stamp is not None and stamp[0] == want:
        return want
    if base_ok:
        done = git(dest, "log", "-1", "--format=%T %s", "base", check=False)
        base_ok = done.returncode == 0 and done.stdout.strip() == f"{pin.tree} {base_subject(pin)}"
    if not base_ok:
        fetch(root, env)  # a failure here must leave the tree and its stamp as they are
        log(f"unpacking llama.cpp {pin.commit} to {dest}")
        write_stamp(dest, "unpacking", "-")
        unpack(dest, bindings, root, env)
    elif stamp is not None and stamp[1] == "-":
        drop_killed_am(dest)
    write_stamp(dest, "applying", "-")
    try:
        apply_patches(dest, names, root)
    except VendorError:
        write_stamp(dest, "partial")  # commits made on top, to mend the patch, count as work
        raise
    write_stamp(dest, want)
    log(f"applied {len(names)} patches, series digest {want}")
    return want


def output_of(env: Mapping[str, str], *cmd: str) -> str:
    """Exit status and stdout of a tool as `env` finds it; part of the key, so a missing tool is an answer as well."""
    try:
        done = subprocess.run(cmd, capture_output=True, text=True, errors="replace", env=dict(env), timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return f"{cmd[0]}: none"
    return f"{done.returncode} {done.stdout}"


def _tool_version(env: Mapping[str, str], *cmd: str) -> str:
    return output_of(env, *cmd, "--version").splitlines()[0]


def _cuda_facts(env: Mapping[str, str]) -> list[str]:
    """What cmake/Backend.cmake decides by: nvcc, cuBLAS and the driver, in the places that it looks in."""
    own = [env[name] for name in ("CUDA_PATH", "CUDA_HOME") if env.get(name)]
    folders = [*(f"{root}/bin" for root in own), env.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders)) or "nvcc"
    roots = dict.fromkeys(map(Path, [*own, str(Path(nvcc).parent.parent), "/usr/local/cuda", "/usr/local", "/usr"]))
    includes = ("include", "targets/x86_64-linux/include")
    libs = ("lib64", "lib", "lib/x64", "lib/x86_64-linux-gnu", "targets/x86_64-linux/lib")
    files = [f"{folder}/cublas_v2.h" for folder in includes]
    files += [f"{folder}/libcublas.{end}" for folder in libs for end in ("so", "a")]
    cublas = [str(root / name) for root in roots for name in files if (root / name).is_file()]
    driver = output_of(env, "nvidia-smi", "--query-gpu=compute_cap,driver_version", "--format=csv,noheader")
    return [nvcc, output_of(env, nvcc, "--version"), *cublas, driver]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def cache_key(preset: str, names: Sequence[str], root: Path = ROOT, env: Mapping[str, str] = os.environ) -> str:
    """Key of one native build: pin, series, our build files, options, compiler; Node.js for the page; CPU, CUDA and driver for native code."""
    h = hashlib.sha256(digest(names, root).encode())
    files = [root / "CMakeLists.txt", root / "CMakePresets.json", *sorted((root / "cmake").glob("*"))]
    if preset in PROBE_PRESETS:
        files += sorted((root / "tests" / "native" / "probe").glob("*"))
    for path in filter(Path.is_file, files):
        h.update(path.name.encode() + b"\0" + path.read_bytes())
    compilers = [shlex.split(env.get("CC") or "cc"), shlex.split(env.get("CXX") or "c++")]  # "ccache gcc" is two words
    facts = [preset, platform.machine(), platform.system(), *(_tool_version(env, *c) for c in compilers)]
    facts += [_tool_version(env, "cmake"), *(env.get(name, "") for name in KEY_VARIABLES)]
    if preset in PAGE_PRESETS:
        h.update((root / "scripts" / "page.py").read_bytes())
        facts += ["npm" if shutil.which("npm", path=env.get("PATH")) else "no npm", output_of(env, "node", "--version")]
    if preset in ("native", "cuda"):
        facts += [_cpu_flags(), *_cuda_facts(env)]
    h.update("\0".join(facts).encode())
    return f"{preset}-{h.hexdigest()[:16]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; one line on stderr and exit 1 on failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["prepare", "digest", "key", "fetch"])
    parser.add_argument("preset", nargs="?", default="native", help="for 'key'")
    parser.add_argument("--dest", type=Path, default=ROOT / "vendor" / "llama.cpp")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--upto", help="last patch of the prefix to apply; 'base' applies none")
    part.add_argument("--only", nargs="*", help="apply just these patches of the series")
    args = parser.parse_args(argv)
    try:
        names = select(read_series(), args.upto, args.only)
        if args.command == "prepare":
            prepare(args.dest.resolve(), names)
            print(cache_key(args.preset, names))
        elif args.command == "digest":
            print(digest(names))
        elif args.command == "key":
            print(cache_key(args.preset, names))
        else:
            print(fetch())
    except (VendorError, OSError) as e:
        print(f"vendor: error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
