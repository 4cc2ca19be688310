"""What is in the wheel, and that it works where nothing else of the project is."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

from shell import ok, run

LIBS = ("ggml-base", "ggml", "ggml-cpu", "llama", "llama-common", "mtmd", "llama-server-impl", "llama-cli-impl")
PROGRAMS = ("llama-server", "llama-cli", "llama-bench", "llama-quantize", "llama-perplexity")
DATA = (
    "BUILD_INFO.json", "py.typed", "models/tiny-target.gguf", "models/tiny-draft.gguf", "models/tiny-draft2.gguf", "models/MODEL_CARD.md",
    "prompts/accept.json", "prompts/tests.json", "_vendor/LICENSE.llama.cpp", "_vendor/llama_cpp/LICENSE.md",
    "_vendor/llama_cpp/llama.py", "_recipe/scripts/native.py", "_recipe/vendor/pin.txt", "_recipe/patches/series",
)  # fmt: skip


def test_contents(wheel: Path) -> None:
    assert wheel.name.startswith("llama_dflash-0.1.0-py3-none-linux_")
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        modes = {i.filename: i.external_attr >> 16 for i in z.infolist()}
    for lib in LIBS:
        # Once each: a versioned copy would be stored again, and bind to a stock library of the same name.
        found = [n for n in names if Path(n).name.startswith(f"lib{lib}.so")]
        assert found == [f"llama_dflash/_vendor/llama_cpp/lib/lib{lib}.so"]
    for program in PROGRAMS:
        assert modes[f"llama_dflash/bin/{program}"] & 0o111
    for path in DATA:
        assert f"llama_dflash/{path}" in names
    tops = {n.split("/")[0] for n in names}
    assert tops == {"llama_dflash", "llama_dflash-0.1.0.dist-info"}
    assert not [n for n in names if "__pycache__" in n or n.endswith((".h", ".a", ".cmake.in"))]
    assert wheel.stat().st_size < 80 * 2**20


def test_it_completes_a_prompt_from_another_folder(fresh: Path, tmp_path: Path) -> None:
    done = run(fresh.parent / "llama-dflash", "run", "-p", "def fib(n):", "-n", "32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "mode = chain" in done.stderr


def test_doctor_finds_nothing_wrong(fresh: Path, tmp_path: Path) -> None:
    facts = json.loads(ok(fresh.parent / "llama-dflash", "doctor", "--json", cwd=tmp_path))
    assert facts["problems"] == []
    assert facts["build"]["preset"] == "native"
    assert facts["build"]["backend_reason"]
    assert facts["stock_llama_cpp"] == "none"
    assert str(fresh.parent.parent) in facts["bindings"]["path"]
    assert str(fresh.parent.parent) in facts["recipe"]


def test_llama_generates_and_dependencies_are_met(fresh: Path, tmp_path: Path) -> None:
    ok(fresh, "-m", "pip", "check")
    script = (
        "from pathlib import Path\nimport llama_dflash\nfrom llama_dflash import Llama\n"
        "model = Path(llama_dflash.__path__[0]) / 'models' / 'tiny-target.gguf'\n"
        "llm = Llama(model, n_ctx=256, verbose=False)\n"
        "print(llm.create_completion('def add(a, b):', max_tokens=8, temperature=0)['usage']['completion_tokens'])\n"
    )
    assert ok(fresh, "-c", script, cwd=tmp_path).split() == ["8"]


def test_env_points_at_the_bundled_library(fresh: Path, tmp_path: Path) -> None:
    lines = ok(fresh.parent / "llama-dflash", "env", cwd=tmp_path).splitlines()
    assert [line.split("=")[0] for line in lines] == ["export LLAMA_CPP_LIB_PATH", "export MTMD_CPP_LIB"]
    folder = ok("sh", "-c", f"{lines[0]}; printf %s \"$LLAMA_CPP_LIB_PATH\"")
    assert (Path(folder) / "libllama.so").is_file()


def test_a_preset_can_be_found_from_the_wheel_alone(fresh: Path, tmp_path: Path) -> None:
    """The recipe in the wheel has the same key as the checkout's, so `--native exact` finds the cached build.

    The version of cmake is part of the key, so both sides look for it on the same PATH.
    """
    recipe = Path(json.loads(ok(fresh.parent / "llama-dflash", "doctor", "--json", cwd=tmp_path))["recipe"])
    here = Path(__file__).resolve().parents[2]
    path = os.environ["PATH"]
    keys = [ok(fresh, root / "scripts" / "vendor.py", "key", "exact", env={"PATH": path}) for root in (recipe, here)]
    assert keys[0] == keys[1]
