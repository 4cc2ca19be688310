"""The C interface of common/llama-speculative-dflash.h: a program in C, and the mirror in llama_dflash/speculative.py."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import draft_models
import pytest

from llama_dflash import speculative
from llama_dflash.bench import cases

ROOT = Path(__file__).resolve().parents[2]
STRUCTS: dict[str, Any] = {
    "llama_speculative_dflash_params": speculative.Params,
    "llama_speculative_dflash_stats": speculative.Stats,
}


@pytest.fixture(scope="session")
def header(source: Path) -> str:
    """The header without its comments."""
    return re.sub(r"//.*", "", (source / "common" / "llama-speculative-dflash.h").read_text())


@pytest.fixture(scope="session")
def libraries(exact_build: Path) -> Path:
    return exact_build / "llama_dflash" / "_vendor" / "llama_cpp" / "lib"


@pytest.fixture(scope="session")
def program(libraries: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/native/ops/c_api.c as strict C, against the build's libraries."""
    path = tmp_path_factory.mktemp("c_api") / "c-api"
    command = [
        "cc",
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        "-O1",
        str(ROOT / "tests" / "native" / "ops" / "c_api.c"),
    ]
    command += [f"-I{source / folder}" for folder in ("include", "ggml/include", "common")]
    command += [f"-L{libraries}", "-lllama-common", "-lllama", "-lggml", "-lggml-base"]
    command += [f"-Wl,-rpath,{libraries}", "-Wl,--allow-shlib-undefined", "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return path


def run(program: Path, *args: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *args], capture_output=True, text=True, timeout=900, check=False)


def prompt() -> str:
    return cases.load("tests", 1)[0].text[:300]


def test_a_host_in_c(program: Path, pair: tuple[Path, Path]) -> None:
    """Text of plain decoding by three kinds of walks, stops anywhere, states, drafts of the caller's, refusals."""
    done = run(program, *pair, prompt())
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "ok"), done.stdout + done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("done")] == [
        f"done {name}" for name in ("refusals", "text", "stops", "state", "given")
    ]
    rounds = {tuple(map(float, line.split()[1:3])): int(line.split()[3]) for line in done.stdout.splitlines() if "rounds" in line}
    assert len(rounds) == 8
    assert rounds[15, 0.0] < rounds[0, 0.0]  # a tree of 15 nodes against a chain of 15
    assert done.stderr == ""  # the host's log callback has all lines, and no library printed one


def test_a_dspark_draft(program: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Read from the file; its chains are not longer than what it was trained for."""
    draft = tmp_path / "dspark.gguf"
    draft_models.write_dspark(pair[1], draft)
    done = run(program, pair[0], draft, prompt())
    lines = done.stdout.splitlines()
    # As a model of the caller's it would need its type.
    assert [line for line in lines if line.startswith("FAILED") and "a draft model of the caller's" not in line] == [], (
        done.stderr[-3000:]
    )
    assert "done given" in lines


def declared(header: str) -> list[str]:
    """Functions of the header, without the prefix."""
    return re.findall(rf"\b{speculative.PREFIX}(\w+)\s*\(", re.sub(r"typedef[^;]*;", "", header))


def test_layout_of_the_mirror(program: Path) -> None:
    native = {name: (int(offset), int(size)) for name, offset, size in map(str.split, run(program, "abi").stdout.splitlines())}
    mirror = {}
    for name, struct in STRUCTS.items():
        mirror[name] = (0, ctypes.sizeof(struct))
        for field, *_ in struct._fields_:
            mirror[f"{name}.{field}"] = (getattr(struct, field).offset, getattr(struct, field).size)
    assert native == mirror


def test_every_field_is_compared(header: str) -> None:
    for name, struct in STRUCTS.items():
        body = re.findall(rf"struct {name} \{{(.*?)\}};", header, re.S)[0]
        assert re.findall(r"(\w+)\s*;", body) == [field for field, *_ in struct._fields_]


def test_every_function_is_exported_and_mirrored(libraries: Path, header: str) -> None:
    names = declared(header)
    assert len(names) == len(set(names)) == len(speculative.FUNCTIONS)
    assert set(names) == set(speculative.FUNCTIONS)
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(libraries / "libllama-common.so")], capture_output=True, text=True, check=True
    ).stdout
    exported = set(re.findall(rf" T {speculative.PREFIX}(\w+)$", listed, re.M))
    assert exported == set(names)  # as C names, and no others


def test_argument_counts_of_the_mirror(header: str) -> None:
    for name, (_, arguments) in speculative.FUNCTIONS.items():
        listed = re.findall(rf"\b{speculative.PREFIX}{name}\s*\(([^)]*)\)", header)[0].strip()
        n = 0 if listed == "void" else listed.count(",") + 1
        assert n == len(arguments), name


def test_a_grown_struct_is_seen(program: Path) -> None:
    """Negative control."""

    class Grown(ctypes.Structure):
        _fields_ = [*speculative.Params._fields_, ("more", ctypes.c_int32)]

    native = dict(line.split(" ", 1) for line in run(program, "abi").stdout.splitlines())
    assert int(native["llama_speculative_dflash_params"].split()[1]) != ctypes.sizeof(Grown)
