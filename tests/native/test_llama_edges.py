"""`Llama` with drafts where something is unusual: requests, options, interruptions, wrong use."""

from __future__ import annotations

import gc
import pickle
import random
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import gguf
import numpy as np
import pytest
from llama_pairs import PROMPTS, SPECS, Pair, Run, assert_same_state, drafting, essence, new, plain
from tree_lib import worker

from llama_dflash import builds

CODE = "def fib(n):\n    if n < 2:\n        return n\n    return"
GREEDY: dict[str, Any] = {"max_tokens": 32, "temperature": 0}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FUNCTION = {"name": "look_up", "parameters": PARAMETERS}
REQUESTS: dict[str, dict[str, Any]] = {
    "echo": {"echo": True},
    "echo stream": {"echo": True, "stream": True},
    "suffix": {"suffix": "\nend"},
    "suffix stream": {"suffix": "\nend", "stream": True},
    "no stop": {"stop": None},
    "one token": {"prompt": [300]},
    "only the bos": {"prompt": [4092]},
    "ids": {"prompt": list(range(300, 340))},
    "more than a batch": {"prompt": "def f(a, b):\n    return a + b\n" * 40},
    "bytes of characters": {
        "max_tokens": 80,
        "temperature": 3.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 4,
        "stream": True,
    },
    "characters": {"prompt": "# naïve ☺ 日本語\nx = '☺☺☺", "max_tokens": 60, "stream": True},
    "mirostat 1": {"temperature": 0.8, "mirostat_mode": 1, "seed": 2},
    "bias of strings": {"logit_bias": {"10": 5.0, "300": -100}},
}
CHATS: dict[str, dict[str, Any]] = {
    "functions": {"functions": [FUNCTION], "function_call": {"name": "look_up"}},
    "tool_choice auto": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto"},
    "tool_choice none": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "none"},
    "stops": {"stop": ["e"], "stream": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "a batch that a tree just fits": {"n_batch": 16},
    "small batches": {"n_batch": 17},
    "small ubatches": {"n_ubatch": 20},
    "no flash attention": {"flash_attn": False},
    "quantised cache": {"type_k": 8, "type_v": 8},
    "no mmap": {"use_mmap": False},
    "rope": {"rope_freq_base": 20000.0, "rope_freq_scale": 0.5},
    "yarn": {"rope_scaling_type": 2, "yarn_orig_ctx": 512, "n_ctx": 2048},
    "the model's context": {"n_ctx": 0},
    "few last tokens": {"last_n_tokens_size": 3},
}


# --------------------------------------------------------------------------------------------------------------------
# in the worker


def both(pair: Pair, ask: Callable[[Any], Any], **options: Any) -> Any:
    """What both of a new pair answer, closed again; it must be the same."""
    made = [new(pair, spec, **options) for spec in (None, {"tree": 15})]
    want, got = (ask(llm) for llm in made)
    assert got == want
    assert_same_state(*made)
    for llm in made:
        llm.close()
    return got


def answer(llm: Any, prompt: Any = CODE, **options: Any) -> Any:
    found = llm.create_completion(prompt, **{**GREEDY, **options})
    return essence(list(found) if options.get("stream") else found)


def check_requests(pair: Pair) -> None:
    a, b = plain(pair), drafting(pair, "tree")
    for name, request in REQUESTS.items():
        assert answer(b, **request) == answer(a, **request), name
        assert_same_state(a, b)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]
    for name, request in CHATS.items():
        want, got = (llm.create_chat_completion(messages, **GREEDY, **request) for llm in (a, b))
        if "stream" in request:
            want, got = list(want), list(got)
        assert essence(got) == essence(want), name
    for llm in (a, b):
        with pytest.raises(ValueError, match="exceed context window of 1024"):
            llm.create_completion([300] * 1024)
        with pytest.raises(RuntimeError, match="embedding=True"):
            llm.create_embedding("hi")
        with pytest.raises(RuntimeError):
            llm.create_completion([1, 2, 99999999])
    assert answer(a) == answer(b)


def check_options(pair: Pair) -> None:
    for options in OPTIONS.values():
        both(
            pair, lambda llm: [answer(llm), answer(llm, prompt=CODE * 6, temperature=0.9, seed=3, repeat_penalty=1.2)], **options
        )


def check_tokenizer_and_handler(pair: Pair) -> None:
    from llama_dflash._bindings import llama_cpp

    class Bytes(llama_cpp.llama.BaseLlamaTokenizer):  # type: ignore[misc]
        def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
            return list(text)

        def detokenize(self, tokens: Any, prev_tokens: Any = None, special: bool = False) -> bytes:
            return bytes(t % 128 for t in tokens)

    both(pair, answer, tokenizer=Bytes())

    def handler(*, llama: Any, messages: Any, **_: Any) -> Any:
        return llama.create_completion(messages[0]["content"], **GREEDY)

    both(pair, lambda llm: essence(llm.create_chat_completion([{"role": "user", "content": CODE}])), chat_handler=handler)


def check_lora(pair: Pair) -> None:
    """The target is another one than the draft was made for: fewer drafts are right, and the text is the target's."""
    rank, rng = 4, np.random.default_rng(3)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "lora.gguf")
        writer = gguf.GGUFWriter(path, "qwen35")
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", float(rank))
        for tensor in gguf.GGUFReader(pair[0]).tensors:
            # Not of the MTP layer: it is not loaded, and an adapter of it ends the process in the unpatched pin too.
            if re.fullmatch(r"blk\.[0-7]\.(ffn_down|attn_q|ssm_out|attn_qkv)\.weight", tensor.name):
                for part, shape in (("a", (rank, tensor.shape[0])), ("b", (tensor.shape[1], rank))):
                    writer.add_tensor(f"{tensor.name}.lora_{part}", 0.05 * rng.standard_normal(shape, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        got = both(pair, lambda llm: [answer(llm), answer(llm, temperature=0.9, seed=3)], lora_path=path, lora_scale=3.0)
    assert got[0] != answer(plain(pair))


def check_caches(pair: Pair) -> None:
    from llama_dflash._bindings import llama_cpp

    def ask(cache: Any) -> Callable[[Any], Any]:
        def run(llm: Any) -> Any:
            llm.set_cache(cache)
            return [answer(llm, prompt=p, stream=s) for p, s in ((CODE, False), (PROMPTS[1], True)) for _ in range(2)]

        return run

    for make in (llama_cpp.LlamaRAMCache, lambda: llama_cpp.LlamaRAMCache(capacity_bytes=100)):
        both(pair, lambda llm, make=make: ask(make())(llm))
    with tempfile.TemporaryDirectory() as folder:
        cache = llama_cpp.LlamaDiskCache(folder)
        both(pair, ask(cache))  # what one wrote the other reads
        cache.cache.close()


def check_no_tokens(pair: Pair) -> None:
    """`llama_cpp.Llama` has an assertion; sampling without logits would end the process."""
    from llama_dflash.errors import UsageError

    b = new(pair, {"tree": 15})
    for ask in (lambda: b.create_completion(""), lambda: b.create_completion([]), lambda: next(b.generate([], reset=False))):
        with pytest.raises(UsageError, match="the prompt has no tokens"):
            ask()
    assert answer(b) == answer(plain(pair))


def check_bad_guesses(pair: Pair) -> None:
    """Of a callable or sent: an error that says what is wrong, and the object is as good as before."""
    from llama_dflash.speculative import SpeculativeError

    want = answer(plain(pair))
    b = new(pair, None, draft_model=lambda ids: [99999999])
    for guess, kind in (([99999999], SpeculativeError), ([-3], SpeculativeError), (None, TypeError), (5, TypeError)):
        b.draft_model = lambda ids, guess=guess: guess
        with pytest.raises(kind):
            answer(b)
        b.draft_model = lambda ids: ids[-2:].astype(float)  # floats are taken, as by llama_cpp.Llama
        assert answer(b) == want
    c = drafting(pair, "tree")
    for guess, kind in (([99999999], SpeculativeError), (["a"], ValueError), (5, TypeError)):
        tokens = c.generate(c.tokenize(CODE.encode()), temp=0.0)
        next(tokens)
        with pytest.raises(kind):
            tokens.send(guess)
        assert answer(c) == want


class Interrupt:
    """Ctrl-C in front of the nth line of what changes a context, `llama_cpp`'s share included."""

    def __init__(self, n: int) -> None:
        self.n_left = n

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, _event: str, _arg: object) -> Any:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        ours = file.endswith(("llama_dflash/llama.py", "llama_dflash/speculative.py"))
        if ours or (file.endswith("llama_cpp/llama.py") and name in ("eval", "reset", "load_state")):
            return self._line
        return None

    def _line(self, _frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            self.n_left -= 1
            if self.n_left == 0:
                raise KeyboardInterrupt
        return self._line


def check_interrupts(pair: Pair, spec: str) -> None:
    from llama_dflash.speculative import SpeculativeError

    rng = random.Random(1)
    b = new(pair, SPECS[spec])
    want = []
    for prompt in PROMPTS:
        fresh = plain(pair)
        fresh.reset()
        want.append(answer(fresh, prompt=prompt, max_tokens=9))
    answer(b, prompt=PROMPTS[0], max_tokens=9)
    saved, text = b.save_state(), answer(b, prompt=[*b._input_ids.tolist(), 9], max_tokens=9)
    after = b._input_ids.tolist()
    n_cut = n_unknown = 0
    for step in range(60):
        which = rng.randrange(4)
        with Interrupt(1 + 8 * step + rng.randrange(8)):
            try:
                answer(b, prompt=PROMPTS[which], max_tokens=9)
            except KeyboardInterrupt:
                n_cut += 1
        how = step % 3
        if how == 0:
            b.load_state(saved)
            assert answer(b, prompt=after[: len(saved.input_ids[: saved.n_tokens]) + 1], max_tokens=9) == text
        elif how == 1 and b._is_known:
            b.eval([5])
        elif how == 1:
            n_unknown += 1
            with pytest.raises(SpeculativeError, match=r"cut short; call reset\(\)"):
                b.eval([5])
        which = rng.randrange(4)
        assert answer(b, prompt=PROMPTS[which], max_tokens=9) == want[which]
    assert n_cut > 50
    assert 5 <= n_unknown <= 20


def check_lifetime(pair: Pair) -> None:
    """Closed in a round, twice, and by nobody; made again from its pickle."""
    from llama_dflash.errors import UsageError

    for spec in (None, {"tree": 15}):
        llm = new(pair, spec)
        state = llm.save_state()
        chunks = llm.create_completion(PROMPTS[0], **GREEDY, stream=True)
        tokens = new(pair, spec).generate([5, 6, 7])
        for _ in range(4):
            next(chunks)
            next(tokens)
        llm.close()
        llm.close()
        for call in (
            *(llm.reset, llm.save_state, lambda llm=llm: llm.eval([5]), lambda llm=llm: next(llm.generate([5]))),
            *(lambda llm=llm, state=state: llm.load_state(state), lambda llm=llm: llm.create_completion("a")),
        ):
            with pytest.raises(UsageError, match="the Llama is closed"):
                call()
        del chunks, llm, tokens
        gc.collect()
    llm = new(pair, {"tree": 15, "n_max": 7}, logits_all=True, n_ctx=256)
    copy = pickle.loads(pickle.dumps(llm))
    assert copy.spec_mode == llm.spec_mode
    results = [answer(x, logprobs=2) for x in (llm, copy)]
    assert results[0] == results[1]


def check_a_full_context(pair: Pair) -> None:
    """Not in exact arithmetic, where the holes of trees are not filled again."""
    b = new(pair, {"tree": 15}, n_ctx=256)
    for limit in (None, 0, -1, 4000):
        found = b.create_completion(CODE, max_tokens=limit, temperature=0)
        assert found["usage"]["total_tokens"] == 256
        assert found["choices"][0]["finish_reason"] == "length"
    assert 4 * b.spec_stats.n_rounds < b.spec_stats.n_tokens
    with pytest.raises(RuntimeError, match="the context of 256 tokens is full; make it larger"):
        list(b.generate([5, 6, 7], temp=0.0))
    assert answer(b) == answer(plain(pair))


def failure(pair: Pair, **kwargs: Any) -> tuple[list[str], str]:
    """The classes and the message of what making a `Llama` raises."""
    from llama_dflash import Llama
    from llama_dflash.speculative import SpecConfig

    if "spec" in kwargs and isinstance(kwargs["spec"], dict):
        kwargs["spec"] = SpecConfig(**kwargs["spec"])
    for name in ("draft_model_path", "draft_model"):
        if kwargs.get(name) == "a Llama":
            kwargs[name] = plain(pair)
    path = kwargs.pop("path", pair[0])
    try:
        Llama(path, verbose=False, **{"n_ctx": 256, **kwargs})
    except Exception as e:
        return [c.__name__ for c in type(e).__mro__], str(e)
    return [], ""


# --------------------------------------------------------------------------------------------------------------------
# the tests


@pytest.mark.parametrize(
    "check",
    [
        *(check_requests, check_options, check_tokenizer_and_handler, check_lora, check_caches),
        *(check_no_tokens, check_bad_guesses, check_lifetime),
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_check(run: Run, pair: Pair, check: Callable[[Pair], None]) -> None:
    run(check, pair)


@pytest.mark.parametrize("spec", ["chain", "tree"])
def test_interrupts(run: Run, pair: Pair, spec: str) -> None:
    run(check_interrupts, pair, spec)


def test_a_full_context(pair: Pair) -> None:
    worker(builds.resolve(builds.INSTALLED).package).run(check_a_full_context, pair)


def test_wrong_use_is_a_type_error(run: Run, pair: Pair) -> None:
    for kwargs, words in [
        ({"draft_model_path": "a Llama"}, "draft_model_path is a Llama, expected the path"),
        ({"draft_model": "a Llama"}, "draft_model is a Llama, expected the path"),
        ({"path": str(pair[1])}, "is a draft (architecture 'dflash'), expected a target model"),
        ({"path": 5}, "model_path is a int"),
        ({"draft_model_path": 5}, "draft_model_path is a int"),
        ({"draft_model": str(pair[1])}, "a draft's file goes into draft_model_path"),
        ({"draft_model": print, "draft_model_path": str(pair[1])}, "both given"),
        ({"spec": {"tree": 15}}, "spec is given without a draft"),
        ({"draft_model_path": str(pair[1]), "spec": 15}, "spec is a int, expected a SpecConfig"),
        ({"draft_model_path": str(pair[1]), "spec": {"tree": "15"}}, "tree is '15', expected a whole number"),
        ({"draft_model_path": str(pair[1]), "spec": {"n_max": 2.5}}, "n_max is 2.5, expected a whole number"),
    ]:
        names, message = run(failure, pair, **kwargs)
        assert "TypeError" in names, (kwargs, names, message)
        assert words in message


def test_what_cannot_be_had_is_refused_with_the_reason(run: Run, pair: Pair) -> None:
    draft = {"draft_model_path": str(pair[1])}
    for kwargs, kind, words in [
        ({"draft_model_path": "/no/such.gguf"}, "ModelFileError", "no such file"),
        ({"draft_model_path": str(pair[0])}, "ModelFileError", "expected a draft"),
        ({**draft, "spec": {"tree": 0}}, "UsageError", "budget is 0"),
        ({**draft, "spec": {"n_max": 99}}, "UsageError", "n_max is 99"),
        ({**draft, "spec": {"n_threads": 0}}, "UsageError", "n_threads is 0"),
        ({**draft, "spec": {"type_k": "f17"}}, "UsageError", "type_k is 'f17'"),
        ({**draft, "spec": {"tree": 4, "rollback": "snapshot"}}, "UsageError", "rollback is snapshot"),
        ({**draft, "spec": {"rollback": "snapshot"}}, "SpeculativeError", "n_rs_seq"),
        ({**draft, "spec": {"tree": 15}, "n_batch": 8}, "SpeculativeError", "n_nodes_max = 16, expected 1 to 8"),
        ({**draft, "vocab_only": True}, "SpeculativeError", "the target has 0 layers"),
        ({**draft, "embedding": True}, "RuntimeError", "the context is for embeddings"),
        ({"draft_model": print, "spec": {"tree": 15}}, "UsageError", "there is no draft file"),
    ]:
        names, message = run(failure, pair, **kwargs)
        assert kind in names, (kwargs, names, message)
        assert words in message
