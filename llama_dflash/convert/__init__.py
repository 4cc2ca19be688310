"""Make a draft that pinned llama.cpp loads: from a Hugging Face folder, or from a GGUF file in an older key scheme."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llama_dflash import files, gguf
from llama_dflash.convert import checkpoint, layout, old_scheme, pinned, rewrite
from llama_dflash.convert.checkpoint import Checkpoint
from llama_dflash.convert.rewrite import Value
from llama_dflash.errors import DFlashError, ModelFileError, UsageError
from llama_dflash.gguf import DRAFT_ARCH, OLD_DRAFT_ARCHS, ModelFacts


@dataclass(frozen=True)
class Result:
    """What was written.

    Attributes:
        facts: of the new file.
        notes: what the user should know.
    """

    facts: ModelFacts
    notes: tuple[str, ...] = ()


def convert(
    source: Path,
    out: Path,
    target: Path | None = None,
    outtype: str | None = None,
    force: bool = False,
    verbose: bool = False,
    note: Callable[[str], None] = lambda message: None,
) -> Result:
    """Convert a draft; `out` appears whole and checked, or not at all.

    Args:
        source: a draft's Hugging Face folder, or a GGUF file in an older key scheme.
        out: file to write.
        target: the target's GGUF file, or for a folder also the target's folder.
        outtype: f16, bf16 or q8_0 for a folder; None keeps the checkpoint's 16-bit type.
        force: overwrite `out`.
        verbose: show the converter's log on stderr.
        note: told what happens.

    Raises:
        UsageError: arguments that cannot be meant.
        ModelFileError: `source` or `target` is unusable; unclaimed and missing tensors and keys are listed.
        PairingError: the draft does not fit `target`.
        DFlashError: the pinned converter cannot run or failed.
    """
    files.check_out(out, (source, *([target] if target else [])), force)
    with files.temporary_beside(out) as part:
        if source.is_dir():
            notes = _convert_folder(source, part, out, target, outtype, verbose, note)
        else:
            notes = _convert_file(source, part, out, target, outtype)
        files.publish(part, out, force)
    return Result(gguf.read(out), tuple(notes))


def _convert_file(source: Path, part: Path, out: Path, target: Path | None, outtype: str | None) -> list[str]:
    if outtype is not None:
        raise UsageError(f"--outtype is {outtype} but {source} is a GGUF file, whose tensors stay as they are", "leave it out")
    facts = gguf.read(source)
    if facts.arch == DRAFT_ARCH:
        raise ModelFileError(
            f"{source} has the key scheme of pinned llama.cpp already ({DRAFT_ARCH!r}), expected an older one", "use it as it is"
        )
    if facts.arch not in OLD_DRAFT_ARCHS:
        raise ModelFileError(
            f"{source} is a {facts.arch!r} model, expected a draft in an older key scheme ({' or '.join(OLD_DRAFT_ARCHS)})",
            "name a draft's GGUF file or its Hugging Face folder",
        )
    if target is not None and target.is_dir():
        raise UsageError(
            f"--target is the folder {target}, expected a GGUF file for a source that is one", "name the target's GGUF file"
        )
    goal = gguf.read(target).require_target() if target else None
    files.require_space(out.parent, facts.size_bytes, out.name)
    reader = rewrite.open_file(source)
    plan = old_scheme.plan(facts, rewrite.read_values(reader), goal, _values(target))
    rewrite.write(reader, part, DRAFT_ARCH, plan.values, plan.names)
    _check(part, out, goal, set(plan.names.values()))
    return plan.notes


def _values(path: Path | None) -> dict[str, Value]:
    return rewrite.read_values(rewrite.open_file(path)) if path else {}


def _convert_folder(
    source: Path, part: Path, out: Path, target: Path | None, outtype: str | None, verbose: bool, note: Callable[[str], None]
) -> list[str]:
    draft = checkpoint.read(source)
    if target is None:
        raise UsageError(
            f"{source} is a checkpoint, which has no tokenizer, expected --target",
            "name the target's folder or its GGUF file with --target",
        )
    claimed = pinned.claims(draft.tensors, draft.n_layer)
    if problems := layout.problems(claimed, draft.n_layer, draft.is_dflash2):
        raise ModelFileError(
            f"{source} cannot be converted: {'; '.join(problems)}; expected what the pinned converter takes",
            "check that the folder is complete",
        )
    goal = _folder_facts(target) if target.is_dir() else gguf.read(target).require_target()
    expected = draft.facts({claimed[name]: shape[::-1] for name, shape in draft.tensors.items()})
    gguf.check_pair(goal, expected)
    if goal.tokens:
        old_scheme.check_rows(expected, len(goal.tokens))
    pinned.check_packages()
    # Twice for a GGUF target: the tokenizer is added in a second pass.
    files.require_space(out.parent, draft.size_bytes * (1 if target.is_dir() else 2), out.name)
    note(f"converting {len(draft.tensors)} tensors with the pinned converter, rope_theta {draft.rope_theta:g}")
    if target.is_dir():
        with pinned.prepared(draft) as folder:
            pinned.run(folder, part, target.resolve(), outtype or "auto", verbose)
    else:
        _with_tokenizer_of(draft, part, target, goal, outtype, verbose)
    facts = _check(part, out, goal, set(expected.tensors))
    base = facts.key("rope.freq_base")
    if base is None or abs(base - draft.rope_theta) > 1e-6 * draft.rope_theta:
        raise DFlashError(
            f"the converter wrote rope.freq_base {base}, expected {draft.rope_theta:g}", "report this with the config.json"
        )
    return []


def _with_tokenizer_of(draft: Checkpoint, part: Path, target: Path, goal: ModelFacts, outtype: str | None, verbose: bool) -> None:
    sections = [int(n) for n in goal.key("rope.dimension_sections") or []]
    with files.temporary_beside(part) as bare:
        with pinned.prepared(draft) as folder, pinned.stand_in_target(sections) as stand_in:
            pinned.run(folder, bare, stand_in, outtype or "auto", verbose)
        facts = gguf.read(bare)
        reader = rewrite.open_file(bare)
        values = rewrite.read_values(reader)
        old_scheme.add_tokenizer(values, _values(target), dataclasses.replace(facts, path=draft.folder))
        rewrite.write(reader, part, DRAFT_ARCH, values, {name: name for name in facts.tensors})


def _folder_facts(folder: Path) -> ModelFacts:
    """What pairing needs of a target, from its folder."""
    config = checkpoint.read_config(folder / "config.json")
    text = config.get("text_config")
    inner = {**config, **text} if isinstance(text, dict) else config
    sizes = {"embedding_length": inner.get("hidden_size"), "block_count": inner.get("num_hidden_layers")}
    if not all(isinstance(n, int) for n in sizes.values()):
        raise ModelFileError(
            f"{folder / 'config.json'} lacks hidden_size or num_hidden_layers; expected a target's folder", "check --target"
        )
    fields = {"general.architecture": "target"} | {f"target.{key}": n for key, n in sizes.items()}
    return ModelFacts(folder, 0, fields, {}, "none", ())


def _check(part: Path, out: Path, target: ModelFacts | None, tensors: set[str]) -> ModelFacts:
    """Read the new file as `info` does, and its pairing, before it gets its name."""
    facts = gguf.read(part)
    named = dataclasses.replace(facts, path=out).require_draft()
    if target is not None:
        gguf.check_pair(target, named)
    if lost := tensors ^ facts.tensors.keys():
        raise DFlashError(
            f"the new file and its source differ in {layout.listed(lost)}, expected the same tensors", "report this"
        )
    return facts
