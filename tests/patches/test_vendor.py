"""scripts/vendor.py: verify, unpack, apply; nothing is skipped in silence and no work is lost."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import stat
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path

import fakes
import pytest
from fakes import ALPHA, BETA_PATCH, FILES, Queue

import vendor


def pin_line(q: Queue, old: str, new: str) -> None:
    path = q.root / "vendor" / "pin.txt"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_prepare_from_nothing_unpacks_and_applies(filled: Queue) -> None:
    shutil.rmtree(filled.tree)
    filled.prepare()
    assert "line ten\n" in (filled.tree / "alpha.txt").read_text()
    assert (filled.tree / "src" / "kept.o").read_text() == FILES["src/kept.o"]
    assert (filled.tree / "run.sh").stat().st_mode & stat.S_IXUSR
    assert not (filled.tree / "alpha.txt").stat().st_mode & stat.S_IXUSR
    assert (filled.tree / ".git").is_dir(), "the submodule marker is a file and must not be unpacked"
    assert (filled.tree.parent / "llama_cpp" / "__init__.py").read_text() == '__version__ = "9.9.9"\n'
    assert (filled.tree.parent / "llama_cpp" / "LICENSE.md").read_text() == "MIT\n"
    assert not list(filled.tree.parent.rglob("setup.py"))
    subjects = fakes.git(filled.tree, "log", "--format=%s", "--reverse", "base..HEAD").splitlines()
    assert subjects == ["alpha : count from zero", "beta : return the double"]
    assert fakes.git(filled.tree, "status", "--porcelain", "--ignored") == ""


def test_prepare_twice_does_nothing_the_second_time(filled: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    first = filled.prepare()
    for name in ("unpack", "apply_patches", "fetch"):
        monkeypatch.setattr(vendor, name, lambda *a, name=name: pytest.fail(f"{name} ran"))
    assert filled.prepare() == first
    filled.series.write_text(f"{ALPHA}\n")
    with pytest.raises(pytest.fail.Exception, match="apply_patches ran"):
        filled.prepare()


def test_head_is_the_same_in_two_unpackings(filled: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    names = vendor.read_series(filled.root)
    heads = set()
    for name in ("one", "two"):
        vendor.prepare(tmp_path / name / "llama.cpp", names, filled.root, filled.env)
        heads.add(fakes.git(tmp_path / name / "llama.cpp", "rev-parse", "HEAD"))
        monkeypatch.setenv("GIT_COMMITTER_DATE", "2031-01-01T00:00:00Z")
    assert heads == {fakes.git(filled.tree, "rev-parse", "HEAD")}


def test_a_changed_series_is_applied_to_the_tree_at_hand(filled: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "unpack", lambda *a: pytest.fail("unpacked again"))
    filled.prepare(upto=ALPHA)
    assert (filled.tree / "src" / "beta.c").read_text() == fakes.BETA
    assert not (filled.tree / "src" / "gamma.c").exists()
    filled.prepare(upto="base")
    assert fakes.git(filled.tree, "rev-parse", "HEAD") == fakes.git(filled.tree, "rev-parse", "base")


def test_a_new_pin_unpacks_again(filled: Queue) -> None:
    files = {**FILES, "new.txt": "new\n"}
    sdist = fakes.make_sdist(filled.root / "dist", "9.9.10", files)
    fakes.write_pin(filled.root / "vendor" / "pin.txt", sdist, "9.9.10", fakes.tree_id(files, filled.root / "scratch"))
    filled.sdist = sdist
    filled.prepare()
    assert (filled.tree / "new.txt").is_file()
    assert "9.9.10" in (filled.tree.parent / "llama_cpp" / "__init__.py").read_text()


def test_a_new_pin_that_cannot_be_fetched_leaves_the_tree_protected(filled: Queue) -> None:
    pin_line(filled, "==9.9.9", "==9.9.10")
    pin_line(filled, vendor.read_pin(filled.root).sha256, "0" * 64)
    filled.sdist = filled.root / "dist" / "gone.tar.gz"
    with pytest.raises(vendor.VendorError, match="no such file"):
        filled.prepare()
    filled.edit("alpha.txt", "line 30\n", "mine\n")
    with pytest.raises(vendor.VendorError, match="uncommitted changes"):
        filled.prepare()


def test_new_bindings_on_the_same_llama_cpp_are_unpacked(filled: Queue) -> None:
    sdist = fakes.make_sdist(filled.root / "dist", "9.9.10", FILES)
    fakes.write_pin(filled.root / "vendor" / "pin.txt", sdist, "9.9.10", vendor.read_pin(filled.root).tree)
    filled.sdist = sdist
    filled.prepare()
    assert "9.9.10" in (filled.tree.parent / "llama_cpp" / "__init__.py").read_text()


def test_lost_bindings_are_unpacked_again(filled: Queue) -> None:
    shutil.rmtree(filled.tree.parent / "llama_cpp")
    filled.prepare()
    assert (filled.tree.parent / "llama_cpp" / "__init__.py").is_file()


def test_wrong_sha256_is_refused_before_anything_is_removed(filled: Queue) -> None:
    true = hashlib.sha256(filled.sdist.read_bytes()).hexdigest()
    pin_line(filled, true, "0" * 64)
    with pytest.raises(vendor.VendorError, match=rf"sha256 is {true}, expected 0{{64}}; point LLAMA_DFLASH_SDIST at .* 9\.9\.9"):
        vendor.fetch(filled.root, filled.env)
    shutil.rmtree(filled.tree / ".git")
    with pytest.raises(vendor.VendorError, match="sha256 is"):
        filled.prepare()
    assert "line ten\n" in (filled.tree / "alpha.txt").read_text()


def test_a_broken_download_in_the_cache_is_refused(empty: Queue, tmp_path: Path) -> None:
    sha256 = vendor.read_pin(empty.root).sha256
    cached = tmp_path / "store" / "sdist" / f"{sha256}.tar.gz"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"half a file")
    with pytest.raises(vendor.VendorError, match=rf"{cached}: sha256 is .*, expected {sha256}; delete the file"):
        vendor.fetch(empty.root, {"LLAMA_DFLASH_CACHE": str(tmp_path / "store")})
    shutil.copyfile(empty.sdist, cached)
    assert vendor.fetch(empty.root, {"LLAMA_DFLASH_CACHE": str(tmp_path / "store")}) == cached


def test_wrong_tree_id_is_refused_and_stays_refused(empty: Queue) -> None:
    tree = vendor.read_pin(empty.root).tree
    pin_line(empty, tree, "0" * 40)
    for _ in range(2):
        with pytest.raises(vendor.VendorError, match=rf"tree id is {tree}, expected 0{{40}}.*vendor/pin\.txt"):
            empty.prepare()
    pin_line(empty, "0" * 40, tree)
    assert empty.prepare()


@pytest.mark.parametrize("line", ["# upstream-commit", "# tree", "llama-cpp-python"])
def test_a_pin_without_a_field_is_refused(empty: Queue, line: str) -> None:
    path = empty.root / "vendor" / "pin.txt"
    path.write_text("".join(x for x in path.read_text().splitlines(keepends=True) if not x.startswith(line)))
    with pytest.raises(vendor.VendorError, match=r"pin\.txt: expected .*--hash=sha256.*# upstream-commit:.*# tree:"):
        vendor.read_pin(empty.root)


def test_missing_sdist_is_refused(empty: Queue) -> None:
    empty.sdist.unlink()
    with pytest.raises(vendor.VendorError, match=r"LLAMA_DFLASH_SDIST=.*9\.9\.9\.tar\.gz: no such file; expected .* 9\.9\.9"):
        empty.prepare()
    assert not empty.tree.exists()


def test_a_failed_download_says_how_to_go_on(empty: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = vendor.subprocess.CompletedProcess([], 1, "", "retrying\nERROR: No matching distribution\n")
    monkeypatch.setattr(vendor.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(vendor.VendorError, match=r"could not fetch .* 9\.9\.9: ERROR: No matching.*LLAMA_DFLASH_SDIST"):
        vendor.fetch(empty.root, {"LLAMA_DFLASH_CACHE": str(tmp_path / "store")})
    assert list((tmp_path / "store" / "sdist").iterdir()) == []


@pytest.mark.parametrize("target", ["other", "same"])
def test_uncommitted_changes_are_refused_and_kept(filled: Queue, target: str) -> None:
    filled.edit("alpha.txt", "line 30\n", "mine\n")
    with pytest.raises(vendor.VendorError, match=r"has uncommitted changes; run 'make refresh'.* or delete the folder"):
        filled.prepare(upto=ALPHA if target == "other" else None)
    assert "mine\n" in (filled.tree / "alpha.txt").read_text()


def test_new_files_that_git_ignores_are_refused_and_kept(filled: Queue) -> None:
    (filled.tree / "src" / "mine.o").write_text("mine\n")
    for target in (ALPHA, None):
        with pytest.raises(vendor.VendorError, match=r"has files that git ignores: src/mine\.o; force-add them with 'git add -f' or"):
            filled.prepare(upto=target)
    assert (filled.tree / "src" / "mine.o").read_text() == "mine\n"
    (filled.tree / "src" / "mine.o").unlink()
    assert filled.prepare()


def test_unexported_commits_are_refused_and_kept(filled: Queue) -> None:
    filled.edit("alpha.txt", "line 30\n", "mine\n")
    filled.commit("alpha : mine")
    with pytest.raises(vendor.VendorError, match=r"has commits that are not exported; run 'make refresh'"):
        filled.prepare()
    assert fakes.git(filled.tree, "log", "-1", "--format=%s") == "alpha : mine"


def test_series_that_names_an_absent_patch_is_refused(filled: Queue) -> None:
    filled.series.write_text(f"{ALPHA}\nnot-there.patch\n")
    before = fakes.git(filled.tree, "rev-parse", "HEAD")
    with pytest.raises(vendor.VendorError, match=r"series names not-there\.patch, which is not in patches/; remove the line"):
        filled.prepare()
    assert fakes.git(filled.tree, "rev-parse", "HEAD") == before


def test_a_patch_that_does_not_apply_is_named_and_the_tree_stays_usable(filled: Queue) -> None:
    path = filled.patches / BETA_PATCH
    good = path.read_bytes()
    path.write_bytes(good.replace(b"-    return x;", b"-    return y;"))
    with pytest.raises(vendor.VendorError, match=rf"{BETA_PATCH} does not apply: .*src/beta\.c.*docs/patches\.md"):
        filled.prepare()
    assert fakes.git(filled.tree, "log", "-1", "--format=%s") == "alpha : count from zero"
    assert fakes.git(filled.tree, "status", "--porcelain") == ""
    assert not (filled.tree / ".git" / "rebase-apply").exists()
    # What is committed on top to mend the patch is work.
    (filled.tree / "mended.txt").write_text("mended\n")
    filled.commit("beta : mended")
    with pytest.raises(vendor.VendorError, match="commits that are not exported"):
        filled.prepare()
    fakes.git(filled.tree, "reset", "-q", "--hard", "HEAD~1")
    path.write_bytes(good)
    filled.prepare()
    assert (filled.tree / "src" / "gamma.c").is_file()


def test_git_refuses_a_folder_without_its_own_repository(filled: Queue) -> None:
    fakes.git(filled.root, "init", "-q")
    shutil.rmtree(filled.tree / ".git")
    with pytest.raises(vendor.VendorError, match=r"llama\.cpp has no \.git of its own; delete it and run 'make vendor'"):
        vendor.git(filled.tree, "apply", str(filled.patches / ALPHA))


def test_git_does_not_climb_out_of_a_broken_repository(filled: Queue) -> None:
    fakes.git(filled.root, "init", "-q")
    shutil.rmtree(filled.tree / ".git")
    (filled.tree / ".git").mkdir()
    with pytest.raises(vendor.VendorError, match=r"git status failed in .*not a git repository"):
        vendor.git(filled.tree, "status")


def test_prepare_inside_another_repository_changes_the_files(filled: Queue) -> None:
    fakes.git(filled.root, "init", "-q")
    fakes.git(filled.root, "add", "-A")
    fakes.git(filled.root, "commit", "-q", "-m", "ours")
    ours = fakes.git(filled.root, "rev-parse", "HEAD")
    shutil.rmtree(filled.tree / ".git")
    (filled.tree / "alpha.txt").write_text(FILES["alpha.txt"])
    filled.prepare()
    assert "line ten\n" in (filled.tree / "alpha.txt").read_text()
    assert fakes.git(filled.tree, "rev-parse", "--show-toplevel") == str(filled.tree.resolve())
    assert fakes.git(filled.root, "rev-parse", "HEAD") == ours


def test_prepare_inside_a_git_hook_leaves_the_hooks_repository_alone(filled: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.git(filled.root, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(filled.root / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(filled.root / ".git" / "index"))
    shutil.rmtree(filled.tree)
    filled.prepare()
    assert "line ten\n" in (filled.tree / "alpha.txt").read_text()
    assert fakes.git(filled.tree, "rev-parse", "--show-toplevel") == str(filled.tree.resolve())
    assert fakes.git(filled.root, "for-each-ref") == ""


@pytest.mark.parametrize("with_git", [False, True])
def test_a_folder_that_is_not_ours_is_refused_and_kept(filled: Queue, tmp_path: Path, with_git: bool) -> None:
    dest = tmp_path / "home" / "thesis"
    dest.mkdir(parents=True)
    (dest / "chapter.txt").write_text("three years\n")
    if with_git:
        fakes.git(dest, "init", "-q")
    with pytest.raises(vendor.VendorError, match=r"thesis is not empty and has no \.thesis\.stamp beside it.*another --dest"):
        vendor.prepare(dest, [ALPHA], filled.root, filled.env)
    assert (dest / "chapter.txt").read_text() == "three years\n"


@pytest.mark.parametrize("state", ["unpacking -", "applying -", ""])
def test_a_killed_prepare_is_done_again(filled: Queue, tmp_path: Path, state: str) -> None:
    dest = tmp_path / "killed" / "llama.cpp"
    shutil.copytree(filled.tree, dest)
    fakes.git(dest, "checkout", "-q", "base")
    (dest / "alpha.txt").write_text("half")
    vendor.stamp_path(dest).write_text(f"{state}\n")
    if not state:
        with pytest.raises(vendor.VendorError, match="delete it or give another --dest"):
            vendor.prepare(dest, [ALPHA], filled.root, filled.env)
        return
    vendor.prepare(dest, [ALPHA], filled.root, filled.env)
    assert "line ten\n" in (dest / "alpha.txt").read_text()


def test_what_a_killed_am_left_does_not_blame_a_good_patch(filled: Queue) -> None:
    left = filled.tree / ".git" / "rebase-apply"
    left.mkdir()
    (left / "next").write_text("1\n")
    (left / "last").write_text("2\n")
    (filled.tree / ".git" / "index.lock").touch()
    vendor.write_stamp(filled.tree, "applying", "-")
    filled.prepare()
    assert "line ten\n" in (filled.tree / "alpha.txt").read_text()
    assert not left.exists()


def test_prepare_waits_for_another(filled: Queue) -> None:
    cmd = [sys.executable, str(filled.root / "scripts" / "vendor.py"), "prepare", "--upto", ALPHA]
    with vendor.locked(filled.tree.parent / ".llama.cpp.lock"):
        other = subprocess.Popen(cmd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=1)
        assert (filled.tree / "src" / "gamma.c").is_file()
    assert other.communicate(timeout=60)[1].endswith(b"digest " + vendor.digest([ALPHA], filled.root).encode() + b"\n")
    assert not (filled.tree / "src" / "gamma.c").exists()


def test_python_without_tar_filters_unpacks_the_same(filled: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    plain = tarfile.TarFile.extract

    def extract(self: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:  # no 'filter', as in 3.11.2
        with warnings.catch_warnings(action="ignore") if sys.version_info >= (3, 12) else contextlib.nullcontext():
            plain(self, member, path)

    monkeypatch.setattr(tarfile.TarFile, "extract", extract)
    vendor.unpack(tmp_path / "x" / "llama.cpp", tmp_path / "x" / "llama_cpp", filled.root, filled.env)
    assert (tmp_path / "x" / "llama.cpp" / "src" / "beta.c").read_text() == fakes.BETA
    assert (tmp_path / "x" / "llama_cpp" / "__init__.py").is_file()


@pytest.mark.parametrize("name", ["../escaped.txt", "/tmp/escaped.txt", "src/../../escaped.txt"])
@pytest.mark.parametrize("filters", [True, False])
def test_members_that_leave_the_folder_are_refused(
    empty: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, filters: bool
) -> None:
    if not filters:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    sdist = fakes.make_sdist(tmp_path / "dist", "9.9.9", {name: "out\n"})
    fakes.write_pin(empty.root / "vendor" / "pin.txt", sdist, "9.9.9", "0" * 40)
    empty.sdist = sdist
    with pytest.raises(vendor.VendorError, match=r"correct (--hash|'# tree:') in vendor/pin\.txt"):
        empty.prepare()
    assert not list(empty.tree.parent.glob("escaped.txt"))


def test_without_git_nothing_is_unpacked(empty: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(vendor.VendorError, match=r"^git is not on PATH.*: install git"):
        empty.prepare()
    assert not empty.tree.exists()


def test_a_users_git_configuration_does_not_matter(empty: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As git < 2.32 has it, which ignores GIT_CONFIG_GLOBAL: the configuration comes in by another way.
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "post-commit").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (hooks / "post-commit").chmod(0o755)
    (tmp_path / "config").write_text(f"[commit]\ngpgsign = true\n[gpg]\nprogram = false\n[core]\nhooksPath = {hooks}\n")
    monkeypatch.setattr(vendor.os, "devnull", str(tmp_path / "config"))
    assert empty.prepare()
    assert not (tmp_path / "ran").exists()


def test_git_errors_are_one_line_and_name_the_command(filled: Queue) -> None:
    with pytest.raises(vendor.VendorError, match=r"^git rev-parse failed in \S+: fatal") as e:
        vendor.git(filled.tree, "-c", "core.abbrev=40", "rev-parse", "no-such-name")
    assert "\n" not in str(e.value)
