"""Every Python example, run as a user runs it, with the tiny pair on the exact build; what it prints must hold against plain decoding."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from PIL import Image

from llama_dflash.builds import Build
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))

Pair = tuple[Path, Path]
Run = Callable[..., Any]
Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start(exact: Build, tmp_path: Path) -> Start:
    """Run examples/STEM.py in a folder that is not the checkout."""

    def start(stem: str, *args: object, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        # One thread: threads that wait for each other are slow on a machine with other work.
        one = {"LLAMA_DFLASH_NATIVE": str(exact.package.parent), "LLAMA_ARG_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
        command = [sys.executable, str(EXAMPLES / f"{stem}.py"), *map(str, args)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, **one, **env}, check=False
        )
        assert done.returncode == code, done.stderr
        return done

    return start


@pytest.fixture
def example(request: pytest.FixtureRequest, start: Start) -> Start:
    """Run the example that the test is named for."""

    def example(*args: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return start(request.function.__name__.removeprefix("test_"), *args, **kwargs)

    return example


@pytest.fixture(scope="module")
def server(exact: Build, pair: Pair) -> Iterator[Server]:
    with Server(exact, RunConfig(*pair, budget=15).checked(), extra=["-c", "2048", "-t", "1"]) as server:
        yield server


def constant(stem: str, name: str) -> Any:
    """A literal of an example, which is not imported."""
    for node in ast.parse((EXAMPLES / f"{stem}.py").read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise AssertionError(f"{stem} has no {name}")


def counts(pattern: str, text: str) -> tuple[int, ...]:
    """The numbers in the one place that fits."""
    found = re.findall(pattern, text)
    assert len(found) == 1, text
    return tuple(map(int, found[0]))


def test_every_example_has_a_test() -> None:
    tests = [name.removeprefix("test_") for name in globals() if re.match(r"test_\d", name)]
    assert sorted(tests) == STEMS
    assert len(STEMS) >= 7


def test_the_table_names_every_example() -> None:
    files = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".cpp"))
    assert re.findall(r"^\| \[(\S+)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE) == files


# --------------------------------------------------------------------------------------------------------------------
# plain decoding, in the worker of the exact build


def plain(target: Path) -> Any:
    from llama_dflash import Llama

    return Llama(target, n_ctx=2048, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False)


def plain_texts(target: Path, prompts: list[str], prefix: str, max_tokens: int) -> list[tuple[int, str]]:
    """Tokens of the prompt and the text, each from a context that knows nothing."""
    llm = plain(target)
    out = []
    for prompt in prompts:
        llm.reset()
        tokens = llm.tokenize(prefix.encode()) + llm.tokenize(prompt.encode(), add_bos=False)
        reply = llm.create_completion(tokens, max_tokens=max_tokens, temperature=0)
        out.append((len(tokens), reply["choices"][0]["text"]))
    return out


def plain_chat(target: Path, questions: list[str]) -> list[str]:
    llm = plain(target)
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        llm.reset()
        reply = llm.create_chat_completion(messages, max_tokens=64, temperature=0)
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    return [message["content"] for message in messages if message["role"] == "assistant"]


# --------------------------------------------------------------------------------------------------------------------
# the examples


def test_01_quickstart(example: Start, run: Run, pair: Pair) -> None:
    done = example()
    prompt = constant("01_quickstart", "PROMPT")
    text = run(plain_texts, pair[0], [prompt], "", 96)[0][1]
    assert done.stdout.startswith(f"{prompt}{text}\n\nmode = tree, ")
    assert done.stdout.endswith("\nthe same text as without drafts\n")
    n_tokens, n_plain, n_rounds = counts(r"(\d+) tokens: (\d+) passes of the target without drafts, (\d+) with", done.stdout)
    assert n_tokens - 1 == n_plain == 95
    assert 0 < n_rounds < n_plain / 2
    assert done.stderr == ""


def test_quickstart_fails_if_nothing_is_saved(start: Start, pair: Pair, tmp_path: Path) -> None:
    """A draft that says the opposite: the text stands, no token is accepted."""
    draft = tmp_path / "opposite.gguf"
    shutil.copy(pair[1], draft)
    norm = next(t for t in gguf.GGUFReader(draft, "r+").tensors if t.name == "output_norm.weight")
    norm.data[:] = -norm.data
    norm.data.base.flush()
    done = start("01_quickstart", pair[0], draft, code=1)
    assert "(1.00 tokens a pass)\nthe same text as without drafts\n" in done.stdout
    assert done.stderr.startswith("the drafts saved no pass")


def test_02_streaming_chat(example: Start, run: Run, pair: Pair) -> None:
    done = example()
    questions = constant("02_streaming_chat", "QUESTIONS")
    replies = run(plain_chat, pair[0], questions)
    assert done.stdout == "".join(f"> {question}\n{reply}\n" for question, reply in zip(questions, replies, strict=True))
    rounds = re.findall(r"^\[64 tokens in (\d+) rounds, (\S+) a round\]$", done.stderr, re.MULTILINE)
    assert len(rounds) == 2
    assert all(float(mean) == round(63 / int(n), 2) > 2.5 for n, mean in rounds)


def test_03_tools(example: Start) -> None:
    lines = dict(re.findall(r"^(\w+): +(.*)$", example().stdout, re.MULTILINE))
    arguments = ast.literal_eval(lines["arguments"])
    assert json.loads(lines["call"].removeprefix("search(").removesuffix(")")) == arguments
    schema = constant("03_tools", "PARAMETERS")
    types = {"string": "str", "integer": "int", "boolean": "bool"}
    assert list(arguments) == list(schema["properties"]) == schema["required"]
    for name, wanted in schema["properties"].items():
        value: Any = arguments[name]
        assert type(value).__name__ == types[wanted["type"]]
        assert value in wanted.get("enum", [value])
        if "minLength" in wanted:
            assert wanted["minLength"] <= len(value) <= wanted["maxLength"]
    assert lines["result"].startswith(f"{arguments['limit']} {arguments['language']} packages with {arguments['words']!r}, ")
    n_rounds, n_tokens = counts(r"(\d+) for (\d+) tokens", lines["rounds"])
    assert 0 < n_rounds < n_tokens - 1


def test_04_batch_files(example: Start, run: Run, pair: Pair, tmp_path: Path) -> None:
    prompts = {"add": "def add(a, b):\n", "fib": "def fib(n: int) -> int:\n", "stack": "class Stack:\n"}
    (tmp_path / "prompts").mkdir()
    for name, prompt in prompts.items():
        (tmp_path / "prompts" / f"{name}.txt").write_text(prompt)
    lines = [json.dumps({"name": name, "prompt": prompt}) for name, prompt in prompts.items()]
    (tmp_path / "prompts.jsonl").write_text("\n\n".join(lines) + "\n")

    example("prompts", "folder.jsonl")
    example("prompts.jsonl", "lines.jsonl", pair[0], pair[1].with_name("tiny-draft2.gguf"))  # another draft: the same texts
    prefix = constant("04_batch_files", "PREFIX")
    plain_ones = run(plain_texts, pair[0], list(prompts.values()), prefix, 64)
    n_prefix = plain_ones[0][0] - run(plain_texts, pair[0], ["def add(a, b):\n"], "", 1)[0][0]
    n_rounds = []
    for file in ("folder.jsonl", "lines.jsonl"):
        results = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        assert [(r["name"], r["prompt"]) for r in results] == list(prompts.items())
        assert [(r["prompt_tokens"], r["text"]) for r in results] == plain_ones
        for r in results:
            assert r["tokens"] == 64
            assert r["tokens_per_round"] == round(63 / r["rounds"], 2) > 1
            assert 0 < r["evaluated"] == r["prompt_tokens"] - n_prefix
        n_rounds.append([r["rounds"] for r in results])
    assert n_rounds[0] != n_rounds[1]


def check_client(example: Start, server: Server, path: str, text: Callable[[Any], str]) -> None:
    """What the client printed is what a plain request gets; then the same with a server of its own."""
    question = constant("05_openai_client", "QUESTION")
    assert constant("06_anthropic_client", "QUESTION") == question
    body = {"model": "any", "max_tokens": 64, "temperature": 0, "messages": [{"role": "user", "content": question}]}
    reply = server.client.post(path, body)
    for own, args in enumerate((("--url", server.client.url), ())):
        done = example(*args)
        if own:  # of the installed build, whose last digits may differ
            assert done.stderr.startswith("[mode = tree, ")
            assert len(done.stdout) > 20
        else:
            assert done.stdout == text(reply) + "\n"
        n_tokens, n_rounds = counts(r"\n\[(\d+) tokens in (\d+) rounds\]\n", done.stderr)
        assert n_tokens == reply["timings"]["predicted_n"] == 64
        assert 0 < n_rounds < n_tokens / 2


@pytest.mark.server
def test_05_openai_client(example: Start, server: Server) -> None:
    check_client(example, server, "/v1/chat/completions", lambda reply: reply["choices"][0]["message"]["content"])


@pytest.mark.server
def test_06_anthropic_client(example: Start, server: Server) -> None:
    check_client(example, server, "/v1/messages", lambda reply: "".join(block["text"] for block in reply["content"]))


def test_07_acceptance_plot(example: Start, tmp_path: Path) -> None:
    done = example("plot.png")
    rounds = []
    for name in ("chain", "tree of 15 nodes"):
        n_tokens, n_rounds = counts(rf"(?m)^{name}: (\d+) tokens in (\d+) rounds, ", done.stdout)
        accepted = re.findall(rf"(?m)^{name}: .*\n  accepted at depth 1, 2, \.\.: ([\d ]+) of {n_rounds}$", done.stdout)[
            0
        ].split()
        assert n_rounds + sum(map(int, accepted)) == n_tokens - 5
        rounds.append(n_rounds)
    assert rounds[1] < rounds[0]
    with Image.open(tmp_path / "plot.png") as image:
        assert image.format == "PNG"
        assert min(image.size) > 300
        colours = image.convert("RGB").getcolors(1 << 24)
    # Two curves: the first two colours of matplotlib are there.
    assert {(31, 119, 180), (255, 127, 14)} <= {colour for _, colour in colours}


@pytest.mark.parametrize(
    ("stem", "package"),
    [("05_openai_client", "openai"), ("06_anthropic_client", "anthropic"), ("07_acceptance_plot", "matplotlib")],
)
def test_a_missing_package_is_named(start: Start, tmp_path: Path, stem: str, package: str) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError\n")
    done = start(stem, code=1, PYTHONPATH=str(tmp_path))
    assert (done.stdout, done.stderr) == ("", f"this example needs the package {package}: pip install {package}\n")
