"""Call a function through the model: the tool's schema becomes a grammar, so the arguments are JSON that fits it.

python examples/03_tools.py [TARGET.gguf DRAFT.gguf]

Drafted tokens are held to the grammar like any others. `tool_choice` names the tool, so that the model must call it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import llama_dflash
from llama_dflash import Llama
from llama_dflash.speculative import SpecConfig

MODELS = Path(llama_dflash.__file__).parent / "models"  # a tiny trained pair; what it asks for means nothing
# The bindings' grammar holds types, enum, required and lengths; it does not know minimum and maximum.
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "language": {"type": "string", "enum": ["python", "rust", "c"]},
        "words": {"type": "string", "minLength": 3, "maxLength": 20},
        "limit": {"type": "integer", "enum": [5, 10, 20]},
        "newest_first": {"type": "boolean"},
    },
    "required": ["language", "words", "limit", "newest_first"],
}
DESCRIPTION = "Search a package index."
TOOL = {"type": "function", "function": {"name": "search", "description": DESCRIPTION, "parameters": PARAMETERS}}


def search(language: str, words: str, limit: int, newest_first: bool) -> str:
    return f"{limit} {language} packages with {words!r}, {'newest' if newest_first else 'best'} first"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=MODELS / "tiny-target.gguf")
    parser.add_argument("draft", nargs="?", type=Path, default=MODELS / "tiny-draft.gguf")
    args = parser.parse_args()

    llm = Llama(args.target, draft_model_path=args.draft, spec=SpecConfig(tree=15), n_ctx=2048, flash_attn=True, verbose=False)
    reply = llm.create_chat_completion(
        messages=[{"role": "user", "content": "Which new Python packages parse dates?"}],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "search"}},
        max_tokens=256,  # too few would cut the JSON
        temperature=0,
    )
    call = reply["choices"][0]["message"]["tool_calls"][0]["function"]
    arguments = json.loads(call["arguments"])
    print(f"call:      {call['name']}({call['arguments'].strip()})")
    print(f"arguments: {arguments}")
    print(f"result:    {search(**arguments)}")
    stats = llm.spec_stats
    print(f"rounds:    {stats.n_rounds} for {stats.n_tokens} tokens, {stats.mean_accepted:.2f} a round")


if __name__ == "__main__":
    main()
