"""Finding builds and the package's own files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import llama_dflash
from llama_dflash import _paths, builds
from llama_dflash.builds import Build
from llama_dflash.errors import BuildError, UsageError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The package's search path as two empty folders, as an editable install has them."""
    roots = [tmp_path / "site-packages" / "llama_dflash", tmp_path / "checkout" / "llama_dflash"]
    for root in roots:
        root.mkdir(parents=True)
    monkeypatch.setattr(llama_dflash, "__path__", [str(root) for root in roots])
    return roots


def add_recipe(folder: Path) -> None:
    for name in ("vendor/pin.txt", "scripts/native.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_the_installed_build() -> None:
    build = builds.resolve("installed")
    assert build.program("llama-server").name == "llama-server"
    assert os.access(build.program("llama-cli"), os.X_OK)
    assert set(build.summary) == {"series_digest", "pin", "backend", "compiler", "preset"}


@pytest.mark.parametrize("part", ["", "llama_dflash"])
def test_a_folder(make_build: Callable[..., Build], part: str) -> None:
    package = make_build(preset="asan").package
    build = builds.resolve(str(package.parent / part))
    assert build.package == package.resolve()
    assert build.summary["preset"] == "asan"


def test_a_folder_under_home(make_build: Callable[..., Build], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_build(name="mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert builds.resolve("~/mine").package == (tmp_path / "mine" / "llama_dflash").resolve()


@pytest.mark.parametrize("native", ["nonsense", "", "Exact", "~no-such-user/x", "x" * 300])
def test_nonsense_is_refused(native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="neither a preset nor the folder of a finished build") as caught:
        builds.resolve(native)
    assert all(preset in caught.value.hint for preset in ("installed", *builds.PRESETS))


def test_a_folder_without_build_info_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a preset nor the folder"):
        builds.resolve(str(tmp_path))


@pytest.mark.parametrize("content", ["", "{", "[1]", "3", "{}", '{"pin": "x"}', "\xff"])
def test_a_damaged_build_info_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "BUILD_INFO.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BuildError, match=r"BUILD_INFO.json .*expected the (folder|file) of a finished build"):
        builds.resolve(str(tmp_path))


@pytest.mark.parametrize("key", builds.INFO_KEYS)
def test_build_info_lacking_a_key_is_refused(make_build: Callable[..., Build], key: str) -> None:
    path = make_build().package / "BUILD_INFO.json"
    info = json.loads(path.read_text())
    del info[key]
    path.write_text(json.dumps(info))
    with pytest.raises(BuildError, match=f"lacks {key};"):
        builds.read_build(path.parent)


@pytest.mark.parametrize(("value", "is_exact"), [("ON", True), ("OFF", False)])
def test_is_exact(make_build: Callable[..., Build], value: str, is_exact: bool) -> None:
    assert make_build(exact=value).is_exact is is_exact


def test_a_missing_program_is_named(make_build: Callable[..., Build]) -> None:
    with pytest.raises(BuildError, match=r"bin/llama-server is missing"):
        make_build().program("llama-server")


def test_a_preset_without_a_recipe_is_refused(package: list[Path]) -> None:
    with pytest.raises(BuildError, match="--native exact has to be compiled, and the build recipe is not beside"):
        builds.resolve("exact")


def test_a_preset_is_built_by_the_recipe(package: list[Path], make_build: Callable[..., Build]) -> None:
    made = make_build(preset="exact").package
    checkout = package[1].parent
    add_recipe(checkout)
    script = f"import sys\nassert sys.argv[1:] == ['build', 'exact']\nprint('a line before')\nprint({str(made.parent)!r})\n"
    (checkout / "scripts" / "native.py").write_text(script)
    assert builds.resolve("exact").package == made


def test_a_preset_that_cannot_be_built(package: list[Path]) -> None:
    add_recipe(package[1].parent)
    (package[1].parent / "scripts" / "native.py").write_text("raise SystemExit(3)")
    with pytest.raises(BuildError, match="preset cpu could not be built"):
        builds.resolve("cpu")


def test_find_takes_the_first_root_that_has_the_file(package: list[Path]) -> None:
    (package[1] / "x.json").touch()
    assert _paths.find("x.json") == package[1] / "x.json"
    (package[0] / "x.json").touch()
    assert _paths.find("x.json") == package[0] / "x.json"


def test_find_says_where_it_looked(package: list[Path]) -> None:
    with pytest.raises(BuildError, match=r"bin/nothing is not in .*site-packages.*checkout"):
        _paths.find("bin/nothing")


def test_recipe_root(package: list[Path]) -> None:
    assert _paths.recipe_root() is None
    copy = package[0] / "_recipe"
    add_recipe(copy)
    assert _paths.recipe_root() == copy
    add_recipe(package[1].parent)
    assert _paths.recipe_root() == package[1].parent


def test_recipe_root_needs_all_of_it(package: list[Path]) -> None:
    add_recipe(package[1].parent)
    (package[1].parent / "vendor" / "pin.txt").unlink()
    assert _paths.recipe_root() is None


def test_the_checkout_is_a_recipe() -> None:
    root = _paths.recipe_root()
    assert root is not None
    assert (root / "scripts" / "native.py").is_file()
