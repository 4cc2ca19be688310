"""Complete many prompts with one `Llama`, and evaluate the text that all of them start with only once.

python examples/04_batch_files.py PROMPTS RESULTS.jsonl [TARGET.gguf DRAFT.gguf] [--prefix TEXT]

PROMPTS is a folder of .txt files, or a JSONL file with lines such as {"name": "add", "prompt": "def add(a, b):"}. A line of the
results has name, prompt, text, tokens, rounds, tokens_per_round, and how many of prompt_tokens were evaluated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import llama_dflash
from llama_dflash import Llama
from llama_dflash.speculative import SpecConfig

MODELS = Path(llama_dflash.__file__).parent / "models"  # a tiny trained pair
PREFIX = '"""Small functions, each with type hints and a docstring."""\n\nfrom __future__ import annotations\n\nimport math\n\n\n'


class CountingLlama(Llama):
    """Counts the prompt tokens that are evaluated."""

    n_evaluated = 0

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate a part of a prompt; with a draft, what is generated does not come through here."""
        self.n_evaluated += len(tokens)
        super().eval(tokens)


def read_prompts(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        yield from ((file.stem, file.read_text()) for file in sorted(path.glob("*.txt")))
        return
    for line in path.read_text().splitlines():
        if line.strip():
            entry = json.loads(line)
            yield entry["name"], entry["prompt"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("target", nargs="?", type=Path, default=MODELS / "tiny-target.gguf")
    parser.add_argument("draft", nargs="?", type=Path, default=MODELS / "tiny-draft.gguf")
    parser.add_argument("--prefix", default=PREFIX, help="what every prompt starts with, such as instructions or examples")
    args = parser.parse_args()
    spec = SpecConfig(tree=15)
    llm = CountingLlama(args.target, draft_model_path=args.draft, spec=spec, n_ctx=2048, flash_attn=True, verbose=False)

    # A recurrent state cannot be cut back to where two prompts part, so the state behind the prefix is kept.
    prefix = llm.tokenize(args.prefix.encode())
    llm.eval(prefix)
    state = llm.save_state()
    with args.results.open("w") as out:
        for name, prompt in read_prompts(args.prompts):
            llm.load_state(state)
            llm.reset_spec_stats()
            llm.n_evaluated = 0
            # Tokens, not text: a token that spans the end of the prefix would not be in the state.
            tokens = prefix + llm.tokenize(prompt.encode(), add_bos=False)
            text = llm.create_completion(tokens, max_tokens=64, temperature=0)["choices"][0]["text"]
            stats = llm.spec_stats
            line = {"name": name, "prompt": prompt, "text": text, "tokens": stats.n_tokens, "rounds": stats.n_rounds}
            line |= {"tokens_per_round": round(stats.mean_accepted, 2)}
            line |= {"prompt_tokens": len(tokens), "evaluated": llm.n_evaluated}
            out.write(json.dumps(line) + "\n")
            out.flush()  # a long run can be read, or stopped, at any time
            print(f"{name}: {stats.n_tokens} tokens, {stats.mean_accepted:.2f} a round,", end=" ")
            print(f"{llm.n_evaluated} of {len(tokens)} prompt tokens evaluated")


if __name__ == "__main__":
    main()
