"""The pinned llama.cpp's converter: where it is, which tensors it takes, and running it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_dflash import _paths
from llama_dflash.convert.checkpoint import Checkpoint
from llama_dflash.errors import BuildError, DFlashError

SCRIPT = "convert_hf_to_gguf.py"
PACKAGES = ("torch", "transformers")
# An architecture of the pinned converter whose tokenizer is "none"; the target's is copied in afterwards.
NO_TOKENIZER = "Lfm25AudioTokenizer"
# As DFlashModel.filter_tensors and modify_tensors in conversion/qwen.py name a tensor before they look it up.
CLAIMS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import gguf
asked = json.load(sys.stdin)
table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DFLASH, asked["n_layer"])
out = {}
for name in asked["names"]:
    full = name if name.startswith("model.") else "model." + name
    full += ".weight" if full.endswith("_codebook") else ""
    out[name] = table.get_name(full, try_suffixes=(".weight", ".bias")) or ""
print(json.dumps(out))
"""


def source_root() -> Path:
    """The folder with the pinned converter: the checkout's vendor/llama.cpp, or the copy in the wheel.

    Raises:
        BuildError: neither is there.
    """
    import llama_dflash

    roots = [Path(root) for root in llama_dflash.__path__]
    # The checkout first, as for the build recipe.
    for folder in (*(root.parent / "vendor" / "llama.cpp" for root in roots), *(root / "_vendor" / "convert" for root in roots)):
        if (folder / SCRIPT).is_file() and (folder / "conversion").is_dir() and (folder / "gguf-py").is_dir():
            return folder
    if recipe := _paths.recipe_root():
        hint = f"run 'python {recipe / 'scripts' / 'vendor.py'} prepare' in the checkout"
    else:
        hint = "install the package again"
    raise BuildError(f"the pinned llama.cpp's {SCRIPT} is not beside the package, expected it in vendor/llama.cpp", hint)


def check_packages() -> None:
    """Raise DFlashError unless what the pinned converter imports is installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise DFlashError(
            f"converting a checkpoint needs {' and '.join(PACKAGES)}, missing here: {', '.join(missing)}",
            f"install them with '{sys.executable} -m pip install {' '.join(PACKAGES)}'",
        )


def _environment() -> dict[str, str]:
    # No byte code in vendor/llama.cpp: vendor.py takes ignored files there for work. No look at the network either.
    kept = {key: value for key, value in os.environ.items() if key != "NO_LOCAL_GGUF"}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def claims(names: Iterable[str], n_layer: int) -> dict[str, str]:
    """GGUF name that the pinned converter's table gives each tensor, empty where it has none."""
    command = [sys.executable, "-c", CLAIMS, str(source_root() / "gguf-py")]
    asked = json.dumps({"names": list(names), "n_layer": n_layer})
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise DFlashError(
            f"the pinned gguf-py does not run: {last_line(done.stderr)}, expected its table of tensors",
            "check 'numpy' and 'PyYAML'",
        )
    return dict(json.loads(done.stdout))


def last_line(text: str) -> str:
    """The last line of a program's output that is not empty: of a traceback, what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


@contextmanager
def prepared(source: Checkpoint) -> Iterator[Path]:
    """A temporary folder of the same name with the normalised configuration and links to everything else."""
    with tempfile.TemporaryDirectory(prefix="llama-dflash-") as top:
        # The converter takes the model's name from the folder's.
        folder = Path(top) / source.folder.resolve().name
        folder.mkdir()
        for path in source.folder.iterdir():
            if path.name != "config.json":
                (folder / path.name).symlink_to(path.resolve())
        (folder / "config.json").write_text(json.dumps(source.config), encoding="utf-8")
        yield folder


@contextmanager
def stand_in_target(mrope_sections: list[int]) -> Iterator[Path]:
    """A folder that tells the converter what it wants to know of a target that is a GGUF file, the tokenizer left out."""
    with tempfile.TemporaryDirectory(prefix="llama-dflash-") as top:
        config: dict[str, Any] = {"architectures": [NO_TOKENIZER]}
        if any(mrope_sections):
            config["rope_parameters"] = {"mrope_section": mrope_sections}
        (Path(top) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(top)


def run(folder: Path, out: Path, target: Path, outtype: str, verbose: bool) -> None:
    """Run the converter.

    Args:
        folder: the draft's, as `prepared` makes it.
        out: file to write.
        target: the target's folder.
        outtype: the converter's `--outtype`.
        verbose: show the converter's log on stderr.

    Raises:
        DFlashError: it failed; the message has its last line.
    """
    command = [sys.executable, str(source_root() / SCRIPT), str(folder), "--outfile", str(out)]
    command += ["--outtype", outtype, "--target-model-dir", str(target)]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # 2 is this process's own stderr, whatever sys.stderr is.
        process = subprocess.Popen(command, stdout=2 if verbose else log, stderr=subprocess.STDOUT, env=_environment())
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        log.seek(0)
        reason = "its log is above" if verbose else last_line(log.read())
    if code:
        raise DFlashError(
            f"the pinned converter failed on {folder.name} (exit code {code}): {reason}, expected a GGUF file",
            "see its log with -v",
        )
