"""Plot how deep drafts are accepted, for chains and for trees.

python examples/07_acceptance_plot.py PLOT.png [TARGET.gguf DRAFT.gguf]     (or PLOT.svg)

A point is the share of drafting rounds that accepted a token at this depth. A tree goes on where the draft's second choice was right.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import llama_dflash
from llama_dflash import Llama
from llama_dflash.speculative import SpecConfig

try:
    import matplotlib
except ImportError:
    sys.exit("this example needs the package matplotlib: pip install matplotlib")
matplotlib.use("Agg")  # draws to files, needs no display
from matplotlib import pyplot

MODELS = Path(llama_dflash.__file__).parent / "models"  # a tiny trained pair
PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n",
    "import os\n\ndef walk(path):\n",
    "def test_parse():\n    ",
    "for line in lines:\n",
)
MODES = {"chain": SpecConfig(), "tree of 15 nodes": SpecConfig(tree=15)}  # a chain is as long as the draft allows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plot", type=Path)
    parser.add_argument("target", nargs="?", type=Path, default=MODELS / "tiny-target.gguf")
    parser.add_argument("draft", nargs="?", type=Path, default=MODELS / "tiny-draft.gguf")
    args = parser.parse_args()

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, spec in MODES.items():
        llm = Llama(args.target, draft_model_path=args.draft, spec=spec, n_ctx=2048, flash_attn=True, verbose=False)
        for prompt in PROMPTS:
            llm.create_completion(prompt, max_tokens=96, temperature=0)
        stats = llm.spec_stats
        shares = [n / stats.n_draft_rounds for n in stats.accepted_per_depth]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=f"{name}: {stats.mean_accepted:.2f} tokens a round")
        print(f"{name}: {stats.n_tokens} tokens in {stats.n_rounds} rounds, {stats.mean_accepted:.2f} a round")
        print(f"  accepted at depth 1, 2, ..: {' '.join(map(str, stats.accepted_per_depth))} of {stats.n_draft_rounds}")
        llm.close()
    axes.set(title=f"{args.target.stem}, {len(PROMPTS)} prompts, greedy", xlabel="depth of the drafted token")
    axes.set(ylabel="accepted, share of drafting rounds", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.plot, dpi=120)
    print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
