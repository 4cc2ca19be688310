"""scripts/patch_lint.py: reading patch files; each rule is broken on purpose, one at a time."""

from __future__ import annotations

from pathlib import Path

import fakes
import patch_lint
import patchq
import pytest
from fakes import ALPHA, BETA_PATCH, Queue

SUBJECT = "mod : do one thing"
FIELDS = {
    "Test": "tests/native/test_it.py",
    "Perf": "none intended",
    "Blast-radius": "none",
    "Origin": "ours",
    "Upstream": "not-sent",
}
DIFF = """diff --git a/src/x.c b/src/x.c
index 1111111111111111111111111111111111111111..2222222222222222222222222222222222222222 100644
--- a/src/x.c
+++ b/src/x.c
@@ -1,3 +1,3 @@ int x(void)
 one
-two
+2
 three
"""


def text(subject: str = SUBJECT, body: str = "It was so; now it is not.", diff: str = DIFF, **fields: str | None) -> str:
    values = {**FIELDS, **{key.replace("_", "-"): value for key, value in fields.items()}}
    header = "".join(f"{key}: {value}\n" for key, value in values.items() if value is not None)
    mail = f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: A <a@b.invalid>\nDate: Sat, 1 Jan 2000 00:00:00 +0000\n"
    return f"{mail}Subject: {subject}\n\n{body}\n\n{header}\n{diff}"


def with_added(*lines: str) -> str:
    longer = DIFF.replace("@@ -1,3 +1,3 @@", f"@@ -1,3 +1,{3 + len(lines)} @@")
    return longer.replace("+2\n", "+2\n" + "".join(f"+{line}\n" for line in lines))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "native").mkdir(parents=True)
    (tmp_path / "tests" / "native" / "test_it.py").touch()
    return tmp_path


def lint(root: Path, content: str, name: str = "mod-do-one-thing.patch") -> list[str]:
    (root / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    return patch_lint.problems(patch_lint.parse(root / name), root)


def test_parse_reads_what_format_patch_writes(filled: Queue) -> None:
    patch = patch_lint.parse(filled.patches / BETA_PATCH)
    assert patch.name == BETA_PATCH
    assert patch.subject == "beta : return the double"
    assert patch.body == fakes.WHY
    assert patch.why == "The pin does the old thing today."
    assert patch.fields == {**FIELDS, "Blast-radius": "the fake tree only"}
    assert patch.files == ["src/beta.c", "src/gamma.c"]
    assert patch.added == ["    return 2*x;", "int gamma(void);"]
    assert (patch.n_removed, patch.n_lines) == (1, 3)


def test_parse_joins_folded_subjects_and_fields(filled: Queue) -> None:
    subject = "alpha : " + " ".join(["word"] * 20)
    fields = "Test: tests/native/test_it.py;\n  tests/native/test_two.py\n  on the CPU\nPerf: none\nSize: a table\n  of numbers\n"
    filled.edit("alpha.txt", "line 20\n", "line twenty\n")
    patchq.new(subject, f"Why, in one line:\nand another.\n\n{fields}", filled.root)
    patchq.refresh(filled.root)
    path = filled.patches / patch_lint.file_name(subject)
    assert "\n word" in path.read_text(), "git folds the subject; else this test shows nothing"
    patch = patch_lint.parse(path)
    assert patch.subject == subject
    assert patch.why == "Why, in one line: and another."
    assert patch.fields["Test"] == "tests/native/test_it.py; tests/native/test_two.py on the CPU"
    assert patch.fields["Size"] == "a table of numbers"
    assert patch_lint.test_paths(patch) == ["tests/native/test_it.py", "tests/native/test_two.py"]


def test_parse_counts_lines_that_look_like_headers(filled: Queue) -> None:
    (filled.tree / "q.sql").write_text("-- old comment\nselect 1;\n")
    filled.commit("sql : add a query")
    (filled.tree / "q.sql").write_text("++ i;\n@@ -1 +1 @@\nselect 1;\ndiff --git a/x b/x")
    filled.commit("sql : mend the query")
    (filled.tree / "q.sql").write_text("one\ntwo\n")
    filled.commit("sql : end the last line")
    patchq.refresh(filled.root)
    patch = patch_lint.parse(filled.patches / "sql-mend-the-query.patch")
    assert patch.added == ["++ i;", "@@ -1 +1 @@", "diff --git a/x b/x"]
    assert patch.n_removed == 1
    assert patch.files == ["q.sql"]
    patch = patch_lint.parse(filled.patches / "sql-end-the-last-line.patch")
    assert (patch.added, patch.n_removed) == (["one", "two"], 4)


def test_parse_survives_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    content = text(diff=DIFF.replace(" one", " caf\udce9").replace("+2", "+na\udcefve"))
    assert "added line is not ASCII" in "".join(lint(tmp_path, content))


def test_parse_of_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "x.patch").write_text("")
    patch = patch_lint.parse(tmp_path / "x.patch")
    assert (patch.subject, patch.body, patch.fields, patch.files, patch.n_lines) == ("", "", {}, [], 0)


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("server : count rounds", "server-count-rounds.patch"),
        ("ggml-cpu : exact builds (AVX2)", "ggml-cpu-exact-builds-avx2.patch"),
        ("a/b.c, d : --flag_x", "a-b-c-d-flag-x.patch"),
    ],
)
def test_file_name(subject: str, name: str) -> None:
    assert patch_lint.file_name(subject) == name


def test_a_good_patch_has_no_problem(root: Path) -> None:
    assert lint(root, text()) == []


@pytest.mark.parametrize("n", [399, 400])
def test_size_is_asked_for_above_the_limit_only(root: Path, n: int) -> None:
    content = text(diff=with_added(*["x"] * (n - 1)))  # and the two lines of DIFF
    words = "mod-do-one-thing.patch: 401 changed lines; expected at most 400, or a 'Size:' field with the reason"
    assert lint(root, content) == ([] if n == 399 else [words])
    assert lint(root, text(diff=with_added(*["x"] * n), Size="a table")) == []


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("do one thing", "subject is 'do one thing'; expected '<module> : <title>'"),
        ("mod: do one thing", "subject is 'mod: do one thing'; expected"),
        ("fixup! mod : do one thing", "subject is 'fixup! mod : do one thing'; expected"),
        ("mod : do this and that", "has 'and'; expected one concern"),
    ],
)
def test_subject_rules(root: Path, subject: str, words: str) -> None:
    found = lint(root, text(subject=subject), patch_lint.file_name(subject))
    assert len(found) == 1
    assert words in found[0]


def test_a_word_that_holds_and_is_no_second_concern(root: Path) -> None:
    subject = "mod : expand the band"
    assert lint(root, text(subject=subject), patch_lint.file_name(subject)) == []


def test_name_rule(root: Path) -> None:
    found = lint(root, text(), "0001-mod-do-one-thing.patch")
    words = "file name differs from the subject's; expected mod-do-one-thing.patch: run 'make refresh'"
    assert found == [f"0001-mod-do-one-thing.patch: {words}"]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"body": ""}, "no description; expected what the pin does today"),
        ({"body": "TODO what the pin does"}, "no description; expected what the pin does today"),
        ({"Test": "tests/native/gone.py::test_x"}, "Test: names tests/native/gone.py, which does not exist"),
        ({"diff": ""}, "changes no file; expected a diff"),
        ({"diff": with_added("x ")}, "added line ends in whitespace: 'x '"),
        ({"diff": with_added("\t")}, "added line ends in whitespace: '\\t'"),
        ({"diff": with_added("++ x ")}, "added line ends in whitespace: '++ x '"),
        ({"diff": with_added("x\r")}, "added line ends in whitespace: 'x\\r'"),
        ({"diff": with_added("caf\u00e9")}, "added line is not ASCII: 'caf\\xe9'"),
    ],
)
def test_each_rule_alone(root: Path, broken: dict, words: str) -> None:
    found = lint(root, text(**broken))
    assert len(found) == 1, found
    assert words in found[0]


def test_context_and_removed_lines_are_not_ours(root: Path) -> None:
    assert lint(root, text(diff=DIFF.replace(" one", " caf\u00e9 ").replace("-two", "-tw\u00f6 "))) == []


@pytest.mark.parametrize("key", list(FIELDS))
@pytest.mark.parametrize(("value", "words"), [(None, "is missing; expected a value"), ("TODO", "is TODO; expected a value")])
def test_each_field_is_needed(root: Path, key: str, value: str | None, words: str) -> None:
    found = lint(root, text(**{key.replace("-", "_"): value}))
    assert found == [f"mod-do-one-thing.patch: header field '{key}:' {words} (docs/patches.md)"]


def test_series_problems() -> None:
    assert patch_lint.series_problems(["a", "b"], ["a", "b"]) == []
    absent = "patches/series names b, which is not in patches/; remove the line or restore the file"
    assert patch_lint.series_problems(["a", "b"], ["a"]) == [absent]
    extra = "patches/b is not in patches/series; add it there or delete the file"
    assert patch_lint.series_problems(["a"], ["a", "b"]) == [extra]
    twice = "patches/series names a more than once; expected once: remove a line"
    assert patch_lint.series_problems(["a", "a"], ["a"]) == [twice]
    many = [f"{i}.patch" for i in range(46)]
    assert patch_lint.series_problems(many[:45], many[:45]) == []
    assert patch_lint.series_problems(many, many) == ["46 patches; expected at most 45: join or drop some"]


def test_the_queue_of_the_tests_is_good(filled: Queue) -> None:
    for name in (ALPHA, BETA_PATCH):
        assert patch_lint.problems(patch_lint.parse(filled.patches / name), filled.root) == []
