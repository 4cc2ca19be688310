"""A result as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

Figure = dict[str, Any]


def cell(fig: Figure | None, digits: int = 2) -> str:
    """Median and spread, or a dash."""
    return "-" if fig is None else f"{fig['median']:.{digits}f} [{fig['min']:.{digits}f}, {fig['max']:.{digits}f}]"


def ratio(base: Figure | None, ours: Figure | None) -> str:
    """Ours over base, or a dash."""
    return "-" if base is None or ours is None or not base["median"] else f"{ours['median'] / base['median']:.3f}"


def of(*path: str) -> Callable[[dict[str, Any]], Figure | None]:
    """Look up a figure of a side."""

    def find(side: dict[str, Any]) -> Figure | None:
        found: Any = side
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else None

    return find


def numbers(keys: Any, start: str, end: str) -> list[int]:
    """The numbers in keys such as tree15_round_ms, in order."""
    middle = [key.removeprefix(start).removesuffix(end) for key in keys if key.startswith(start) and key.endswith(end)]
    return sorted(int(m) for m in middle if m.isdigit())


def wanted(data: dict[str, Any]) -> list[tuple[str, Callable[[dict[str, Any]], Figure | None], int]]:
    """Rows of the table of both sides: what, where it stands, digits."""
    ours, both = data["ours"], {**data["base"], **data["ours"]}
    rows = [("plain decoding, ms a token", of("ar_ms"), 2)]
    rows += [(f"chain of {n}, ms a round", of(f"chain{n}_round_ms"), 2) for n in numbers(both, "chain", "_round_ms")]
    rows += [(f"tree of {n} nodes, ms a round", of(f"tree{n}_round_ms"), 2) for n in numbers(ours, "tree", "_round_ms")]
    rows += [(f"pass over {n} rows, ms", of("rows", str(n)), 2) for n in sorted(map(int, both.get("rows", {})))]
    rows += [(f"prefill of {n}, tok/s", of(f"pp{n}_tok_s"), 0) for n in numbers(both, "pp", "_tok_s")]
    for mode, depths in both.get("depths", {}).items():
        unit = "ms a token" if mode == "ar" else "ms a round"
        rows += [
            (f"{mode} behind {depth} tokens, {unit}", of("depths", mode, depth, "round_ms"), 2) for depth in depths if int(depth)
        ]
    for key in both:
        if key.startswith("mem_"):
            rows.append((f"GPU memory, {key.removeprefix('mem_').removesuffix('_mb')}, MiB", of(key), 0))
    return rows


def lines_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [
        f"| {' | '.join(head)} |",
        f"|{'|'.join(['---'] + ['---:'] * (len(head) - 1))}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


# Rows that README leaves to the folder of the result.
DETAILS = re.compile(r"pass over|prefill|behind|GPU memory, (?!ar,|chain15,|tree15,)")


def sides(data: dict[str, Any], brief: bool = False) -> list[str]:
    """Base beside ours; without details if brief."""
    rows = []
    for what, find, digits in wanted(data):
        if brief and DETAILS.match(re.sub(r"^\w+ behind", "behind", what)):
            continue
        base, ours = find(data["base"]), find(data["ours"])
        if base or ours:
            rows.append((what, cell(base, digits), cell(ours, digits), ratio(base, ours)))
    return lines_of(("median [least, largest]", "base", "ours", "ours / base"), rows)


def synthetic(data: dict[str, Any]) -> list[str]:
    """Tokens a second by accepted length."""
    rows = []
    plain = of("sessions", "ar", "tok_s")(data["base"])
    for side in ("base", "ours"):
        for key, lengths in data[side].items():
            for length, one in lengths.items() if key.startswith("synth_") else ():
                name = key.removeprefix("synth_").replace("tree", "tree ")
                rows.append(
                    (f"{side}, {name}", length, cell(one["tokens_per_round"]), cell(one["tok_s"], 1), ratio(plain, one["tok_s"]))
                )
    return lines_of(("mode", "wanted tokens/round", "tokens/round", "tok/s", "/ base plain"), rows) if rows else []


def split(data: dict[str, Any]) -> list[str]:
    """Where a round's time goes."""
    pieces = {
        key: fig for key, fig in data["ours"].get("round_split_ms", {}).items() if isinstance(fig, dict) and "median" in fig
    }
    rows = [(key.replace("_", " "), cell(fig, 0 if "kernels" in key else 3)) for key, fig in pieces.items()]
    return lines_of(("piece of a round (ours)", "ms, or count"), rows) if rows else []


def tiny(data: dict[str, Any]) -> list[str]:
    """The trained pair."""
    found = data.get("tiny", {})
    rows = []
    for name, equal in found.get("equality", {}).items():
        same = f"{equal['equal_to_base_ar']} of {equal['prompts']}"
        label = name.replace("base_", "base, ") if name.startswith("base_") else f"ours, {name}"
        rows.append((label, cell(found[f"{name}_tokens_per_round"]), cell(found[f"{name}_tok_s"], 1), same))
    return lines_of(("tiny trained pair", "tokens/round", "tok/s", "texts equal to base's plain ones"), rows) if rows else []


def words(data: dict[str, Any]) -> str:
    """What the weights are and how tokens are accepted."""
    known = data.get("conditions", {})
    return f"{known.get('weights', 'random')} weights, {known.get('acceptance', 'synthetic')} acceptance"


def markdown(data: dict[str, Any], source: str, brief: bool = False) -> str:
    """All tables, each with its conditions, or the brief ones; `source` is the path of the file from where the text stands."""
    known = data.get("conditions", {})
    where = [
        data["device"],
        *(f"driver {data[key]}" if key == "driver" else data[key] for key in ("driver", "memory") if key in data),
    ]
    head = f"**{data['device']}**, {words(data)}:"
    foot = f"{', '.join(where)}; {data['date']}; series {data['series_digest']}; {known.get('target', '?')} with {known.get('draft', '?')}. "
    foot += f"{known.get('server', '')}; {known.get('chains', '')}; trees: {known.get('trees', '')} ([data]({source}))."
    if brief:
        foot = foot.removesuffix(")).") + f"), [all tables]({source.removesuffix('.json')}/README.md))."
    blocks = [[head], sides(data, brief)]
    made = synthetic(data)
    blocks += [[f"Tokens a second by tokens a round, {words(data)}:"], made] if made else []
    blocks += [block for block in (split(data),) if block and not brief]
    trained = tiny(data)
    blocks += [[f"Real acceptance ({data['tiny']['conditions']}):"], trained] if trained else []
    return "\n\n".join("\n".join(block) for block in [*blocks, [foot]])
