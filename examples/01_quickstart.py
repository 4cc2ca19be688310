"""Generate with draft trees and without: the same text in fewer passes of the target.

python examples/01_quickstart.py [TARGET.gguf DRAFT.gguf]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import llama_dflash
from llama_dflash import Llama
from llama_dflash.speculative import SpecConfig

MODELS = Path(llama_dflash.__file__).parent / "models"  # a tiny trained pair that writes Python, badly
PROMPT = "def fibonacci(n):\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=MODELS / "tiny-target.gguf")
    parser.add_argument("draft", nargs="?", type=Path, default=MODELS / "tiny-draft.gguf")
    args = parser.parse_args()
    options: dict[str, Any] = {"n_ctx": 2048, "flash_attn": True, "verbose": False}
    request: dict[str, Any] = {"max_tokens": 96, "temperature": 0}

    plain = Llama(args.target, **options)
    expected = plain.create_completion(PROMPT, **request)["choices"][0]["text"]

    # The same class with a draft: in every round up to 15 drafted tokens are checked in one pass of the target.
    llm = Llama(args.target, draft_model_path=args.draft, spec=SpecConfig(tree=15), **options)
    text = llm.create_completion(PROMPT, **request)["choices"][0]["text"]

    stats = llm.spec_stats
    n_plain = stats.n_tokens - stats.n_generations  # the first token comes with the prompt's pass, each other takes one
    print(PROMPT + text)
    print(f"\n{llm.spec_mode}")
    print(f"{stats.n_tokens} tokens: {n_plain} passes of the target without drafts, {stats.n_rounds} with", end=" ")
    print(f"({stats.mean_accepted:.2f} tokens a pass)")
    if text == expected:
        print("the same text as without drafts")
    else:
        # Only the exact build rules this out: two tokens can be so close that rounding decides.
        print("not the same text as without drafts: see docs/testing.md, 'What equality means here'")
    if stats.n_rounds >= n_plain:
        print("the drafts saved no pass: is this the draft of this target?", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
