"""What is measured on each side, one server at a time."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu.figures import figure
from gpu.modes import LENGTHS, N_MAX, TREE_LENGTH, Mode, Plan, Side, turns
from gpu.record import Record, say
from gpu.serve import Run, round_ms, rounds, serve, tok_s

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "llama_dflash" / "models"
N_PROMPT = 131


def prompt_of(n_tokens: int) -> list[int]:
    """The same random token ids on every side; a short prompt is the beginning of a long one, so each is prefilled once."""
    rng = random.Random(1)
    return [rng.randrange(300, 2000) for _ in range(n_tokens)]


def ask(run: Run, repeats: int, n_prompt: int, n_predict: int) -> tuple[list[dict[str, Any]], list[float]]:
    """Timings of the repeats behind one that warms up, and the memory's peak behind each."""
    prompt = prompt_of(n_prompt)
    run.ask(prompt, n_predict, cache_prompt=True)
    run.stop_watching()
    done, memory = [], []
    for _ in range(repeats):
        timings = run.ask(prompt, n_predict, cache_prompt=True)
        done.append({key: value for key, value in timings.items() if key != "tokens"})
        peak = run.note_memory()
        memory += [] if peak is None else [peak]
    return done, memory


def session_figures(timings: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds a round, tokens a second and a round."""
    return {
        "round_ms": figure([round_ms(t) for t in timings]),
        "tok_s": figure([tok_s(t) for t in timings]),
        "tokens_per_round": figure([(t["predicted_n"] - 1) / rounds(t) for t in timings]),
    }


def session(side: Side, plan: Plan, mode: Mode, log: Path, depths: Sequence[int] = (0,)) -> Iterator[tuple[int, dict[str, Any]]]:
    """One server: depth by depth its figures behind so many tokens, and the peak of its memory."""
    raw = {}
    with serve(side.server, plan.server_flags(mode), log) as run:
        for depth in depths:
            raw[depth], memory = ask(run, plan.repeats, depth or N_PROMPT, mode.n_tokens(plan.n_predict))
            log.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")
            found = {**session_figures(raw[depth]), "mem_mb": figure(memory) if memory else None}
            speed = [found[key]["median"] for key in ("round_ms", "tok_s", "tokens_per_round")]
            say(
                f"{side.name} {mode.name} at {depth}: {speed[0]:.2f} ms a round, {speed[1]:.1f} tok/s, {speed[2]:.2f} tokens a round"
            )
            yield depth, found


def conditions_of(plan: Plan, mode: Mode) -> dict[str, Any]:
    """Sizes of a step."""
    sizes = {"n_predict": mode.n_tokens(plan.n_predict), "n_ctx": plan.n_ctx, "repeats": plan.repeats}
    return {**sizes, "length": mode.length, "asked": plan.asked(mode)}


def rounds_of_modes(sides: Sequence[Side], plan: Plan, record: Record, todo: Sequence[Mode]) -> None:
    """Plain decoding, chains, and trees where the build has them."""
    for side, mode in turns(sides, todo):
        with record.step("modes", side.name, mode.name, **conditions_of(plan, mode)):
            for _, one in session(side, plan, mode, record.logs / f"modes-{side.name}-{mode.name}.log"):
                name = "ar_ms" if mode.name == "ar" else f"{mode.name}_round_ms"
                rest = {key: one[key] for key in ("tok_s", "tokens_per_round")}
                record.put(
                    {side.name: {name: one["round_ms"], f"mem_{mode.name}_mb": one["mem_mb"], "sessions": {mode.name: rest}}}
                )


def at_depths(sides: Sequence[Side], plan: Plan, record: Record, todo: Sequence[Mode], depths: Sequence[int]) -> None:
    """The same behind long prompts, one server a mode; each depth is saved."""
    plan = replace(plan, n_ctx=max(depths) + 2048)
    for side, mode in turns(sides, todo):
        with record.step("depths", side.name, mode.name, **conditions_of(plan, mode)):
            for depth, one in session(side, plan, mode, record.logs / f"depths-{side.name}-{mode.name}.log", depths):
                record.put({side.name: {"depths": {mode.name: {str(depth): one}}}})


def synthetic(sides: Sequence[Side], plan: Plan, record: Record, todo: Sequence[Mode]) -> None:
    """Tokens a second where so many tokens a round are accepted by lot; chains of 15, and trees."""
    asked = [m for m in todo if m.n_max == N_MAX]
    each = [Mode("chain" if not m.budget else m.name, m.n_max, m.budget, length) for m in asked for length in LENGTHS]
    for side, mode in turns(sides, each):
        with record.step("synth", side.name, mode.name, **conditions_of(plan, mode)):
            for _, one in session(side, plan, mode, record.logs / f"synth-{side.name}-{mode.name}-{mode.length}.log"):
                keep = {key: one[key] for key in ("tok_s", "tokens_per_round", "round_ms")}
                record.put({side.name: {f"synth_{mode.name}": {str(mode.length): {**keep, "asked": plan.asked(mode)}}}})


def bench(side: Side, plan: Plan, sizes: Sequence[int], log: Path) -> dict[int, list[float]]:
    """Milliseconds of passes over so many rows of one sequence, by llama-bench."""
    command = [str(side.folder / "llama-bench"), "-m", str(plan.target), "-fa", "1", "-ngl", "999", "-n", "0", "-o", "jsonl"]
    command += ["-r", str(plan.repeats + 1), "-p", ",".join(map(str, sizes)), *plan.bench_flags]
    log.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, timeout=900)
    log.write_text(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    # The first repeat is slow, for every size.
    return {int(row["n_prompt"]): [ns / 1e6 for ns in row["samples_ns"][1:]] for row in lines}


def passes(sides: Sequence[Side], plan: Plan, record: Record, rows: Sequence[int], prefill: Sequence[int]) -> None:
    """Bare passes of few rows, and prefill."""
    for side in sides:
        with record.step("passes", side.name, "llama-bench"):
            ms = bench(side, plan, [*rows, *prefill], record.logs / f"passes-{side.name}.jsonl")
            found = {"rows": {str(n): figure(ms[n]) for n in rows}}
            record.put({side.name: {**found, **{f"pp{n}_tok_s": figure([1e3 * n / one for one in ms[n]]) for n in prefill}}})
            say(f"{side.name}: ms of a pass by rows { ({n: round(fig['median'], 2) for n, fig in found['rows'].items()}) }")


def equality(texts: dict[str, list[list[int]]], names: Sequence[str]) -> dict[str, Any]:
    """How many texts are those of plain decoding, on the base build and on the same one, and where the others part."""
    out: dict[str, Any] = {}
    for name, ids in texts.items():
        own = "base_ar" if name.startswith("base_") else "ar"
        parts = []
        for prompt, mine, other in zip(names, ids, texts["base_ar"], strict=True):
            if mine != other:
                parts.append(
                    {"prompt": prompt, "at": next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), -1)}
                )
        same = sum(a == b for a, b in zip(ids, texts[own], strict=True))
        out[name] = {"prompts": len(ids), "equal_to_base_ar": len(ids) - len(parts), "equal_to_own_ar": same, "parts": parts}
    return out


TINY = {
    "base_ar": ("base", Mode("ar")),
    "ar": ("ours", Mode("ar")),
    "base_chain": ("base", Mode("chain", N_MAX)),
    "chain": ("ours", Mode("chain", N_MAX)),
    "tree": ("ours", Mode("tree", N_MAX, 15)),
}


def interleaved(
    runs: dict[str, Run], texts: Sequence[str], plan: Plan, record: Record
) -> tuple[dict[str, Any], dict[str, list[list[int]]]]:
    """Figures of servers that take turns, and the token ids of the last turn."""
    values: dict[str, list[float]] = {f"{name}_{key}": [] for name in runs for key in ("tok_s", "tokens_per_round")}
    ids: dict[str, list[list[int]]] = {}
    raw: dict[str, list[Any]] = {name: [] for name in runs}
    for _ in range(plan.repeats):
        for name, run in runs.items():
            done = [run.ask(text, plan.n_predict, cache_prompt=False) for text in texts]
            n_tokens = sum(t["predicted_n"] - 1 for t in done)
            values[f"{name}_tok_s"].append(1e3 * n_tokens / sum(t["predicted_ms"] for t in done))
            values[f"{name}_tokens_per_round"].append(n_tokens / sum(map(rounds, done)))
            ids[name] = [t.pop("tokens") for t in done]
            raw[name].append(done)
    (record.logs / "tiny.json").write_text(json.dumps({"timings": raw, "tokens": ids}) + "\n")
    return {key: figure(each) for key, each in values.items()}, ids


def tiny(sides: Sequence[Side], plan: Plan, record: Record, n_prompts: int) -> None:
    """The trained pair: real acceptance, all servers at once so that repeats interleave, and whether texts are equal."""
    from llama_dflash.bench import cases

    chosen = cases.load("tests", n_prompts)
    texts = [case.text for case in chosen]
    plan = replace(plan, target=MODELS / "tiny-target.gguf", draft=MODELS / "tiny-draft.gguf", shapes=None, n_ctx=4096)
    servers = {side.name: side.server for side in sides}
    with (
        record.step("tiny", "both", "interleaved", n_predict=plan.n_predict, repeats=plan.repeats),
        contextlib.ExitStack() as stack,
    ):
        runs = {}
        for name, (side, mode) in TINY.items():
            runs[name] = stack.enter_context(serve(servers[side], plan.server_flags(mode), record.logs / f"tiny-{name}.log"))
            runs[name].ask(texts[0], 16)
            runs[name].stop_watching()
        found, ids = interleaved(runs, texts, plan, record)
        how = f"trained pair, real acceptance, greedy, {n_prompts} prompts x {plan.n_predict} tokens, chains of {N_MAX}, trees of 15 nodes"
        record.put({"tiny": {**found, "equality": equality(ids, [case.name for case in chosen]), "conditions": how}})
        say(f"tiny: { ({name: round(found[f'{name}_tok_s']['median'], 1) for name in runs}) } tok/s")


def conditions(plan: Plan, weights: str) -> dict[str, Any]:
    """Under what the figures of the large pair are taken."""
    chains = "chains of part modes and depths accept what the pair gives: next to nothing, where weights are random"
    return {
        "weights": weights,
        "acceptance": "synthetic" if weights == "random" else "chains real, trees synthetic",
        "chains": chains,
        "trees": f"{TREE_LENGTH} tokens a round by lot (--spec-synth-len), along recorded shapes (--spec-synth-tree)",
        "synth": f"{', '.join(map(str, LENGTHS))} tokens a round by lot, fewer where the trees are flatter; what came of it is tokens_per_round",
        "prompt_tokens": N_PROMPT,
        "sampling": "greedy, to the limit",
        "server": "one slot, flash attention, all layers on the GPU, F16 KV",
        "target": plan.target.name,
        "draft": plan.draft.name,
        "flags": list(plan.flags),
    }
