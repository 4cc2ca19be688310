"""How a model is run: drafting mode and the files it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llama_dflash import gguf
from llama_dflash.errors import PairingError, UsageError

MODES = ("ar", "chain")
# llama.cpp's implementation for each draft format; it tells DFlash from DFlash2 by the file.
SPEC_TYPES = {"DFlash": "draft-dflash", "DFlash2": "draft-dflash", "DSpark": "draft-dspark"}


@dataclass(frozen=True)
class RunConfig:
    """One target, and how it drafts.

    Attributes:
        target: GGUF file of the target.
        draft: GGUF file of the draft; None decodes plainly (mode `ar`).
        n_max: drafted tokens per round; None means the draft's block size minus one.
        spec_type: llama.cpp's implementation; `checked` sets it by the draft's format.
    """

    target: Path
    draft: Path | None = None
    n_max: int | None = None
    spec_type: str = SPEC_TYPES["DFlash"]

    @property
    def mode(self) -> str:
        """`ar` or `chain`."""
        return "ar" if self.draft is None else "chain"

    def checked(self) -> RunConfig:
        """Return a copy with n_max resolved, after checking the files.

        Raises:
            ModelFileError, PairingError: a file is unusable, or the pair does not fit.
            UsageError: n_max is out of range.
        """
        target = gguf.read(self.target).require_target()
        if self.draft is None:
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
        return RunConfig(self.target, self.draft, n_max, SPEC_TYPES[draft.draft_format])
