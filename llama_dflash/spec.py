"""How a model is run: drafting mode and the files it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_dflash import gguf
from llama_dflash.errors import PairingError, UsageError

MODES = ("ar", "chain", "tree")
# llama.cpp's implementation for each draft format; it tells DFlash from DFlash2 by the file.
SPEC_TYPES = {"DFlash": "draft-dflash", "DFlash2": "draft-dflash", "DSpark": "draft-dspark"}
TREE_FORMATS = ("DFlash", "DFlash2")
ROLLBACKS = ("replay", "snapshot")
# A tree and its root fill at most 256 rows of a pass.
BUDGET_LIMIT = 255
TOP_K_LIMIT = 64


@dataclass(frozen=True)
class RunConfig:
    """One target, and how it drafts.

    Attributes:
        target: GGUF file of the target.
        draft: GGUF file of the draft; None decodes plainly (mode `ar`).
        n_max: drafted tokens in a row per round: a chain's length, a tree's depth; None means the draft's block size minus one.
        spec_type: llama.cpp's implementation; `checked` sets it by the draft's format.
        budget: nodes of a draft tree per round, the root not counted; None drafts a chain.
        top_k: children per node at most; None is llama.cpp's default.
        spine: nodes of the greedy chain that a tree starts with; None is llama.cpp's default.
        rollback: how the target forgets what was not accepted, `replay` or `snapshot`; None leaves it to llama.cpp.
    """

    target: Path
    draft: Path | None = None
    n_max: int | None = None
    spec_type: str = SPEC_TYPES["DFlash"]
    budget: int | None = None
    top_k: int | None = None
    spine: int | None = None
    rollback: str | None = None

    @property
    def mode(self) -> str:
        """`ar`, `chain` or `tree`."""
        if self.draft is None:
            return "ar"
        return "chain" if self.budget is None else "tree"

    @property
    def rows_per_round(self) -> int:
        """Tokens that the target checks at once, at most; `self` must be checked."""
        return 1 + max(self.n_max or 0, self.budget or 0)

    def checked(self) -> RunConfig:
        """Return a copy with n_max resolved, after checking the files.

        Raises:
            ModelFileError, PairingError: a file is unusable, or the pair does not fit.
            UsageError: a number is out of range, or an option cannot be had with the others or with this draft.
        """
        target = gguf.read(self.target).require_target()
        if self.draft is None:
            self._refuse_options_of_drafts()
            return self
        draft = gguf.read(self.draft)
        gguf.check_pair(target, draft)
        limit = draft.block_size - 1
        if limit < 1:
            raise PairingError(f"{draft.path.name} has block size {draft.block_size}, expected at least 2", "use another draft")
        n_max = limit if self.n_max is None else self.n_max
        if not 1 <= n_max <= limit:
            raise UsageError(
                f"n_max is {n_max}, expected 1..{limit} for a draft of block size {draft.block_size}",
                "leave it out for the longest draft",
            )
        if self.rollback not in (None, *ROLLBACKS):
            raise UsageError(f"rollback is {self.rollback!r}, expected {' or '.join(ROLLBACKS)}", "leave it out for the default")
        self._check_tree(draft, n_max)
        return replace(self, n_max=n_max, spec_type=SPEC_TYPES[draft.draft_format])

    def _refuse_options_of_drafts(self) -> None:
        for name in ("budget", "top_k", "spine", "rollback"):
            value = getattr(self, name)
            if value is not None:
                raise UsageError(f"{name} is {value} but there is no draft, expected one", "give a draft, or leave it out")

    def _check_tree(self, draft: gguf.ModelFacts, n_max: int) -> None:
        if self.budget is None:
            for name in ("top_k", "spine"):
                value = getattr(self, name)
                if value is not None:
                    raise UsageError(f"{name} is {value} without a budget, expected a draft tree", "give a budget, or leave it out")
            return
        if not 1 <= self.budget <= BUDGET_LIMIT:
            raise UsageError(
                f"budget is {self.budget}, expected 1..{BUDGET_LIMIT} nodes: with its root a tree fills at most {BUDGET_LIMIT + 1} rows",
                "15 is a good first value",
            )
        if self.top_k is not None and not 1 <= self.top_k <= TOP_K_LIMIT:
            raise UsageError(f"top_k is {self.top_k}, expected 1..{TOP_K_LIMIT} children per node", "leave it out for the default")
        if self.spine is not None and not 0 <= self.spine <= n_max:
            raise UsageError(f"spine is {self.spine}, expected 0..{n_max}, the depth of the tree", "leave it out for the default")
        if draft.draft_format not in TREE_FORMATS:
            raise UsageError(
                f"budget is {self.budget} but {draft.path.name} is a {draft.draft_format} draft, "
                f"expected {' or '.join(TREE_FORMATS)} for a tree",
                "leave the budget out for a chain",
            )
        if self.rollback == "snapshot":
            raise UsageError(
                f"rollback is snapshot with a budget of {self.budget}, expected replay: a tree keeps no snapshots",
                "leave one of them out",
            )

    def difference(self, effective: dict[str, Any]) -> str:
        """What a server does otherwise than this asks for, by its `Client.effective_mode`; empty if nothing.

        A server of the unpatched llama.cpp does not tell and is taken to decode plainly.
        """
        if effective["mode"] != self.mode and (effective["mode"], self.mode) != ("unknown", "ar"):
            why = f": {effective['reason']}" if effective.get("reason") else ""
            return f"the server runs in mode {effective['mode']}, expected {self.mode}{why}"
        if self.rollback is not None and effective.get("rollback") != self.rollback:
            return f"the server's rollback is {effective.get('rollback') or 'unknown'}, expected {self.rollback}"
        return ""
