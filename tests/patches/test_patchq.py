"""scripts/patchq.py: commits to files and back, byte for byte; every broken queue is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fakes
import patch_lint
import patchq
import pytest
from fakes import ALPHA, BETA_PATCH, SERIES_HEAD, Queue

import vendor

GROUPS = ["# texts: first group", ALPHA, "# code: second group", BETA_PATCH]


def series_lines(q: Queue) -> list[str]:
    return q.series.read_text().removeprefix(SERIES_HEAD).splitlines()


def reword(q: Queue, subject: str) -> None:
    """Give the last commit another subject."""
    fakes.git(q.tree, "commit", "-q", "--amend", "-m", fakes.message(subject))


def test_new_and_refresh_write_patch_series_and_index(empty: Queue) -> None:
    empty.prepare()
    empty.edit("alpha.txt", "line 10\n", "line ten\n")
    (empty.tree / "new.txt").write_text("new\n")
    assert empty.commit("alpha : count from zero") == ALPHA
    assert patchq.refresh(empty.root) == [ALPHA]
    assert empty.series.read_text() == f"{SERIES_HEAD}{ALPHA}\n"
    content = (empty.patches / ALPHA).read_text()
    assert content.startswith(f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: llama-dflash <patches@llama-dflash.invalid>\n")
    assert "\nSubject: alpha : count from zero\n" in content
    assert "\n+line ten\n" in content
    assert "\n+++ b/new.txt\n" in content
    row = "| 1 | alpha : count from zero | The pin does the old thing today. | tests/native/test_it.py | not-sent | +2 -1 |"
    assert row in (empty.patches / "README.md").read_text().splitlines()
    assert patchq.check(empty.root) == []


def test_new_without_changes_is_refused(filled: Queue) -> None:
    with pytest.raises(vendor.VendorError, match=r"has no changes; edit it first, then run patchq new"):
        patchq.new("alpha : nothing", None, filled.root)


@pytest.mark.parametrize("given", [None, "Why.\n", "alpha : mine\n\nWhy.\n"])
def test_new_puts_the_subject_in_front_once(filled: Queue, given: str | None) -> None:
    filled.edit("alpha.txt", "line 30\n", "mine\n")
    patchq.new("alpha : mine", given, filled.root)
    written = fakes.git(filled.tree, "log", "-1", "--format=%B")
    assert written.count("alpha : mine") == 1
    assert written.startswith("alpha : mine\n\n" + ("TODO what" if given is None else "Why."))


def test_refresh_twice_gives_the_same_bytes(filled: Queue) -> None:
    first, head = filled.snapshot(), fakes.git(filled.tree, "rev-parse", "HEAD")
    patchq.refresh(filled.root)
    assert filled.snapshot() == first
    assert fakes.git(filled.tree, "rev-parse", "HEAD") == head


def test_a_clean_tree_exports_the_same_bytes(filled: Queue, tmp_path: Path) -> None:
    clean = tmp_path / "clean" / "llama.cpp"
    vendor.prepare(clean, vendor.read_series(filled.root), filled.root, filled.env)
    assert patchq.export(clean) == {name: (filled.patches / name).read_bytes() for name in (ALPHA, BETA_PATCH)}


def test_refresh_makes_head_what_a_fresh_clone_gets(filled: Queue, tmp_path: Path) -> None:
    fakes.git(filled.tree, "commit", "-q", "--amend", "--no-edit", "--date", "2030-01-01T00:00:00Z")
    patchq.refresh(filled.root)
    vendor.prepare(tmp_path / "clone" / "llama.cpp", [ALPHA, BETA_PATCH], filled.root, filled.env)
    assert fakes.git(filled.tree, "rev-parse", "HEAD") == fakes.git(tmp_path / "clone" / "llama.cpp", "rev-parse", "HEAD")
    assert filled.prepare() == vendor.digest([ALPHA, BETA_PATCH], filled.root)


def test_odd_contents_survive_the_round_trip(filled: Queue) -> None:
    (filled.tree / "bin.dat").write_bytes(bytes(range(256)) * 3)
    (filled.tree / "no newline.txt").write_text("a\nb")
    (filled.tree / "run.sh").chmod(0o644)
    fakes.git(filled.tree, "mv", "src/gamma.c", "src/delta.c")
    filled.commit("odd : [tag] binary, mode, rename")
    tree = fakes.git(filled.tree, "rev-parse", "HEAD^{tree}")
    name = patchq.refresh(filled.root)[-1]
    assert name == "odd-tag-binary-mode-rename.patch"
    assert fakes.git(filled.tree, "rev-parse", "HEAD^{tree}") == tree
    assert patchq.check(filled.root) == []


def test_refresh_keeps_comments_and_follows_the_order(filled: Queue) -> None:
    assert series_lines(filled) == GROUPS
    heads = fakes.git(filled.tree, "rev-list", "--reverse", "base..HEAD").splitlines()
    fakes.git(filled.tree, "reset", "-q", "--hard", "base")
    fakes.git(filled.tree, "cherry-pick", *reversed(heads))
    assert patchq.refresh(filled.root) == [BETA_PATCH, ALPHA]
    assert series_lines(filled) == [*GROUPS[2:], *GROUPS[:2]]
    assert patchq.check(filled.root) == []


def test_refresh_renames_when_the_subject_changed(filled: Queue) -> None:
    filled.series.write_text(filled.series.read_text().replace(BETA_PATCH, f"{BETA_PATCH}  # inline") + "# at the end\n")
    reword(filled, "beta : return twice")
    assert patchq.refresh(filled.root) == [ALPHA, "beta-return-twice.patch"]
    assert sorted(p.name for p in filled.patches.glob("*.patch")) == [ALPHA, "beta-return-twice.patch"]
    assert series_lines(filled) == [*GROUPS[:3], "beta-return-twice.patch  # inline", "# at the end"]
    assert "beta : return twice" in (filled.patches / "README.md").read_text()


def test_refresh_removes_dropped_patches(filled: Queue) -> None:
    fakes.git(filled.tree, "reset", "-q", "--hard", "HEAD~1")
    assert patchq.refresh(filled.root) == [ALPHA]
    assert not (filled.patches / BETA_PATCH).exists()
    assert series_lines(filled) == GROUPS[:2]
    assert patchq.check(filled.root) == []


@pytest.mark.parametrize(
    ("old", "names", "expected"),
    [
        ("# g\na\nb\n# h\nc\n", "b c", "# g\nb\n# h\nc\n"),  # the first of a group goes, the group stays
        ("# g\na\n# h\nb\n", "b", "# h\nb\n"),  # an empty group goes
        ("# g\na\n# h\nb\n", "a n b", "# g\na\nn\n# h\nb\n"),  # a new patch ends the group before it
        ("# g\na\nb\n# h\nc\n", "x c", "# g\nx\n# h\nc\n"),  # renamed, and the next one dropped
        ("# g\na\nb\nc\n", "c", "# g\nc\n"),
        ("# g\na\n", "", ""),
    ],
)
def test_write_series_keeps_group_comments(empty: Queue, old: str, names: str, expected: str) -> None:
    empty.series.write_text(f"# head, line 1\n# line 2\n\n{old}")
    patchq.write_series(names.split(), empty.root)
    assert empty.series.read_text() == f"# head, line 1\n# line 2\n\n{expected}"


def test_refresh_refuses_uncommitted_changes(filled: Queue) -> None:
    before = filled.snapshot()
    filled.edit("alpha.txt", "line 30\n", "mine\n")
    with pytest.raises(vendor.VendorError, match=r"has uncommitted changes; commit them \(patchq new"):
        patchq.refresh(filled.root)
    assert filled.snapshot() == before


def test_refresh_refuses_new_files_that_git_ignores(filled: Queue) -> None:
    before = filled.snapshot()
    (filled.tree / "src" / "mine.o").write_text("mine\n")
    filled.edit("alpha.txt", "line 30\n", "mine\n")
    filled.commit("alpha : mine")
    with pytest.raises(vendor.VendorError, match=r"files that git ignores: src/mine\.o; force-add"):
        patchq.refresh(filled.root)
    assert (filled.tree / "src" / "mine.o").is_file()
    assert filled.snapshot() == before


@pytest.mark.parametrize("upto", [ALPHA, "base"])
def test_refresh_of_a_prefix_does_not_delete_the_rest(filled: Queue, upto: str) -> None:
    before = filled.snapshot()
    filled.prepare(upto=upto)
    with pytest.raises(vendor.VendorError, match=r"was made from series \w{16}, expected \w{16} of patches/; run 'make vendor'"):
        patchq.refresh(filled.root)
    assert filled.snapshot() == before


def test_refresh_does_not_revert_patches_that_came_from_elsewhere(filled: Queue) -> None:
    path = filled.patches / BETA_PATCH
    path.write_bytes(path.read_bytes().replace(b"return the double\n", b"return the double\n\nPulled.", 1))
    before = path.read_bytes()
    with pytest.raises(vendor.VendorError, match="run 'make vendor'"):
        patchq.refresh(filled.root)
    assert path.read_bytes() == before
    filled.prepare()
    patchq.refresh(filled.root)
    assert b"Pulled." in path.read_bytes()
    assert patchq.check(filled.root) == []


def test_a_patch_mended_after_a_failed_prepare_is_exported(filled: Queue) -> None:
    path = filled.patches / ALPHA
    path.write_bytes(path.read_bytes().replace(b"\n line 13\n", b"\n line 14\n"))
    with pytest.raises(vendor.VendorError, match="does not apply"):
        filled.prepare()
    filled.edit("alpha.txt", "line 10\n", "line ten\n")
    filled.commit("alpha : count from zero")
    with pytest.raises(vendor.VendorError, match="was made from series partial, expected"):
        patchq.refresh(filled.root)  # the second patch is still missing
    fakes.git(filled.tree, "am", "-q", "--3way", "--keep-non-patch", str(filled.patches / BETA_PATCH))
    assert patchq.refresh(filled.root) == [ALPHA, BETA_PATCH]
    assert patchq.check(filled.root) == []


def test_two_commits_with_one_subject_are_refused(filled: Queue) -> None:
    before = filled.snapshot()
    filled.edit("alpha.txt", "line 30\n", "mine\n")
    filled.commit("alpha : Count from -- zero")
    with pytest.raises(vendor.VendorError, match=rf"two commits have the file name {ALPHA}; reword one subject"):
        patchq.refresh(filled.root)
    assert filled.snapshot() == before


def test_a_merge_that_the_files_cannot_hold_is_reported(filled: Queue) -> None:
    fakes.git(filled.tree, "checkout", "-q", "-b", "side", "HEAD~1")
    filled.edit("alpha.txt", "line 30\n", "side\n")
    filled.commit("alpha : side")
    fakes.git(filled.tree, "checkout", "-q", "-b", "top", vendor.read_stamp(filled.tree)[1])
    fakes.git(filled.tree, "merge", "-q", "--no-commit", "side")
    filled.edit("alpha.txt", "line 20\n", "only in the merge\n")
    fakes.git(filled.tree, "commit", "-q", "-a", "-m", "merge")
    lost = fakes.git(filled.tree, "rev-parse", "HEAD")
    with pytest.raises(vendor.VendorError, match=rf"another tree than commit {lost[:12]}, expected the same; put the difference"):
        patchq.refresh(filled.root)


def test_check_passes_on_a_good_queue_and_leaves_it_alone(filled: Queue) -> None:
    before, head = filled.snapshot(), fakes.git(filled.tree, "rev-parse", "HEAD")
    assert patchq.check(filled.root) == []
    assert (filled.snapshot(), fakes.git(filled.tree, "rev-parse", "HEAD")) == (before, head)


def replace(name: str, old: bytes, new: bytes) -> Callable[[Queue], None]:
    def edit(q: Queue) -> None:
        data = (q.patches / name).read_bytes()
        assert data.count(old) == 1
        (q.patches / name).write_bytes(data.replace(old, new))

    return edit


def commit_text(line: str, message: str | None = fakes.WHY) -> Callable[[Queue], None]:
    def commit(q: Queue) -> None:
        q.edit("alpha.txt", "line 30\n", line)
        patchq.new("alpha : more", None if message is None else fakes.message("alpha : more", message), q.root)
        patchq.refresh(q.root)

    return commit


def unexported(q: Queue) -> None:
    q.edit("alpha.txt", "line 30\n", "mine\n")
    q.commit("alpha : mine")


HAND = f"{ALPHA}: the file is not what its commit exports; expected equal bytes"
BROKEN = {
    "edited by hand": (replace(ALPHA, b"+line ten", b"+line TEN"), [HAND]),
    "header by hand": (
        replace(ALPHA, b"Subject: alpha", b"Subject: [PATCH] alpha"),
        ["subject is", "file name differs", "README.md is stale", "is not what its commit exports"],
    ),
    "at an offset": (replace(ALPHA, b"@@ -7,7 +7,7 @@", b"@@ -9,7 +9,7 @@"), [HAND]),
    "with fuzz": (replace(ALPHA, b"\n line 13\n", b"\n line 14\n"), [f"{ALPHA} does not apply: error: patch failed: alpha.txt"]),
    "not in series": (lambda q: q.series.write_text(f"{ALPHA}\n"), [f"patches/{BETA_PATCH} is not in patches/series"]),
    "not in folder": (lambda q: (q.patches / ALPHA).unlink(), [f"patches/series names {ALPHA}, which is not in patches/"]),
    "stale index": (replace("README.md", b"| 2 |", b"| 3 |"), ["patches/README.md is stale"]),
    "no index": (lambda q: (q.patches / "README.md").unlink(), ["patches/README.md is stale"]),
    "TODO header": (commit_text("x\n", None), ["no description", "'Test:' is TODO", "'Blast-radius:' is TODO"]),
    "not ASCII": (commit_text("caf\u00e9\n"), ["added line is not ASCII: 'caf\\xe9'"]),
    "trailing whitespace": (commit_text("x \n"), ["added line ends in whitespace: 'x '"]),
    "over size": (commit_text("x\n" * 400), ["alpha-more.patch: 401 changed lines; expected at most 400, or a 'Size:' field"]),
    "unexported": (unexported, ["vendor/llama.cpp has commits that are not exported; run 'make refresh'"]),
    "uncommitted": (lambda q: q.edit("alpha.txt", "line 30\n", "mine\n"), ["vendor/llama.cpp has uncommitted changes"]),
    "no distribution": (lambda q: q.sdist.unlink(), ["no such file; expected llama-cpp-python 9.9.9"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_check_refuses(filled: Queue, case: str) -> None:
    break_it, words = BROKEN[case]
    break_it(filled)
    found = patchq.check(filled.root)
    assert len(found) == len(words), found
    for line, expected in zip(found, words, strict=True):
        assert expected in line


def test_check_counts_patches_and_lines(filled: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_lint, "MAX_TOTAL_LINES", 4)
    assert patchq.check(filled.root) == ["the series changes 5 lines; expected at most 4: drop some"]
    monkeypatch.setattr(patch_lint, "MAX_PATCHES", 1)
    assert patchq.check(filled.root) == ["2 patches; expected at most 1: join or drop some"]
