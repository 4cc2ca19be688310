"""`llama_dflash.Llama` is llama-cpp-python's class over the patched library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_GENERATE = """
import json, sys
from llama_dflash import Llama
import llama_cpp
llm = Llama(sys.argv[1], n_ctx=512, verbose=False, n_threads=2, seed=1)
whole = llm.create_completion("def add(a, b):", max_tokens=24, temperature=0)
stream = "".join(c["choices"][0]["text"] for c in llm.create_completion("def add(a, b):", max_tokens=24, temperature=0, stream=True))
chat = llm.create_chat_completion([{"role": "user", "content": "def f(x):"}], max_tokens=8, temperature=0)
print(json.dumps({
    "is_llama": isinstance(llm, llama_cpp.Llama), "bindings": llama_cpp.__file__, "version": llama_cpp.__version__,
    "text": whole["choices"][0]["text"], "stream": stream, "n": whole["usage"]["completion_tokens"],
    "chat": chat["choices"][0]["message"]["content"],
}))
"""


def python(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=120)


def test_it_generates_and_is_a_llama_cpp_llama(pair: tuple[Path, Path]) -> None:
    done = python(_GENERATE, str(pair[0]))
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["is_llama"]
    assert "llama_dflash/_vendor/llama_cpp" in got["bindings"]
    assert got["version"] == "0.3.36"
    assert got["n"] == 24
    assert got["text"] == got["stream"] != ""
    assert got["chat"]


def test_a_draft_or_a_missing_file_is_refused_before_loading(pair: tuple[Path, Path]) -> None:
    for path, want in ((str(pair[1]), "is a draft"), ("/no/such.gguf", "no such file")):
        done = python("import sys; from llama_dflash import Llama; Llama(sys.argv[1])", path)
        assert done.returncode == 1
        assert "ModelFileError" in done.stderr.splitlines()[-1]
        assert want in done.stderr.splitlines()[-1]


def test_overrides_of_a_stock_install_do_not_reach_the_bundled_library(pair: tuple[Path, Path]) -> None:
    script = "import os; os.environ['LLAMA_CPP_LIB_PATH'] = '/no/such/folder'; os.environ['MTMD_CPP_LIB'] = '/no/such/folder'\n"
    script += "import llama_dflash._bindings as b; import llama_cpp.mtmd_cpp; print(os.environ['LLAMA_CPP_LIB_PATH'])"
    done = python(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "/no/such/folder"
