"""Request features of the server matrix: each case asks a few things of one slot and returns the replies.

The same function runs against the unpatched pin without drafts and against our server, and the two lists must be equal.
Cases that no `id_slot` can bind, or that need several slots, run alone (`alone=True`); the others run side by side.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matrix_session import Session, text_of

from llama_dflash.bench import cases as prompt_sets

LONG = [c.text for c in prompt_sets.load("tests")]
# The last lines are enough for real text and keep the matrix short.
SHORT = ["\n".join(text.splitlines()[-4:]) + "\n" for text in LONG]
CODE = "/completion"
OAI = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
HOT = {"temperature": 0.8, "seed": 7}
COLD = {"temperature": 0}
USER = [{"role": "user", "content": "def add(a, b):\n"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 2, "maxItems": 3},
        "size": {"type": "integer"},
    },
    "required": ["name", "tags", "size"],
}


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Call {name}.", "parameters": schema}}


WEATHER = _tool("get_weather", city={"type": "string", "maxLength": 12}, days={"type": "integer", "minimum": 1, "maximum": 9})
SEARCH = _tool("search", query={"type": "string", "maxLength": 16})


@dataclass(frozen=True)
class Known:
    """A prompt and its greedy text by the unpatched pin: what stop strings and grammars are cut from."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]
    pieces: list[str]
    eos: int

    def text(self, n_tokens: int) -> str:
        return "".join(self.pieces[:n_tokens])


CaseFn = Callable[[Session, Known], list[Any]]


@dataclass(frozen=True)
class Case:
    """One feature.

    Attributes:
        run: asks and returns the replies.
        alone: nothing else runs on the server.
        by_slots: compare with a pin of as many slots; else with the pin's only slot.
        errors: a refusal by the pin is expected among the replies.
        drafts: drafted nodes and fewer rounds than tokens are demanded; else why not.
    """

    run: CaseFn
    alone: bool = False
    by_slots: bool = False
    errors: bool = False
    no_drafts: str = ""


CASES: dict[str, Case] = {}


def case(**how: Any) -> Callable[[CaseFn], CaseFn]:
    def add(fn: CaseFn) -> CaseFn:
        CASES[fn.__name__] = Case(fn, **how)
        return fn

    return add


def many(s: Session, n_predict: int, *fields: dict[str, Any], i_prompt: int = 0) -> list[Any]:
    """One /completion for each set of fields."""
    base = {"prompt": SHORT[i_prompt], "n_predict": n_predict, "return_tokens": True}
    return [s.ask(CODE, **{**base, **f}) for f in fields]


# --- sampling ---


@case()
def greedy(s: Session, known: Known) -> list[Any]:
    return many(s, 48, *({**COLD, "prompt": p} for p in (SHORT[0], SHORT[2], LONG[4])))


@case()
def temperature(s: Session, known: Known) -> list[Any]:
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 11}
    hot = ({**plain, "temperature": t, "prompt": SHORT[i]} for i, t in enumerate((0.3, 0.6, 0.8, 1.0, 1.3)))
    dynamic = {"temperature": 0.8, "dynatemp_range": 0.5, "dynatemp_exponent": 1.5, "seed": 3}
    return many(s, 20, *hot, dynamic)


@case()
def top_k_top_p(s: Session, known: Known) -> list[Any]:
    only = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "seed": 5}
    return many(s, 20, {**only, "top_k": 4}, {**only, "top_p": 0.7}, {**only, "top_k": 30, "top_p": 0.9}, {**only, "top_k": 1}, i_prompt=1)


@case()
def min_p(s: Session, known: Known) -> list[Any]:
    only = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, "seed": 5}
    return many(s, 24, {**only, "min_p": 0.05}, {**only, "min_p": 0.3}, i_prompt=2)


@case()
def penalties(s: Session, known: Known) -> list[Any]:
    return many(
        s, 24,
        {**COLD, "repeat_penalty": 1.3},
        {**COLD, "repeat_penalty": 1.1, "repeat_last_n": 8},
        {**COLD, "presence_penalty": 0.8},
        {**COLD, "frequency_penalty": 0.6, "repeat_last_n": 256},
        {**HOT, "repeat_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.3},
        i_prompt=3,
    )  # fmt: skip


@case()
def dry(s: Session, known: Known) -> list[Any]:
    on = {"dry_multiplier": 0.8, "dry_allowed_length": 2, "dry_penalty_last_n": 256}
    return many(s, 28, {**COLD, **on}, {**HOT, **on}, {**COLD, **on, "dry_sequence_breakers": ["."]}, i_prompt=4)


@case()
def seeds(s: Session, known: Known) -> list[Any]:
    replies = many(s, 16, *({"temperature": 1.0, "seed": seed} for seed in (1, 2, 3, 4, 1)), i_prompt=5)
    texts = [r["content"] for r in replies]
    assert texts[0] == texts[4], "an equal seed gave another text"
    assert len(set(texts)) > 1, "seeds change nothing"
    return replies


@case()
def other_samplers(s: Session, known: Known) -> list[Any]:
    return many(
        s, 20,
        {**HOT, "typical_p": 0.7},
        {**HOT, "xtc_probability": 0.5, "xtc_threshold": 0.1},
        {**HOT, "top_n_sigma": 1.0},
        {**HOT, "mirostat": 1, "mirostat_tau": 3.0},
        {**HOT, "mirostat": 2, "mirostat_tau": 3.0},
        {**HOT, "adaptive_target": 0.5, "adaptive_decay": 0.9, "samplers": ["top_k", "adaptive_p"]},
        {**HOT, "samplers": ["temperature", "min_p", "penalties"], "repeat_penalty": 1.2},
        i_prompt=6,
    )  # fmt: skip


@case(alone=True)
def backend_sampling(s: Session, known: Known) -> list[Any]:
    """Sampling inside the graph, which the pin offers to every client; alone, as an error there ends all slots' answers."""
    return many(s, 20, *({**how, "backend_sampling": True} for how in (COLD, HOT, {"temperature": 1.0, "seed": 9})), i_prompt=2)


@case()
def logit_bias(s: Session, known: Known) -> list[Any]:
    common = max(set(known.ids), key=known.ids.count)
    replies = many(
        s, 24,
        {**COLD, "prompt": known.prompt, "logit_bias": [[common, False]]},
        {**COLD, "logit_bias": {str(known.ids[3]): -5.0, str(known.ids[9]): 1.5}},
        {**HOT, "logit_bias": [[known.pieces[5], -2.0], [known.ids[0], 2.0]]},
    )  # fmt: skip
    assert common not in replies[0]["tokens"], "the barred token was given"
    return replies


# --- constrained text ---


@case()
def grammar(s: Session, known: Known) -> list[Any]:
    names = r'root ::= name (", " name){2,5} "\n"' + "\n" + "name ::= [a-z_]{3,12}"
    lines = 'root ::= ("    " [^\\n]* "\\n"){1,3}'
    return many(s, 40, {**COLD, "grammar": names}, {**HOT, "grammar": names}, {**COLD, "grammar": lines}, {**HOT, "grammar": lines})


@case()
def json_schema(s: Session, known: Known) -> list[Any]:
    chat = {"messages": USER, "max_tokens": 60, **NO_THINKING}
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    return [
        *many(s, 60, {**COLD, "json_schema": SCHEMA}, {**HOT, "json_schema": SCHEMA}),
        s.ask(CHAT, **chat, **COLD, response_format=wanted),
        s.ask(CHAT, **chat, **HOT, response_format=wanted),
        s.ask(CHAT, **chat, **HOT, response_format={"type": "json_object"}),
        s.stream(CHAT, **chat, **HOT, response_format=wanted),
    ]


@case()
def lazy_grammar(s: Session, known: Known) -> list[Any]:
    """A grammar that begins to hold after a word of the known text, which stands inside an accepted path."""
    replies = []
    for n in (6, 11, 17):
        word = "".join(known.pieces[n - 2 : n])
        rule = "root ::= " + _quoted(word) + ' [a-z]{4} "0"{3} [^0]*'
        trigger = {"type": 1, "value": word}
        lazy = {"grammar": rule, "grammar_lazy": True, "grammar_triggers": [trigger]}
        replies.append(s.ask(CODE, prompt=known.prompt, n_predict=40, return_tokens=True, **lazy, **COLD))
    assert all("000" in r["content"] for r in replies), "the grammar never held"
    return replies


# The pair never begins a call by itself, and the grammar of a required call allows any text before it.
CALL_BEGUN = [*USER, {"role": "assistant", "content": "<tool_call>\n"}]


@case()
def tools(s: Session, known: Known) -> list[Any]:
    # The grammar allows more calls and the end after each; the end is made likely.
    once = {"logit_bias": [[known.eos, 50.0]]}
    chat = {"messages": CALL_BEGUN, "max_tokens": 64, "tools": [WEATHER, SEARCH], **once, **NO_THINKING}
    free = {"messages": USER, "max_tokens": 20, "tools": [WEATHER, SEARCH], **NO_THINKING}
    replies = [
        s.ask(CHAT, **chat, **COLD, tool_choice="required"),
        s.ask(CHAT, **chat, **HOT, tool_choice="required"),
        s.ask(CHAT, **{**chat, "tools": [SEARCH]}, **HOT, tool_choice="required"),
    ]
    calls = [r["choices"][0]["message"]["tool_calls"] for r in replies]
    assert all(calls)
    assert replies[0]["choices"][0]["finish_reason"] == "tool_calls"
    events = s.stream(CHAT, **chat, **HOT, tool_choice="required")
    assert text_of(events) == text_of(replies[1])
    answered = [*USER, {"role": "assistant", "content": "", "tool_calls": [{**calls[1][0], "id": "1"}]}]
    answered.append({"role": "tool", "tool_call_id": "1", "content": "rain"})
    return [
        *replies, events,
        s.ask(CHAT, **{**free, "messages": answered}, **COLD),
        s.ask(CHAT, **free, **HOT, tool_choice="auto"),
        s.ask(CHAT, **free, **HOT, tool_choice="none"),
    ]  # fmt: skip


@case(errors=True)
def cut_tool_calls(s: Session, known: Known) -> list[Any]:
    """Several calls, cut by the limit: where a call cannot be parsed the pin answers with an error."""
    chat = {"messages": CALL_BEGUN, "tools": [WEATHER, SEARCH], "tool_choice": "required", "parallel_tool_calls": True, **NO_THINKING}
    return [s.ask(CHAT, **chat, **HOT, max_tokens=16), s.ask(CHAT, **chat, **COLD, max_tokens=70), s.stream(CHAT, **chat, **COLD, max_tokens=70)]


@case()
def thinking(s: Session, known: Known) -> list[Any]:
    chat = {"messages": USER, "max_tokens": 28}
    budgets = [s.ask(CHAT, **chat, **HOT, **THINKING, reasoning_budget_tokens=n) for n in (0, 1, 5, 12)]
    then_json = {**chat, "max_tokens": 60, "reasoning_budget_tokens": 9}
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    streamed = s.stream(CHAT, **chat, **HOT, **THINKING, reasoning_budget_tokens=12)
    message = budgets[3]["choices"][0]["message"]
    assert message["reasoning_content"], "nothing was thought"
    assert message["content"], "the budget did not end the thinking"
    assert text_of(streamed) == text_of(budgets[3])
    return [
        *budgets, streamed,
        s.ask(CHAT, **chat, **COLD, **THINKING),
        s.ask(CHAT, **chat, **COLD, **NO_THINKING),
        s.ask(CHAT, **chat, **HOT, **THINKING, reasoning_budget_tokens=9, reasoning_budget_message=" Enough."),
        s.ask(CHAT, **then_json, **HOT, **THINKING, response_format=wanted),
    ]  # fmt: skip


# --- where a text ends ---


@case()
def stop_strings(s: Session, known: Known) -> list[Any]:
    """Stop strings that end at every token, and inside tokens, of the known text."""
    replies = []
    for i in range(2, 22):
        word = "".join(known.pieces[i - 1 : i + 1])
        word = word if i % 2 else word[:-1] or word
        replies.append(s.ask(CODE, prompt=known.prompt, n_predict=40, stop=[word], return_tokens=True, **COLD))
    assert len({r["tokens_predicted"] for r in replies}) > 6, "the strings stop at too few places"
    assert all(r["stop_type"] == "word" for r in replies)
    several = {"prompt": known.prompt, "max_tokens": 48, "stop": [known.text(14)[-6:], known.text(20)[-4:], "never there"], **COLD}
    return [*replies, s.ask(OAI, **several), s.stream(OAI, **several), s.stream(CODE, **several)]


@case(no_drafts="a limit of 1 or 2 tokens leaves none to draft; the longer ones are too few for a demand")
def max_tokens(s: Session, known: Known) -> list[Any]:
    replies = [s.ask(CODE, prompt=known.prompt, n_predict=n, return_tokens=True, **COLD) for n in range(21)]
    # The pin takes 0 as 1.
    assert [r["tokens_predicted"] for r in replies] == [1, *range(1, 21)]
    assert all(r["tokens"] == known.ids[: max(1, n)] for n, r in enumerate(replies))
    return replies


@case()
def end_token_inside_a_path(s: Session, known: Known) -> list[Any]:
    """A grammar ends after n tokens of the known text, the draft does not know; then the slot is used on."""
    replies = []
    for n in range(1, 17):
        rule = "root ::= " + " ".join(_quoted(p) for p in known.pieces[:n])
        first = s.ask(CODE, prompt=known.prompt_ids, n_predict=40, grammar=rule, return_tokens=True, **COLD)
        assert (first["content"], first["stop_type"]) == (known.text(n), "eos")
        follow = [*known.prompt_ids, *first["tokens"][:-1], *known.ids[2:5]]
        second = s.ask(CODE, prompt=follow, n_predict=5, return_tokens=True, cache_prompt=True, **COLD)
        replies += [first, second]
    assert any(r["timings"]["cache_n"] > len(known.prompt_ids) for r in replies), "the slot was never used on"
    return replies


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


@case()
def ignore_eos(s: Session, known: Known) -> list[Any]:
    ended = {"prompt": "import sys\n\nif __name__ == '__main__':\n    main()\n", "n_predict": 28, "return_tokens": True}
    replies = [s.ask(CODE, **ended, **f, ignore_eos=on) for f in (COLD, HOT) for on in (False, True)]
    assert replies[1]["tokens_predicted"] == replies[3]["tokens_predicted"] == 28
    return [*replies, s.ask(OAI, prompt=ended["prompt"], max_tokens=20, ignore_eos=True, **HOT)]


@case()
def indent_and_long_texts(s: Session, known: Known) -> list[Any]:
    """An indentation limit, and a text that goes on well past the 256 cells where attention changes form."""
    prompt = "def area(width, height):\n    "
    return many(s, 40, {**COLD, "n_indent": 4, "prompt": prompt}, {**HOT, "n_predict": 250, "ignore_eos": True, "prompt": LONG[6]})


# --- probabilities ---


@case()
def logprobs(s: Session, known: Known) -> list[Any]:
    chat = {"messages": USER, "max_tokens": 16, "logprobs": True, "top_logprobs": 4, **NO_THINKING}
    word = known.text(16)[-4:]
    return [
        *many(s, 20, {**COLD, "n_probs": 5}, {**HOT, "n_probs": 3}),
        *many(s, 20, {**HOT, "n_probs": 5, "post_sampling_probs": True, "top_k": 20}, {**COLD, "n_probs": 2, "post_sampling_probs": True}),
        *many(s, 20, {**COLD, "n_probs": 4, "prompt": known.prompt, "stop": [word]}),
        s.stream(CODE, prompt=SHORT[0], n_predict=16, n_probs=4, **HOT),
        s.stream(CODE, prompt=SHORT[0], n_predict=16, n_probs=4, post_sampling_probs=True, **HOT),
        s.ask(OAI, prompt=SHORT[1], max_tokens=16, logprobs=5, **HOT),
        s.stream(OAI, prompt=SHORT[1], max_tokens=16, logprobs=5, **HOT),
        s.ask(CHAT, **chat, **HOT),
        s.stream(CHAT, **chat, **HOT),
    ]


# --- the cache and the slots ---


@case()
def prompt_cache(s: Session, known: Known) -> list[Any]:
    """Same prompt, longer, shorter, other, back; each follows drafted text in the slot."""
    prompts = [SHORT[1], SHORT[1], SHORT[1] + SHORT[2], SHORT[1], SHORT[3], SHORT[1], LONG[1], LONG[1] + SHORT[4]]
    replies = [s.ask(CODE, prompt=prompts[0], n_predict=20, **COLD)]
    replies += [s.ask(CODE, prompt=p, n_predict=12 + i, cache_prompt=True, return_tokens=True, **HOT) for i, p in enumerate(prompts)]
    # A conversation: each prompt is the last one with its answer.
    text = SHORT[4]
    for i in range(4):
        reply = s.ask(CODE, prompt=text, n_predict=14 + i, cache_prompt=True, **HOT)
        text += reply["content"] + "\n"
        replies.append(reply)
    assert replies[-1]["timings"]["cache_n"] > 60, "nothing was taken from the cache"
    return replies


@case()
def save_and_restore(s: Session, known: Known) -> list[Any]:
    first = s.ask(CODE, prompt=known.prompt_ids, n_predict=20, return_tokens=True, **COLD)
    saved = s.slot_action("save")
    longer = [*known.prompt_ids, *first["tokens"]]
    ask = {"prompt": longer, "n_predict": 16, "cache_prompt": True, "return_tokens": True, **HOT}
    direct = s.ask(CODE, **ask)
    other = s.ask(CODE, prompt=SHORT[5], n_predict=12, **COLD)
    restored = s.slot_action("restore")
    again = s.ask(CODE, **ask)
    erased = s.slot_action("erase")
    cold = s.ask(CODE, **ask)
    assert direct["content"] == again["content"]
    assert cold["timings"]["cache_n"] == 0 < again["timings"]["cache_n"]
    assert saved["n_saved"] == restored["n_restored"]
    for actions in (saved, restored):  # a file of a server with a draft may hold more
        actions.pop("n_written", None), actions.pop("n_read", None)
    return [first, saved, direct, other, restored, again, erased, cold]


@case(alone=True, by_slots=True, errors=True, no_drafts="one slot refuses n > 1 before it drafts")
def several_completions(s: Session, known: Known) -> list[Any]:
    """n > 1: the prompt's state is copied to other slots. One slot must refuse it as the pin does."""
    code = {"prompt": SHORT[0], "n_predict": 16, "return_tokens": True}
    chat = {"messages": USER, "max_tokens": 16, **NO_THINKING}
    replies: list[Any] = [
        _sorted(s.ask(CODE, **code, n_cmpl=2, temperature=1.0, seed=3)),
        _sorted(s.ask(CODE, **code, n_cmpl=4, temperature=1.0, seed=4)),
        s.ask(OAI, prompt=SHORT[1], max_tokens=16, n=3, temperature=1.0, seed=5),
        s.ask(CHAT, **chat, n=3, temperature=1.0, seed=6),
        s.ask(CODE, prompt=SHORT[0], n_predict=12, **COLD),
    ]
    events = s.stream(CHAT, **chat, n=2, temperature=1.0, seed=6)
    return [*replies, [text_of(events, 0), text_of(events, 1)]]


def _sorted(reply: Any) -> Any:
    return sorted(reply, key=lambda r: r["index"]) if isinstance(reply, list) else reply


# --- interfaces ---


@case()
def streaming(s: Session, known: Known) -> list[Any]:
    replies: list[Any] = []
    code = {"prompt": SHORT[2], "n_predict": 24}
    oai = {"prompt": SHORT[2], "max_tokens": 24, "stream_options": {"include_usage": True}}
    chat = {"messages": USER, "max_tokens": 24, "stream_options": {"include_usage": True}, **NO_THINKING}
    for path, body in ((CODE, code), (OAI, oai), (CHAT, chat)):
        for sampling in (COLD, HOT):
            whole, events = s.ask(path, **body, **sampling), s.stream(path, **body, **sampling)
            assert text_of(events) == text_of(whole) != ""
            if path != CODE:
                assert events[-1]["usage"] == whole["usage"]
            replies += [whole, events]
    return [*replies, s.stream(CODE, **code, **HOT, timings_per_token=True, return_progress=True, return_tokens=True)]


@case()
def interfaces(s: Session, known: Known) -> list[Any]:
    """Prompts as ids, several prompts, a template that must continue an answer, chosen fields."""
    begun = [*USER, {"role": "assistant", "content": "return a"}]
    return [
        s.ask(CODE, prompt=known.prompt_ids, n_predict=16, **COLD),
        s.ask(OAI, prompt=[SHORT[0], SHORT[1]], max_tokens=16, **COLD),
        s.ask(OAI, prompt=known.prompt_ids, max_tokens=16, echo=True, **HOT),
        s.ask(CHAT, messages=begun, max_tokens=24, **COLD, **NO_THINKING),
        s.ask(CODE, prompt=SHORT[3], n_predict=16, response_fields=["content", "tokens_predicted", "timings/cache_n"], **COLD),
    ]


@case(alone=True)
def messages(s: Session, known: Known) -> list[Any]:
    """The Anthropic interface; it takes neither a slot nor a seed, so its texts are greedy."""
    body = {"messages": USER, "max_tokens": 24, **COLD, **NO_THINKING}
    schema = WEATHER["function"]
    tool = {"name": schema["name"], "description": "w", "input_schema": schema["parameters"]}
    budget = {"messages": USER, "max_tokens": 28, **COLD, **THINKING, "thinking": {"type": "enabled", "budget_tokens": 11}}
    whole, events = s.ask(MESSAGES, **body), s.stream(MESSAGES, **body)
    assert text_of(events) == text_of(whole) != ""
    stop = text_of(whole)[9:12]
    call = {**body, "messages": CALL_BEGUN, "max_tokens": 56, "tools": [tool], "tool_choice": {"type": "any"}}
    return [
        whole, events,
        s.ask(MESSAGES, **body, stop_sequences=[stop]),
        s.ask(MESSAGES, **budget), s.stream(MESSAGES, **budget),
        s.ask(MESSAGES, **call),
        s.stream(MESSAGES, **call),
    ]  # fmt: skip


# --- many at once ---

ARRIVALS_S = 1.2


def arriving_requests() -> list[tuple[str, dict[str, Any]]]:
    """Requests of unlike lengths, interfaces and sampling."""
    rng = random.Random(5)
    out: list[tuple[str, dict[str, Any]]] = []
    for i in range(12):
        n = rng.choice((6, 16, 30, 60))
        prompt = LONG[i % 8] + LONG[(i + 3) % 8] if i % 5 == 0 else SHORT[i % 8]
        how = COLD if i % 3 == 0 else {"temperature": 0.8, "seed": i}
        if i % 7 == 3:
            out.append((CHAT, {"messages": [{"role": "user", "content": prompt}], "max_tokens": n, **how, **NO_THINKING}))
        elif i % 7 == 5:
            out.append((OAI, {"prompt": prompt, "max_tokens": n, "logprobs": 2, **how}))
        else:
            out.append((CODE, {"prompt": prompt, "n_predict": n, "return_tokens": True, "ignore_eos": i % 2 == 0, **how}))
    return out


@case(alone=True)
def continuous_batching(s: Session, known: Known) -> list[Any]:
    """Requests come while others are answered; the server chooses the slots."""
    requests = arriving_requests()
    rng = random.Random(9)
    replies: list[Any] = [None] * len(requests)

    def one(i: int, path: str, body: dict[str, Any], delay_s: float) -> None:
        time.sleep(delay_s)
        replies[i] = s.stream(path, **body) if i % 4 == 1 else s.ask(path, **body)

    threads = [threading.Thread(target=one, args=(i, *r, rng.uniform(0, ARRIVALS_S))) for i, r in enumerate(requests)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert None not in replies, "a request had no answer"
    return replies
