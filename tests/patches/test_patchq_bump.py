"""scripts/patchq.py: another pin, builds of prefixes, reports, the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fakes
import patchq
import pytest
from fakes import ALPHA, BETA_PATCH, FILES, Queue

import vendor


def second_pin(q: Queue, monkeypatch: pytest.MonkeyPatch, **changed: str) -> Path:
    """Pin file of a 9.9.10 whose alpha.txt or src/beta.c is another."""
    files = {**FILES, **{{"alpha": "alpha.txt", "beta": "src/beta.c"}[key]: value for key, value in changed.items()}}
    q.sdist = fakes.make_sdist(q.root / "dist", "9.9.10", files)
    fakes.write_pin(q.root / "next-pin.txt", q.sdist, "9.9.10", fakes.tree_id(files, q.root / "scratch"))
    monkeypatch.setenv("LLAMA_DFLASH_SDIST", str(q.sdist))
    return q.root / "next-pin.txt"


def take_over(q: Queue, pin: Path) -> None:
    """The steps that rebase-onto prints at its end."""
    shutil.copyfile(pin, q.root / "vendor" / "pin.txt")
    vendor.stamp_path(q.tree).unlink()
    for name in ("llama.cpp", "llama_cpp"):
        shutil.rmtree(q.root / "vendor" / name)
        (q.root / "vendor" / "next" / name).rename(q.root / "vendor" / name)
    patchq.refresh(q.root)


def test_rebase_onto_a_pin_where_all_applies(filled: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = second_pin(filled, monkeypatch, alpha="a line above\n" + FILES["alpha.txt"])
    said = patchq.rebase_onto(pin, filled.root)
    assert said.startswith(f"all patches apply; next: copy {pin} to vendor/pin.txt")
    assert "make refresh" in said
    assert "line 10\n" not in (filled.root / "vendor" / "next" / "llama.cpp" / "alpha.txt").read_text()
    assert vendor.read_pin(filled.root).version == "9.9.9", "the pin changes by hand only"
    old = (filled.patches / ALPHA).read_bytes()
    take_over(filled, pin)
    assert b"@@ -8,7 +8,7 @@" in (filled.patches / ALPHA).read_bytes() != old
    assert patchq.check(filled.root) == []


def test_rebase_onto_merges_three_way(filled: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    # A changed context line stops a plain apply; the blobs of the old tree make it a clean merge.
    pin = second_pin(filled, monkeypatch, alpha=FILES["alpha.txt"].replace("line 7\n", "line seven\n"))
    assert "all patches apply" in patchq.rebase_onto(pin, filled.root)
    text = (filled.root / "vendor" / "next" / "llama.cpp" / "alpha.txt").read_text()
    assert "line seven\n" in text
    assert "line ten\n" in text


def test_rebase_onto_names_the_patch_and_file_in_conflict(filled: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = second_pin(filled, monkeypatch, alpha=FILES["alpha.txt"].replace("line 10\n", "line X\n"))
    next_tree = filled.root / "vendor" / "next" / "llama.cpp"
    with pytest.raises(vendor.VendorError) as e:
        patchq.rebase_onto(pin, filled.root)
    said = str(e.value)
    assert said.startswith(f"{ALPHA} conflicts on the new pin in alpha.txt; next: cd {next_tree}; resolve, git add -u; git am")
    assert f"git am --3way {filled.patches / BETA_PATCH}; copy {pin}" in said
    (next_tree / "alpha.txt").write_text(FILES["alpha.txt"].replace("line 10\n", "line ten\n"))
    with pytest.raises(vendor.VendorError, match=r"exists and may hold resolved conflicts; delete .*/next to start again"):
        patchq.rebase_onto(pin, filled.root)
    fakes.git(next_tree, "add", "-u")
    fakes.git(next_tree, "am", "--continue")
    fakes.git(next_tree, "am", "-q", "--3way", "--keep-non-patch", str(filled.patches / BETA_PATCH))
    take_over(filled, pin)
    assert b"-line X\n" in (filled.patches / ALPHA).read_bytes()
    assert patchq.check(filled.root) == []


def test_rebase_onto_drops_what_upstream_has_merged(filled: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = second_pin(filled, monkeypatch, alpha=FILES["alpha.txt"].replace("line 10\n", "line ten\n"))
    assert "all patches apply" in patchq.rebase_onto(pin, filled.root)
    take_over(filled, pin)
    assert vendor.read_series(filled.root) == [BETA_PATCH]
    assert patchq.check(filled.root) == []


def test_rebase_onto_refuses_the_wrong_distribution(filled: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = second_pin(filled, monkeypatch)
    monkeypatch.setenv("LLAMA_DFLASH_SDIST", str(filled.root / "dist" / "llama_cpp_python-9.9.9.tar.gz"))
    with pytest.raises(vendor.VendorError, match=r"sha256 is .* expected .*9\.9\.10"):
        patchq.rebase_onto(pin, filled.root)
    monkeypatch.setenv("LLAMA_DFLASH_SDIST", str(filled.sdist))
    good = pin.read_text()
    tree = vendor.read_pin(filled.root).tree
    pin.write_text(good.replace(tree, "0" * 40))
    with pytest.raises(vendor.VendorError, match=rf"tree id is {tree}, expected 0{{40}}"):
        patchq.rebase_onto(pin, filled.root)
    pin.write_text(good)
    assert "all patches apply" in patchq.rebase_onto(pin, filled.root), "a refused pin leaves nothing that must be deleted"


def test_bisect_check_runs_the_tests_of_each_prefix(filled: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen"
    body = f"with open({str(seen)!r}, 'a') as f:\n        print(os.environ['LLAMA_DFLASH_NATIVE'], file=f)\n"
    (filled.root / "tests" / "native" / "test_it.py").write_text(f"import os\ndef test_it():\n    {body}")
    monkeypatch.setattr(patchq.native, "build", lambda preset, upto: Path(f"/{preset}/{upto}"))
    assert patchq.bisect_check("exact", filled.root) == []
    assert seen.read_text().splitlines() == [f"/exact/{ALPHA}", f"/exact/{BETA_PATCH}"]


def test_bisect_check_reports_a_prefix_that_does_not_build_and_goes_on(filled: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(preset: str, upto: str) -> Path:
        if upto == ALPHA:
            raise vendor.VendorError("cmake --build exited with 1; the full log is x.log")
        return Path("/built")

    (filled.root / "tests" / "native" / "test_it.py").write_text("def test_it():\n    assert 0\n")
    monkeypatch.setattr(patchq.native, "build", build)
    assert patchq.bisect_check("exact", filled.root) == [
        f"{ALPHA}: does not build alone: cmake --build exited with 1; the full log is x.log",
        f"{BETA_PATCH}: its tests fail on the prefix that ends with it",
    ]


def test_bisect_check_needs_no_tests(filled: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    filled.edit("alpha.txt", "line 30\n", "mine\n")
    patchq.new("alpha : mine", fakes.message("alpha : mine").replace("tests/native/test_it.py", "none: a comment"), filled.root)
    patchq.refresh(filled.root)
    built = []
    monkeypatch.setattr(patchq.native, "build", lambda preset, upto: built.append(upto))
    monkeypatch.setattr(vendor, "read_series", lambda root: ["alpha-mine.patch"])
    assert patchq.bisect_check("exact", filled.root) == []
    assert built == ["alpha-mine.patch"]


def test_bisect_check_of_the_last_patches_leaves_a_record(filled: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (filled.root / "tests" / "native" / "test_it.py").write_text("def test_it():\n    pass\n")
    monkeypatch.setattr(patchq.native, "build", lambda preset, upto: Path("/built"))
    out = tmp_path / "check.json"
    assert patchq.bisect_check("exact", filled.root, since=BETA_PATCH, out=out) == []
    record = json.loads(out.read_text())
    assert [step["patch"] for step in record["steps"]] == [BETA_PATCH]
    assert record["steps"][0]["result"].startswith("1 passed")
    assert (record["preset"], record["failures"]) == ("exact", [])
    with pytest.raises(vendor.VendorError, match=r"--since other\.patch is not in patches/series"):
        patchq.bisect_check("exact", filled.root, since="other.patch")


def test_stats(filled: Queue) -> None:
    assert patchq.stats(filled.root).splitlines() == [
        f"    1 +    1 -  {ALPHA}",
        f"    2 +    1 -  {BETA_PATCH}",
        "    3 +    2 -  total: 2 of 45 patches, 5 of 10000 lines",
    ]


def test_index_escapes_cells_and_follows_the_series(filled: Queue) -> None:
    filled.edit("alpha.txt", "line 30\n", "mine\n")
    filled.commit("alpha : a|b", "Either | or; then more.")
    patchq.refresh(filled.root)
    rows = patchq.index_text(filled.root).splitlines()
    assert rows[-1] == r"| 3 | alpha : a\|b | Either \| or; | tests/native/test_it.py | not-sent | +1 -1 |"
    filled.series.write_text(f"{BETA_PATCH}\n")
    rows = patchq.index_text(filled.root).splitlines()
    assert [row.split(" | ")[1] for row in rows if row.startswith("| 1")] == ["beta : return the double"]
    patchq.write_index(filled.root)
    assert (filled.patches / "README.md").read_text().splitlines() == rows


def test_main(filled: Queue, tmp_path: Path) -> None:
    done = filled.run("patchq.py", "check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "patches: ok, 2 of 45 patches, 5 of 10000 lines\n", "")
    done = filled.run("patchq.py", "stats")
    assert (done.returncode, done.stdout) == (0, patchq.stats(filled.root) + "\n")
    filled.edit("alpha.txt", "line 30\n", "mine\n")
    done = filled.run("patchq.py", "refresh")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("patchq: error: ")
    assert "has uncommitted changes" in done.stderr
    (tmp_path / "message").write_text(fakes.message("alpha : mine"))
    done = filled.run("patchq.py", "new", "alpha : mine", "-F", str(tmp_path / "message"))
    assert (done.returncode, done.stdout) == (0, "alpha-mine.patch\n")
    done = filled.run("patchq.py", "check")
    assert (done.returncode, done.stdout) == (1, "")
    fix = "run 'make refresh' to export them, or delete the folder to drop them"
    assert done.stderr == f"patchq: vendor/llama.cpp has commits that are not exported; {fix}\n"
    done = filled.run("patchq.py", "refresh")
    assert (done.returncode, done.stdout.splitlines()) == (0, [ALPHA, BETA_PATCH, "alpha-mine.patch"])
    (filled.patches / "README.md").unlink()
    assert filled.run("patchq.py", "index").returncode == 0
    assert filled.run("patchq.py", "check").returncode == 0
    done = filled.run("patchq.py", "rebase-onto", str(tmp_path / "no-pin.txt"))
    assert done.returncode == 1
    assert done.stderr.startswith("patchq: error: ")
    assert "no-pin.txt" in done.stderr
