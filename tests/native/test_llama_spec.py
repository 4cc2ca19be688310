"""`Llama` with drafts gives what `Llama` without them gives, in fewer passes; all of it runs in the worker."""

from __future__ import annotations

import gc
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tree_models
from llama_pairs import PROMPTS, SPECS, Pair, Run, assert_same_state, drafting, essence, new, plain

from llama_dflash.builds import Build
from llama_dflash.client import Sampling
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

N_TEXT = 40
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "defaults": {"seed": 7},
    "hot": {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 8},
    "penalties": {"repeat_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2, "seed": 9},
    "typical": {"typical_p": 0.8, "min_p": 0.1, "seed": 10},
    "mirostat": {"mirostat_mode": 2, "seed": 11},
    "no temperature": {"temperature": -1.0, "seed": 12},
    "bias": {"temperature": 0, "logit_bias": {40: 2.0, 300: -5.0}},
}


# --------------------------------------------------------------------------------------------------------------------
# in the worker


def check_texts(pair: Pair, spec: str, sampling: str) -> None:
    a, b = plain(pair), drafting(pair, spec)
    b.reset_spec_stats()
    for prompt in PROMPTS:
        want, got = (llm.create_completion(prompt, max_tokens=N_TEXT, **SAMPLINGS[sampling]) for llm in (a, b))
        assert essence(got) == essence(want)
        assert_same_state(a, b)
    stats = b.spec_stats
    assert stats.n_generations == len(PROMPTS)
    assert stats.n_rounds + stats.n_accepted == stats.n_tokens - stats.n_generations
    assert sum(stats.accepted_per_depth) == stats.n_accepted <= stats.n_nodes
    assert stats.n_rounds < stats.n_tokens - stats.n_generations
    assert stats.mean_accepted > 1
    if "tree" in spec:
        assert "mode = tree" in b.spec_mode
        assert stats.n_nodes > 0.9 * stats.n_draft_rounds * SPECS[spec]["tree"]


def check_limits(pair: Pair) -> None:
    a, b = plain(pair), drafting(pair, "tree")
    for n in (*range(1, 9), 15, 16, 17, 33):
        for sampling in ("greedy", "defaults"):
            want, got = (llm.create_completion(PROMPTS[0], max_tokens=n, **SAMPLINGS[sampling]) for llm in (a, b))
            assert essence(got) == essence(want)
            assert got["usage"]["completion_tokens"] == n
            assert_same_state(a, b)
    for limit in (None, -1, 4000):  # all that the context has room for; the exact build does not refill the holes of a tree
        small = [new(pair, spec, n_ctx=256, n_batch=128) for spec in (None, {})]
        ids = small[0].tokenize(PROMPTS[0].encode() * 9)[:200]
        want, got = (llm.create_completion(ids, max_tokens=limit, temperature=0) for llm in small)
        assert essence(got) == essence(want)
        assert got["usage"]["total_tokens"] == 256
        assert_same_state(*small)


def check_stops(pair: Pair) -> None:
    a, b = plain(pair), drafting(pair, "tree")
    text = a.create_completion(PROMPTS[1], max_tokens=64, temperature=0)["choices"][0]["text"]
    stops = [[text[i : i + n]] for i, n in zip(range(0, len(text) - 8, 7), (1, 2, 5, 8) * 9, strict=False)] + [
        ["no such text", text[30:34]]
    ]
    for stop in stops:
        want, got = (llm.create_completion(PROMPTS[1], max_tokens=64, temperature=0, stop=stop) for llm in (a, b))
        assert essence(got) == essence(want)
        assert got["choices"][0]["finish_reason"] == "stop"
        assert_same_state(a, b)


def check_streams(pair: Pair) -> None:
    a, b = plain(pair), drafting(pair, "tree")
    for options in ({"temperature": 0}, {"seed": 3}, {"temperature": 0, "stop": ["\n\n", "return"]}):
        want, got = (list(llm.create_completion(PROMPTS[2], max_tokens=64, stream=True, **options)) for llm in (a, b))
        assert essence(got) == essence(want)
        whole = b.create_completion(PROMPTS[2], max_tokens=64, **options)
        assert whole["choices"][0]["text"] == "".join(chunk["choices"][0]["text"] for chunk in got)
        assert whole["choices"][0]["finish_reason"] == got[-1]["choices"][0]["finish_reason"]
    for n in range(1, 8):  # a stream that nobody reads to its end
        for llm in (a, b):
            chunks = llm.create_completion(PROMPTS[2], max_tokens=64, stream=True, temperature=0)
            for _ in range(n):
                next(chunks)
            chunks.close()
        assert_same_state(a, b)


def check_end_of_generation(pair: Pair) -> None:
    """The end token in the middle of an accepted path."""
    a, b = plain(pair), drafting(pair, "tree")
    from llama_cpp import LogitsProcessorList

    for n in (1, 2, 3, 4, 5, 6, 9, 13):
        n_prompt = len(a.tokenize(PROMPTS[0].encode(), add_bos=False, special=True))

        def end(ids: Any, scores: Any, n_end: int = n_prompt + n, eos: int = a.token_eos()) -> Any:
            if len(ids) >= n_end:
                scores = scores.copy()
                scores[eos] = 1000.0
            return scores

        want, got = (
            llm.create_completion(PROMPTS[0], max_tokens=64, temperature=0, logits_processor=LogitsProcessorList([end]))
            for llm in (a, b)
        )
        assert essence(got) == essence(want)
        assert got["choices"][0]["finish_reason"] == "stop"
        assert got["usage"]["completion_tokens"] == n
        assert_same_state(a, b)


def check_prefixes(pair: Pair) -> None:
    """Prompts that begin as the one before; the text is that of an instance that knows nothing."""
    b = new(pair, {"tree": 15})
    evaluated: list[int] = []
    inner = b.eval

    def count(tokens: Any) -> None:
        evaluated.append(len(tokens))
        inner(tokens)

    b.eval = count
    tokens = b.tokenize(PROMPTS[0].encode(), add_bos=False)
    more = b.tokenize(PROMPTS[1].encode(), add_bos=False)

    def ask(prompt: list[int]) -> tuple[list[int], int]:
        evaluated.clear()
        fresh = plain(pair)
        fresh.reset()
        fresh._ctx.kv_cache_clear()
        want, got = (llm.create_completion(prompt, max_tokens=24, temperature=0) for llm in (fresh, b))
        assert essence(got) == essence(want)
        assert_same_state(fresh, b)
        return b._input_ids.tolist(), sum(evaluated)

    ids, n = ask(tokens)
    assert n == len(tokens)
    b.reset_spec_stats()
    assert ask(tokens)[1] == 1  # the same prompt: from the checkpoint
    same = b.spec_stats.n_rounds
    assert ask([*ids, *more[:20]])[1] == 20  # a conversation that goes on
    ids, n = ask([*ids, *more[:20], *more[5:9]])
    assert n <= 5 + 24
    assert ask(ids)[1] == 0  # all that is known, and its logits
    assert ask([*ids[:-3], 5, 6, 7])[1] <= 3 + 24 + 4  # another end: from the checkpoint
    assert ask(more)[1] == len(more)  # another prompt
    assert ask(tokens)[1] == len(tokens)
    b.reset_spec_stats()
    ask(tokens)
    assert b.spec_stats.n_rounds == same  # the draft's checkpoint is as good as its evaluation


def check_chat(pair: Pair) -> None:
    a, b = plain(pair), drafting(pair, "tree")
    messages = [{"role": "user", "content": "def f(x):"}]
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name", "n"]}
    tool = {"type": "function", "function": {"name": "look_up", "description": "Look up", "parameters": schema}}
    choice = {"type": "function", "function": {"name": "look_up"}}
    requests: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 5},
        {"temperature": 0, "response_format": {"type": "json_object", "schema": schema}},
        {"seed": 6, "response_format": {"type": "json_object"}},
        {"temperature": 0, "tools": [tool], "tool_choice": choice},
        {"seed": 7, "tools": [tool], "tool_choice": choice},
    ]
    for request in requests:
        want, got = (llm.create_chat_completion(messages, max_tokens=48, **request) for llm in (a, b))
        assert essence(got) == essence(want)
        assert_same_state(a, b)
        want, got = (list(llm.create_chat_completion(messages, max_tokens=48, stream=True, **request)) for llm in (a, b))
        assert essence(got) == essence(want)


def check_callbacks(pair: Pair) -> None:
    """Processors and criteria are called with what they are called with without drafts."""
    a, b = plain(pair), drafting(pair, "tree")
    from llama_cpp import LlamaGrammar, LogitsProcessorList, StoppingCriteriaList

    grammar = LlamaGrammar.from_string('root ::= ("ab" | "cd" | " ")+')
    for options in ({"temperature": 0}, {"seed": 4}, {"seed": 5, "grammar": grammar}):
        seen: list[Any] = []
        results = []
        for llm in (a, b):
            calls: list[Any] = []

            def process(ids: Any, scores: Any, calls: list[Any] = calls) -> Any:
                calls.append((ids.tolist(), scores.argmax().item()))
                scores = scores.copy()
                scores[: len(ids) % 7] -= 1.0
                return scores

            def stop(ids: Any, _scores: Any, calls: list[Any] = calls) -> bool:
                calls.append(ids.tolist())
                return sum(ids[-3:].tolist()) % 41 == 0

            llm.reset()
            results.append(
                llm.create_completion(
                    PROMPTS[3],
                    max_tokens=48,
                    logits_processor=LogitsProcessorList([process]),
                    stopping_criteria=StoppingCriteriaList([stop]),
                    **options,
                )
            )
            seen.append(calls)
        assert essence(results[0]) == essence(results[1])
        assert seen[0] == seen[1]
        assert_same_state(a, b)


def check_a_processor_that_fails(pair: Pair) -> None:
    a, b = plain(pair), drafting(pair, "tree")
    for n in (1, 2, 5, 9):
        for llm in (a, b):
            calls = [0]

            def fail(_ids: Any, _scores: Any, calls: list[int] = calls, n: int = n) -> bool:
                calls[0] += 1
                if calls[0] == n:
                    raise KeyError("of the caller")
                return False

            with pytest.raises(KeyError, match="of the caller"):
                llm.create_completion(PROMPTS[0], max_tokens=32, temperature=0, stopping_criteria=fail)
        assert_same_state(a, b)


def check_logprobs(pair: Pair) -> None:
    a, b = (new(pair, spec, logits_all=True, n_ctx=512) for spec in (None, {"tree": 15}))
    for options in ({"temperature": 0}, {"seed": 2}, {"temperature": 0, "stream": True}):
        want, got = (llm.create_completion(PROMPTS[0], max_tokens=24, logprobs=3, **options) for llm in (a, b))
        if "stream" in options:
            want, got = list(want), list(got)
        assert essence(got) == essence(want)
        assert (a._scores == b._scores).all()


def check_states(pair: Pair) -> None:
    a, b = plain(pair), drafting(pair, "tree")
    for llm in (a, b):
        llm.reset()
        llm.create_completion(PROMPTS[0], max_tokens=20, temperature=0)
    prompt = [*b._input_ids.tolist(), 9, 10, 11]
    state, plain_state = b.save_state(), a.save_state()
    b.reset_spec_stats()
    want = essence(b.create_completion(prompt, max_tokens=40, temperature=0))
    rounds = b.spec_stats.n_rounds
    other = new(pair, SPECS["tree"])
    for llm, saved, as_good in (
        (b, state, True),
        (other, pickle.loads(pickle.dumps(state)), True),
        (b, plain_state, False),
        (a, state, False),
    ):
        llm.create_completion(PROMPTS[2], max_tokens=10, temperature=0)
        llm.load_state(saved)
        llm.reset_spec_stats()
        assert essence(llm.create_completion(prompt, max_tokens=40, temperature=0)) == want
        if as_good:
            assert llm.spec_stats.n_rounds == rounds
        # What was saved cannot be taken apart: an earlier token needs a whole evaluation.
        llm.load_state(saved)
        fresh = plain(pair) if llm is not a else other
        fresh.reset()
        assert essence(llm.create_completion(prompt[:-30], max_tokens=30, temperature=0)) == essence(
            fresh.create_completion(prompt[:-30], max_tokens=30, temperature=0)
        )
    chunks = b.create_completion(PROMPTS[1], max_tokens=40, temperature=0, stream=True)
    for _ in range(5):
        next(chunks)
    b.save_state()  # in a round: it ends there, and the stream goes on
    rest = b"".join(c["choices"][0]["text"].encode() for c in chunks)
    a.reset()
    text = a.create_completion(PROMPTS[1], max_tokens=40, temperature=0)["choices"][0]["text"].encode()
    assert text.endswith(rest)
    assert len(rest) > len(text) // 2


def check_ram_cache(pair: Pair) -> None:
    from llama_cpp import LlamaRAMCache

    results = []
    for spec in (None, {"tree": 15}):
        llm = new(pair, spec)
        llm.set_cache(LlamaRAMCache())
        results.append([essence(llm.create_completion(PROMPTS[i], max_tokens=16, temperature=0)) for i in (0, 1, 0, 1, 0)])
    assert results[0] == results[1]


def check_generators(pair: Pair) -> None:
    a, b = plain(pair), drafting(pair, "tree")
    tokens = a.tokenize(PROMPTS[0].encode(), add_bos=False)
    # What is sent are guesses; without the logits of all tokens llama-cpp-python itself cannot take them.
    a.reset()
    text = [t for _, t in zip(range(40), a.generate(tokens, temp=0.0), strict=False)]
    for sent in ({3: text[3:7]}, {1: [5], 2: [6], 9: [*text[9:12], 7]}, {4: []}):
        taken = []
        for llm in (a, b):
            llm.reset()
            generator = llm.generate(tokens, temp=0.0)
            out, value = [], None
            for i in range(30):
                out.append(generator.send(value if llm is b else None))
                value = sent.get(i + 1)
            generator.close()
            taken.append(out)
        assert taken[0] == taken[1]
        assert_same_state(a, b)
    # One that is forgotten, one that is in the way of another, one that goes on behind it.
    for llm in (a, b):
        first = llm.generate(tokens, temp=0.0)
        for _ in range(6):
            next(first)
        second = llm.generate(tokens[:-2], temp=0.0)
        for _ in range(6):
            next(second)
        del first
        gc.collect()
        for _ in range(6):
            next(second)
        second.close()
    assert_same_state(a, b)
    # Tokens without a prompt's reset, and a token sampled by hand where a round ended.
    taken = []
    for llm in (a, b):
        out = [t for _, t in zip(range(11), llm.generate(tokens[3:9], temp=0.0, reset=False), strict=False)]
        out.append(llm.sample(temp=0.0))
        taken.append(out)
    assert taken[0] == taken[1]
    assert_same_state(a, b)


def check_scripts(pair: Pair, seed: int) -> None:
    """Random calls on both."""
    rng = random.Random(seed)
    a, b = plain(pair), drafting(pair, rng.choice(["tree", "chain", "wide tree"]))
    for llm in (a, b):
        llm.reset()
        llm._ctx.kv_cache_clear()
    prompts = [a.tokenize(p.encode(), add_bos=False) for p in PROMPTS]
    states: list[Any] = []
    for _ in range(12):
        kind = rng.choice(["new", "same", "longer", "cut", "save", "load", "reset", "eval"])
        known = a._input_ids.tolist()
        if kind == "reset":
            a.reset()
            b.reset()
        elif kind == "save":
            states.append((a.save_state(), b.save_state()))
        elif kind == "load" and states:
            for llm, state in zip((a, b), rng.choice(states), strict=True):
                llm.load_state(state)
        elif kind == "eval" and len(known) < 500:
            more = rng.sample(range(300), rng.randint(1, 9))
            a.eval(more)
            b.eval(more)
        else:
            prompt = rng.choice(prompts)[: rng.randint(1, 80)]
            if kind == "same" and known:
                prompt = known[: rng.randint(1, len(known))]
            elif kind == "longer":
                prompt = known + prompt
            elif kind == "cut":
                prompt = known[: -rng.randint(1, 20)] + prompt
            prompt = prompt[-600:]
            options = {"temp": rng.choice([0.0, 0.8]), "top_k": 20}
            n = rng.randint(1, 40)
            taken = []
            for llm in (a, b):
                llm.set_seed(seed)
                generator = llm.generate(prompt, **options)
                taken.append([next(generator) for _ in range(n)])
                generator.close()
            assert taken[0] == taken[1]
        assert a.n_tokens == b.n_tokens
        assert a._input_ids.tolist() == b._input_ids.tolist()
    # How a token got into the context is not part of the state; its numbers are.
    assert_same_state(a, b)


def check_callable_drafts(pair: Pair) -> None:
    """llama-cpp-python's own kind of drafts, on a hybrid and without the logits of all tokens."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    a = plain(pair)
    b = new(pair, None, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=6))
    assert not b._logits_all
    assert b.spec_mode.startswith("mode = chain, draft = of the caller, n_max = 6")
    for prompt in PROMPTS:
        for options in ({"temperature": 0}, {"seed": 3}):
            want, got = (llm.create_completion(prompt, max_tokens=64, **options) for llm in (a, b))
            assert essence(got) == essence(want)
            assert_same_state(a, b)
    assert 0 < b.spec_stats.n_accepted <= b.spec_stats.n_nodes
    assert b.spec_stats.n_rounds < 0.9 * b.spec_stats.n_tokens

    calls: list[list[int]] = []

    def propose(ids: Any) -> Any:
        calls.append(ids.tolist())
        return ids[-40:] if len(calls) % 3 else ids[:0]  # more than is taken, and nothing

    c = new(pair, None, draft_model=propose)
    want, got = (llm.create_completion(PROMPTS[0], max_tokens=40, temperature=0) for llm in (a, c))
    assert essence(got) == essence(want)
    assert all(call == c._input_ids.tolist()[: len(call)] for call in calls[:-1])

    def fail(_ids: Any) -> Any:
        raise KeyError("of the caller")

    c.draft_model = fail
    with pytest.raises(KeyError, match="of the caller"):
        c.create_completion(PROMPTS[1], max_tokens=40, temperature=0)
    c.draft_model = propose
    a.reset()
    want, got = (llm.create_completion(PROMPTS[1], max_tokens=20, temperature=0) for llm in (a, c))
    assert essence(got) == essence(want)


def check_attention_only(name: str, rollback: str) -> None:
    """A target without recurrent layers: rollback of a chain both ways."""
    a = new((tree_models.path(name), ""), None)  # type: ignore[arg-type]
    text: list[int] = []

    def propose(ids: Any) -> Any:
        return np.array([*text[len(ids) - 8 :][:3], 5], np.intc)  # right for three tokens

    from llama_dflash.speculative import SpecConfig

    options = {"n_ctx": 256, "n_batch": 64, "n_threads": 1, "flash_attn": True, "verbose": False, "draft_model": propose}
    b = type(a)(tree_models.path(name), spec=SpecConfig(n_max=7, rollback=rollback), **options)
    assert b.spec_mode.endswith(f"rollback = {rollback}")
    prompt = [3, 4, 5, 6, 7, 8, 9, 10]
    text += [t for _, t in zip(range(48), a.generate(prompt, temp=0.0), strict=False)]
    for n in (48, 31, 48):
        generator = b.generate(prompt, temp=0.0)
        assert [next(generator) for _ in range(n)] == text[:n]
        generator.close()
    assert_same_state(a, b)
    assert b.spec_stats.n_rounds < 2 + 127 // 3
    assert b.spec_stats.n_accepted > 60
    ids = b._input_ids.tolist()
    for llm in (a, b):  # no checkpoint is needed to go back
        generator = llm.generate(ids[:-9], temp=0.0)
        assert [next(generator) for _ in range(5)] == ids[-9:-4]
        generator.close()
    assert b._checkpoint is None


def check_threads(pair: Pair) -> None:
    """Several instances at once, each in a thread of its own."""
    want = [essence(plain(pair).create_completion(p, max_tokens=48, temperature=0)) for p in PROMPTS]
    got: list[Any] = [None] * len(PROMPTS)
    made = [new(pair, SPECS[name]) for name in ("tree", "chain", "tree", "wide tree")]

    def work(i: int) -> None:
        got[i] = essence(made[i].create_completion(PROMPTS[i], max_tokens=48, temperature=0))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want


def count_rounds(pair: Pair, spec: dict[str, Any], temperature: float, n: int) -> list[dict[str, int]]:
    llm = new(pair, spec)
    found = []
    for i, prompt in enumerate(PROMPTS):
        llm.reset()
        llm.reset_spec_stats()
        options = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7 + i}
        ids = llm.tokenize(prompt.encode(), add_bos=False, special=True)
        llm.create_completion(ids, max_tokens=n, **options)
        s = llm.spec_stats
        found.append({"predicted_n": s.n_tokens, "rounds": s.n_rounds, "draft_n": s.n_nodes, "draft_n_accepted": s.n_accepted})
    return found


# --------------------------------------------------------------------------------------------------------------------
# the tests


@pytest.mark.parametrize(
    ("spec", "sampling"),
    [*(("tree", s) for s in SAMPLINGS), *((spec, s) for spec in SPECS if spec != "tree" for s in ("greedy", "hot"))],
)
def test_texts(run: Run, pair: Pair, spec: str, sampling: str) -> None:
    run(check_texts, pair, spec, sampling)


@pytest.mark.parametrize(
    "check",
    [
        *(check_limits, check_stops, check_streams, check_end_of_generation, check_prefixes, check_chat, check_callbacks),
        *(check_a_processor_that_fails, check_logprobs, check_states, check_ram_cache, check_generators),
        *(check_callable_drafts, check_threads),
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_check(run: Run, pair: Pair, check: Callable[[Pair], None]) -> None:
    run(check, pair)


@pytest.mark.parametrize("seed", range(8))
def test_random_calls(run: Run, pair: Pair, seed: int) -> None:
    run(check_scripts, pair, seed)


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("name", tree_models.ATTENTION)
def test_attention_only(run: Run, name: str, rollback: str) -> None:
    run(check_attention_only, name, rollback)


@pytest.mark.parametrize("spec", [{}, {"tree": 15}], ids=["chain", "tree"])
def test_counts_are_those_of_llama_server(run: Run, exact: Build, pair: Pair, spec: dict[str, Any]) -> None:
    n = 48
    config = RunConfig(*pair, budget=spec.get("tree")).checked()
    with Server(exact, config, extra=("-t", "1", "-tb", "1")) as server:
        for temperature in (0.0, 0.8):
            want = []
            for i, prompt in enumerate(PROMPTS):
                sampling = Sampling(temperature=temperature, seed=7 + i)
                timings = server.client.complete(prompt, n, sampling, ignore_eos=True).timings
                want.append({key: timings[key] for key in ("predicted_n", "rounds", "draft_n", "draft_n_accepted")})
            assert run(count_rounds, pair, spec, temperature, n) == want
