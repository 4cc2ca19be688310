"""scripts/vendor.py: which patches, which digest, which cache key; the command line."""

from __future__ import annotations

import json
from pathlib import Path

import fakes
import pytest
from fakes import ALPHA, BETA_PATCH, Queue

import vendor

SERIES = ["a.patch", "b.patch", "c.patch"]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, SERIES),
        ({"upto": "b.patch"}, ["a.patch", "b.patch"]),
        ({"upto": "c.patch"}, SERIES),
        ({"upto": "base"}, []),
        ({"only": ["c.patch", "a.patch"]}, ["a.patch", "c.patch"]),
        ({"only": []}, []),
    ],
)
def test_select(kwargs: dict, expected: list[str]) -> None:
    assert vendor.select(SERIES, **kwargs) == expected


@pytest.mark.parametrize("kwargs", [{"upto": "z.patch"}, {"only": ["a.patch", "z.patch"]}])
def test_select_refuses_unknown_names(kwargs: dict) -> None:
    with pytest.raises(vendor.VendorError, match=r"series has no 'z\.patch'; it has: a\.patch, b\.patch, c\.patch"):
        vendor.select(SERIES, **kwargs)


def test_select_of_an_empty_series() -> None:
    assert vendor.select([]) == []
    with pytest.raises(vendor.VendorError, match="it has: nothing"):
        vendor.select([], "a.patch")


def test_series_drops_comments_and_blank_lines(empty: Queue) -> None:
    empty.series.write_text("# head\n\n  a.patch  # inline\n#b.patch\n\nc.patch\n")
    assert vendor.read_series(empty.root) == ["a.patch", "c.patch"]


def test_digest_changes_with_order_name_content_and_pin(filled: Queue) -> None:
    names = [ALPHA, BETA_PATCH]
    seen = [vendor.digest(names, filled.root), vendor.digest(names[::-1], filled.root), vendor.digest(names[:1], filled.root)]
    (filled.patches / "renamed.patch").write_bytes((filled.patches / ALPHA).read_bytes())
    seen.append(vendor.digest(["renamed.patch", BETA_PATCH], filled.root))
    (filled.patches / ALPHA).write_bytes((filled.patches / ALPHA).read_bytes() + b"\n")
    seen.append(vendor.digest(names, filled.root))
    pin = filled.root / "vendor" / "pin.txt"
    pin.write_text(pin.read_text().replace(vendor.read_pin(filled.root).sha256, "0" * 64))
    seen.append(vendor.digest(names, filled.root))
    assert len(set(seen)) == len(seen) == 6
    assert all(len(d) == 16 and int(d, 16) for d in seen)


def test_digest_ignores_comments_in_the_series(filled: Queue) -> None:
    before = vendor.digest(vendor.read_series(filled.root), filled.root)
    filled.series.write_text("# another comment\n" + filled.series.read_text())
    assert vendor.digest(vendor.read_series(filled.root), filled.root) == before


def fake_compiler(path: Path, version: str) -> str:
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


def test_cache_key_changes_with_all_that_changes_a_build(filled: Queue, tmp_path: Path) -> None:
    def key(preset: str = "cpu", names: tuple[str, ...] = (ALPHA, BETA_PATCH), **env: str) -> str:
        return vendor.cache_key(preset, names, filled.root, {**filled.env, **env})

    first = key()
    assert first == key() == key(UNRELATED="1")
    assert first.startswith("cpu-")
    gcc = fake_compiler(tmp_path / "gcc", "13")
    seen = {
        "first": first,
        "preset": key("exact").removeprefix("exact-"),
        "series": key(names=(ALPHA,)),
        "CMAKE_ARGS": key(CMAKE_ARGS="-DGGML_CUDA=ON"),
        "CFLAGS": key(CFLAGS="-O1"),
        "CXXFLAGS": key(CXXFLAGS="-O1"),
        **{name: key(**{name: "/x"}) for name in ("LDFLAGS", "CUDACXX", "CUDAFLAGS", "CPATH")},
        "CC": key(CC=gcc),
        "CXX": key(CXX=gcc),
    }
    fake_compiler(tmp_path / "gcc", "14")
    seen |= {"version": key(CC=gcc)}
    for name in ("CMakeLists.txt", "CMakePresets.json", "cmake/Vendor.cmake"):
        with (filled.root / name).open("a") as f:
            f.write("changed\n")
        seen[name] = key()
    (filled.root / "cmake" / "folder").mkdir()
    assert key() == seen["cmake/Vendor.cmake"], "a folder such as __pycache__ is not a build file"
    assert len(set(seen.values())) == len(seen), seen
    assert seen["preset"] != first.removeprefix("cpu-")


@pytest.mark.parametrize("preset", ["native", "cuda", "cpu"])
def test_native_keys_follow_toolkit_and_driver(filled: Queue, tmp_path: Path, preset: str) -> None:
    bin_dir, toolkit = tmp_path / "bin", tmp_path / "cuda"
    for folder in (bin_dir, toolkit / "bin", toolkit / "include", toolkit / "lib64"):
        folder.mkdir(parents=True)

    def key(**env: str) -> str:
        return vendor.cache_key(preset, [], filled.root, {**filled.env, "PATH": f"{bin_dir}:{filled.env['PATH']}", **env})

    def tool(path: Path, code: int, *lines: str) -> None:
        path.write_text("#!/bin/sh\n" + "".join(f"echo {line}\n" for line in lines) + f"exit {code}\n")
        path.chmod(0o755)

    keys = []
    tool(bin_dir / "nvidia-smi", 9)
    tool(toolkit / "bin" / "nvcc", 0, "release 12")
    keys += [key(), key(CUDA_PATH=str(toolkit))]
    (toolkit / "include" / "cublas_v2.h").touch()
    keys.append(key(CUDA_PATH=str(toolkit)))
    (toolkit / "lib64" / "libcublas.so").touch()
    keys.append(key(CUDA_HOME=str(toolkit)))
    assert keys[-1] == key(CUDA_PATH=str(toolkit)), "the place counts, not the name of the variable"
    tool(bin_dir / "nvcc", 0, "nvcc", "release 12")
    keys.append(key())
    tool(bin_dir / "nvcc", 0, "nvcc", "release 13")  # its version is not in the first line
    keys.append(key())
    for code, line in ((0, "8.0, 550"), (0, "9.0, 550"), (1, "9.0, 550")):
        tool(bin_dir / "nvidia-smi", code, line)
        keys.append(key())
    assert len(set(keys)) == (1 if preset == "cpu" else len(keys))


@pytest.mark.parametrize(("preset", "differs"), [("cpu", True), ("exact", True), ("asan", True), ("native", False), ("reference", False)])
def test_the_probe_is_in_the_key_of_presets_that_build_it(filled: Queue, preset: str, differs: bool) -> None:
    probe = filled.root / "tests" / "native" / "probe" / "probe.cpp"
    probe.parent.mkdir()
    keys = set()
    for text in ("one", "two"):
        probe.write_text(text)
        keys.add(vendor.cache_key(preset, [], filled.root, filled.env))
    assert (len(keys) == 2) is differs


def test_the_probe_presets_are_those_of_cmake() -> None:
    presets = {p["name"]: p for p in json.loads((vendor.ROOT / "CMakePresets.json").read_text())["configurePresets"]}

    def builds_probe(name: str | None) -> bool:
        if name is None:
            return False
        own = presets[name]["cacheVariables"].get("LLAMA_DFLASH_PROBE")
        return own == "ON" if own else builds_probe(presets[name].get("inherits"))

    assert {name for name in presets if builds_probe(name)} == set(vendor.PROBE_PRESETS)


def test_the_page_presets_are_those_of_cmake() -> None:
    presets = {p["name"]: p for p in json.loads((vendor.ROOT / "CMakePresets.json").read_text())["configurePresets"]}

    def builds_page(name: str | None) -> bool:
        return name is None or ("LLAMA_DFLASH_PAGE" not in presets[name]["cacheVariables"] and builds_page(presets[name].get("inherits")))

    assert {name for name in presets if not presets[name].get("hidden") and builds_page(name)} == set(vendor.PAGE_PRESETS)


@pytest.mark.parametrize(("preset", "n_keys"), [("native", 4), ("cuda", 4), ("cpu", 4), ("exact", 1), ("asan", 1), ("reference", 1)])
def test_npm_and_node_are_in_the_key_of_presets_with_the_page(filled: Queue, tmp_path: Path, preset: str, n_keys: int) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for tool in ("cc", "c++", "cmake"):
        fake_compiler(bin_dir / tool, "1")
    keys = set()

    def add_key() -> None:
        keys.add(vendor.cache_key(preset, [], filled.root, {**filled.env, "PATH": str(bin_dir)}))

    add_key()
    fake_compiler(bin_dir / "node", "v20.19.0")
    add_key()
    fake_compiler(bin_dir / "npm", "10")
    add_key()
    fake_compiler(bin_dir / "npm", "11")  # the page's own key has it
    add_key()
    fake_compiler(bin_dir / "node", "v22.13.0")
    add_key()
    assert len(keys) == n_keys


def test_cache_key_sees_the_compiler_behind_a_launcher(filled: Queue, tmp_path: Path) -> None:
    keys = set()
    for version in ("13", "14"):
        gcc = fake_compiler(tmp_path / "gcc", version)
        keys.add(vendor.cache_key("cpu", [], filled.root, {**filled.env, "CC": f"env {gcc}"}))
    assert len(keys) == 2


@pytest.mark.parametrize(("preset", "differs"), [("native", True), ("cuda", True), ("cpu", False), ("exact", False)])
def test_only_native_code_is_keyed_by_the_cpu(filled: Queue, monkeypatch: pytest.MonkeyPatch, preset: str, differs: bool) -> None:
    keys = set()
    for flags in ("flags: avx2", "flags: avx512f"):
        monkeypatch.setattr(vendor, "_cpu_flags", lambda flags=flags: flags)
        keys.add(vendor.cache_key(preset, [], filled.root, filled.env))
    assert (len(keys) == 2) is differs


def test_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert vendor.cache_dir({}) == tmp_path / ".cache" / "llama-dflash"
    assert vendor.cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/llama-dflash")
    assert vendor.cache_dir({"LLAMA_DFLASH_CACHE": "~/c", "XDG_CACHE_HOME": "/x"}) == tmp_path / "c"
    assert vendor.cache_dir({"LLAMA_DFLASH_CACHE": "", "XDG_CACHE_HOME": ""}) == tmp_path / ".cache" / "llama-dflash"
    monkeypatch.chdir(tmp_path)
    assert vendor.cache_dir({"LLAMA_DFLASH_CACHE": "relative"}) == tmp_path / "relative"
    assert vendor.cache_dir({"XDG_CACHE_HOME": "relative"}) == tmp_path / "relative" / "llama-dflash"


@pytest.mark.parametrize("env", [{}, {"LLAMA_DFLASH_CACHE": "~no-such-user/c"}, {"XDG_CACHE_HOME": "~no-such-user/c"}])
def test_a_cache_that_cannot_be_placed_is_refused(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(vendor.VendorError, match=r"^LLAMA_DFLASH_CACHE=.*; expected a folder .*: set LLAMA_DFLASH_CACHE"):
        vendor.cache_dir(env)


def test_main_prints_results_on_stdout_only(filled: Queue) -> None:
    names = vendor.read_series(filled.root)
    done = filled.run("vendor.py", "digest")
    assert (done.returncode, done.stdout, done.stderr) == (0, vendor.digest(names, filled.root) + "\n", "")
    done = filled.run("vendor.py", "key", "cpu", "--only", ALPHA)
    assert (done.returncode, done.stdout) == (0, vendor.cache_key("cpu", [ALPHA], filled.root) + "\n")
    done = filled.run("vendor.py", "fetch")
    assert (done.returncode, done.stdout) == (0, f"{filled.sdist}\n")
    done = filled.run("vendor.py", "prepare", "--upto", "base")
    assert done.returncode == 0
    assert done.stdout == vendor.cache_key("native", [], filled.root) + "\n"
    assert "vendor: applied 0 patches" in done.stderr
    assert "line 10\n" in (filled.tree / "alpha.txt").read_text()


@pytest.mark.parametrize("case", ["unknown name", "no sdist", "no pin", "broken archive"])
def test_main_fails_with_one_line_and_status_1(filled: Queue, case: str) -> None:
    args, env, words = ["fetch"], {}, "no such file; expected llama-cpp-python 9.9.9"
    if case == "unknown name":
        args, words = ["prepare", "--upto", "no-such.patch"], f"has no 'no-such.patch'; it has: {ALPHA}, {BETA_PATCH}"
    elif case == "no sdist":
        env = {"LLAMA_DFLASH_SDIST": str(filled.root / "gone.tar.gz")}
    elif case == "no pin":
        (filled.root / "vendor" / "pin.txt").unlink()
        words = "pin.txt"
    else:
        filled.sdist.write_bytes(b"not an archive")
        fakes.write_pin(filled.root / "vendor" / "pin.txt", filled.sdist, "9.9.9", "0" * 40)
        args, words = ["prepare", "--dest", str(filled.root / "new" / "llama.cpp")], "expected a .tar.gz; correct --hash"
    done = filled.run("vendor.py", *args, **env)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("vendor: unpacking")]
    assert (done.returncode, done.stdout, len(lines)) == (1, "", 1), done.stderr
    assert lines[0].startswith("vendor: error: ")
    assert words in lines[0]


def test_main_refuses_upto_with_only(filled: Queue) -> None:
    done = filled.run("vendor.py", "digest", "--upto", ALPHA, "--only", BETA_PATCH)
    assert done.returncode == 2
    assert "not allowed with argument" in done.stderr
