"""Pairs of target and draft that `pull` knows by name.

Only pairs whose repositories, file names and key scheme public sources name are listed (seen in September and October 2026);
drafts in an older key scheme are not. Sizes come from the hub.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One file of a repository."""

    repo: str
    file: str


@dataclass(frozen=True)
class Preset:
    """A target and the draft that was trained for it."""

    target: Part
    draft: Part


PRESETS = {
    # The draft's repository was made for llama.cpp's own DFlash; one public list names the file, with its SHA-256.
    "qwen3.5-27b": Preset(
        Part("unsloth/Qwen3.5-27B-GGUF", "Qwen3.5-27B-Q4_K_M.gguf"),
        Part("AtomicChat/Qwen3.5-27B-DFlash-GGUF", "Qwen3.5-27B-DFlash.Q8_0.gguf"),
    ),
    # Q8_0: users report that this draft's sliding window layers lose accepted tokens at four bits.
    "qwen3.6-27b": Preset(
        Part("ggml-org/Qwen3.6-27B-GGUF", "Qwen3.6-27B-Q4_K_M.gguf"),
        Part("ggml-org/Qwen3.6-27B-GGUF", "dflash-Qwen3.6-27B-Q8_0.gguf"),
    ),
    # A DFlash2 draft.
    "qwen3.8-27b": Preset(
        Part("ggml-org/Qwen3.8-27B-GGUF", "Qwen3.8-27B-Q4_K_M.gguf"),
        Part("z-lab/Qwen3.8-27B-DFlash2-GGUF", "Qwen3.8-27B-DFlash2-Q4_K_M.gguf"),
    ),
}
