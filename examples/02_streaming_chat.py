"""Chat with drafts: tokens are printed as they come, and a second question goes on from the first one's state.

python examples/02_streaming_chat.py [TARGET.gguf DRAFT.gguf]

The replies go to stdout, the counts to stderr.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import llama_dflash
from llama_dflash import Llama
from llama_dflash.speculative import SpecConfig

MODELS = Path(llama_dflash.__file__).parent / "models"  # a tiny trained pair; it knows code, not how to chat
QUESTIONS = ("Write a class for a stack.", "Add a method that tells whether it is empty.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=MODELS / "tiny-target.gguf")
    parser.add_argument("draft", nargs="?", type=Path, default=MODELS / "tiny-draft.gguf")
    args = parser.parse_args()

    llm = Llama(args.target, draft_model_path=args.draft, spec=SpecConfig(tree=15), n_ctx=2048, flash_attn=True, verbose=False)
    messages = []
    for question in QUESTIONS:
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        llm.reset_spec_stats()
        reply = ""
        for chunk in llm.create_chat_completion(messages, max_tokens=64, temperature=0, stream=True):
            piece = chunk["choices"][0]["delta"].get("content") or ""  # the first chunk has the role only
            print(piece, end="", flush=True)
            reply += piece
        messages.append({"role": "assistant", "content": reply})
        print()
        stats = llm.spec_stats
        print(f"[{stats.n_tokens} tokens in {stats.n_rounds} rounds, {stats.mean_accepted:.2f} a round]", file=sys.stderr)


if __name__ == "__main__":
    main()
