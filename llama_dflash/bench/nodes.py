"""How many nodes the draft trees of a pass must have; pure functions.

A round drafts the whole budget unless the tree runs out of candidates or of cells. The server tells sums, not rounds, so
what is known of a prompt's rounds (their number, and that each begins at another token) gives bounds for its sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama_dflash import gguf
from llama_dflash.bench.run import Pass
from llama_dflash.client import Completion
from llama_dflash.spec import RunConfig


@dataclass(frozen=True)
class TreeLimits:
    """What limits the trees of one prompt.

    Attributes:
        budget: nodes besides the root.
        top_k: children that a node can have.
        n_max: depth.
        n_predict: tokens to generate.
        n_prompt: tokens of the prompt.
        n_ctx: context of the slot.
    """

    budget: int
    top_k: int
    n_max: int
    n_predict: int
    n_prompt: int
    n_ctx: int

    def n_nodes(self, n_generated: int) -> int:
        """Nodes of the tree that is drafted after `n_generated` tokens; 0 when the round drafts nothing.

        The deepest node's own token is generated too, so the depth is one less than the tokens that are left; the last
        generated token is not in a cell yet, and two cells stay free (server_slot::get_n_draft_max).
        """
        n_free = self.n_ctx - (self.n_prompt + n_generated - 1) - 2
        depth = min(self.n_max, self.n_predict - n_generated - 1, n_free)
        limit = min(self.budget, n_free)
        total, level = 0, 1
        for _ in range(depth):
            level *= self.top_k
            total += level
            if total >= limit:
                return limit
        return total


def bounds(limits: TreeLimits, n_tokens: int, n_drafted_rounds: int) -> tuple[int, int]:
    """Least and most nodes that `n_drafted_rounds` rounds can have drafted in a text of `n_tokens` tokens.

    The first round begins after one token, the prompt's; where the others begin is not known.
    """
    first, *later = [limits.n_nodes(g) for g in range(1, n_tokens)]
    # Fewer tokens left never means more nodes: the most come first, the least last, and the rounds without any behind them.
    later = [n for n in later if n > 0]
    n_later = n_drafted_rounds - 1
    return first + sum(later[max(len(later) - n_later, 0) :]), first + sum(later[:n_later])


def is_full(limits: TreeLimits, done: Completion) -> bool:
    """Whether every round of a prompt that could draft did, and as many nodes as it could, as far as the sums tell."""
    t, n_tokens = done.timings, len(done.tokens)
    n_drafted_rounds = int(t.get("draft_n_rounds", 0))
    n_places = sum(limits.n_nodes(g) > 0 for g in range(1, n_tokens))
    if n_drafted_rounds == 0:
        return n_places == 0
    if n_drafted_rounds > n_places or int(t["rounds"]) - n_drafted_rounds > n_tokens - 1 - n_places:
        return False
    least, most = bounds(limits, n_tokens, n_drafted_rounds)
    return least <= int(t["draft_n"]) <= most


def short_prompts(result: Pass, config: RunConfig, n_predict: int) -> list[int]:
    """Indices of prompts whose trees had fewer, or more, nodes than they must."""
    assert config.budget is not None
    assert config.draft is not None
    draft, effective = gguf.read(config.draft), result.effective
    # A DFlash2 draft's selector offers no more than its own number of candidates.
    n_candidates = int(draft.key("selector_top_k") or draft.n_vocab or effective["top_k"])
    out = []
    for i, done in enumerate(result.completions):
        n_prompt = int(done.timings["prompt_n"]) + int(done.timings.get("cache_n", 0))
        top_k = min(effective["top_k"], n_candidates)
        limits = TreeLimits(config.budget, top_k, effective["n_max"], n_predict, n_prompt, result.n_ctx)
        if not is_full(limits, done):
            out.append(i)
    return out
