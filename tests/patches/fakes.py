"""A tiny source distribution, a pin for it and a patch queue on it: everything that the scripts read, without the real one."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import patchq

import vendor

SCRIPTS = Path(vendor.__file__).resolve().parent
BETA = "int beta(int x) {\n    return x;\n}\n"
FILES = {
    ".gitignore": "*.o\n",
    "alpha.txt": "".join(f"line {i}\n" for i in range(1, 41)),
    "run.sh": "#!/bin/sh\necho run\n",
    "src/beta.c": BETA,
    "src/kept.o": "ignored by .gitignore and still part of the tree\n",
}
SERIES_HEAD = "# Order of application.\n\n"
ALPHA, BETA_PATCH = "alpha-count-from-zero.patch", "beta-return-the-double.patch"
MESSAGE = """{subject}

{why}

Test: tests/native/test_it.py
Perf: none intended
Blast-radius: the fake tree only
Origin: ours
Upstream: not-sent
"""
WHY = "The pin does the old thing today. Now it does the new one, on by default."


def message(subject: str, why: str = WHY) -> str:
    return MESSAGE.format(subject=subject, why=why)


def git(folder: Path, *args: str) -> str:
    """Git without the scripts' own wrapper, so that a fault in the wrapper cannot hide."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = ["-c", "user.name=A Person", "-c", "user.email=person@example.invalid"]
    cmd = ["git", "-C", str(folder), *who, *args]
    return subprocess.run(cmd, env=env, check=True, capture_output=True, text=True).stdout.strip()


def tree_id(files: Mapping[str, str], scratch: Path) -> str:
    """Git's id for `files`, worked out apart from vendor.unpack."""
    scratch.mkdir(parents=True)
    git(scratch, "init", "-q")
    for name, text in files.items():
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
    git(scratch, "add", "-A", "-f")
    return git(scratch, "write-tree")


def make_sdist(folder: Path, version: str, files: Mapping[str, str]) -> Path:
    """A source distribution as the registry has it: llama.cpp as a submodule, the bindings beside it."""
    top = f"llama_cpp_python-{version}"
    members = {f"{top}/vendor/llama.cpp/{name}": text for name, text in files.items()}
    members[f"{top}/vendor/llama.cpp/.git"] = "gitdir: ../../.git/modules/vendor/llama.cpp\n"
    members[f"{top}/llama_cpp/__init__.py"] = f'__version__ = "{version}"\n'
    members |= {f"{top}/LICENSE.md": "MIT\n", f"{top}/setup.py": "raise SystemExit('never run')\n"}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{top}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text.encode()), 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def write_pin(path: Path, sdist: Path, version: str, tree: str) -> None:
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = f"# A fake pin.\n# upstream-commit: 0123456789ab\n# tree: {tree}\n"
    path.write_text(f"{facts}{vendor.PACKAGE}=={version} --hash=sha256:{digest}\n")


class Queue:
    """A fake checkout: pin, patches/, build files, scripts, and vendor/llama.cpp once prepared."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = root / "vendor" / "llama.cpp"
        self.patches = root / "patches"
        self.series = self.patches / "series"
        self.sdist = root / "dist" / "llama_cpp_python-9.9.9.tar.gz"

    @property
    def env(self) -> dict[str, str]:
        return {"LLAMA_DFLASH_SDIST": str(self.sdist), "PATH": os.environ["PATH"]}

    @classmethod
    def create(cls, root: Path) -> Queue:
        """An empty queue, nothing unpacked."""
        q = cls(root)
        make_sdist(q.sdist.parent, "9.9.9", FILES)
        write_pin(root / "vendor" / "pin.txt", q.sdist, "9.9.9", tree_id(FILES, root / "scratch"))
        shutil.rmtree(root / "scratch")
        for name in ("CMakeLists.txt", "CMakePresets.json", "cmake/Vendor.cmake", "tests/native/test_it.py", "patches/series"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(SERIES_HEAD if name == "patches/series" else f"# {name}\n")
        shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        return q

    def prepare(self, upto: str | None = None) -> str:
        return vendor.prepare(self.tree, vendor.select(vendor.read_series(self.root), upto), self.root, self.env)

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.tree / name
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} is in {name} {text.count(old)} times"
        path.write_text(text.replace(old, new))

    def commit(self, subject: str, why: str = WHY) -> str:
        return patchq.new(subject, message(subject, why), self.root)

    def run(self, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A script as users run it, in a process of its own."""
        cmd = [sys.executable, str(self.root / "scripts" / script), *args]
        return subprocess.run(cmd, env={**os.environ, **env}, capture_output=True, text=True)

    def snapshot(self) -> dict[str, bytes]:
        """Names and contents of patches/."""
        return {path.name: path.read_bytes() for path in sorted(self.patches.iterdir())}


def create_filled(root: Path) -> Queue:
    """A queue of two good patches, exported; a comment opens each group."""
    q = Queue.create(root)
    q.prepare()
    q.edit("alpha.txt", "line 10\n", "line ten\n")
    q.commit("alpha : count from zero")
    q.edit("src/beta.c", "return x;", "return 2*x;")
    (q.tree / "src" / "gamma.c").write_text("int gamma(void);\n")
    q.commit("beta : return the double")
    patchq.refresh(root)
    q.series.write_text(f"{SERIES_HEAD}# texts: first group\n{ALPHA}\n# code: second group\n{BETA_PATCH}\n")
    patchq.refresh(root)
    return q
