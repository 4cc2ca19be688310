"""`Llama`: llama-cpp-python's class over the bundled, patched library, with drafts."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import Self

from llama_dflash._bindings import llama_cpp
from llama_dflash._llama_arguments import draft_path, target_path
from llama_dflash.errors import UsageError
from llama_dflash.speculative import PARTIAL_ONLY, SpecConfig, SpecStats, Speculative, SpeculativeError

_api = llama_cpp.llama_cpp

# Tokens that a `draft_model` callable may propose if it does not tell.
_CALLABLE_N_MAX = 15


@dataclass(frozen=True)
class _Checkpoint:
    """What a recurrent target and its draft cannot take back, at one position."""

    n_tokens: int
    pos: int  # the next one
    target: bytes
    draft: bytes


class Llama(llama_cpp.Llama):  # type: ignore[misc, name-defined]
    """A drop-in for `llama_cpp.Llama`: same arguments, same methods, same results; with a draft in fewer passes.

    `isinstance(llm, llama_cpp.Llama)` holds, so code that takes llama-cpp-python's class takes this one.
    Whatever ends a generation (a stop string, a limit, the caller who stops iterating), a token that was not emitted is in no
    state. With a draft, a prompt that is the one before, or goes on from the whole of it, is not evaluated anew on hybrids either.

    Args:
        model_path: a GGUF file with a target model.
        draft_model_path: a GGUF file with its draft; None decodes plainly.
        spec: how to draft; chains of the draft's full length by default.
        draft_model: llama-cpp-python's callable that proposes tokens; needs no `logits_all`, and works on hybrids.
        **kwargs: everything else that `llama_cpp.Llama` takes. `flash_attn=True` is recommended with drafts.

    Raises:
        ModelFileError: a file is missing, damaged, or a draft instead of a target (then a TypeError too).
        PairingError, UsageError: the draft does not fit, or an option cannot be had.
        SpeculativeError: the context cannot verify drafts, with the reason.
        TypeError: a draft is given as something else than asked for.
    """

    n_tokens: int
    _spec: Speculative | None
    _round: object | None  # the open one
    _row: int | None  # of the last token, when its logits are those of a round
    _checkpoint: _Checkpoint | None
    _max_tokens: int | None  # for the generation that starts
    _is_known: bool  # whether the context holds what this object says: False while it changes, and after Ctrl-C there

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make the object with what `llama_cpp.Llama.__del__` closes, however `__init__` ends."""
        self: Self = super().__new__(cls)
        self._stack = contextlib.ExitStack()
        self._spec = self._round = self._row = self._checkpoint = self._max_tokens = None
        self._is_known = True
        return self

    def __init__(
        self,
        model_path: str | Path,
        *,
        draft_model_path: str | Path | None = None,
        spec: SpecConfig | None = None,
        draft_model: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        target = target_path(model_path)
        draft = draft_path(draft_model_path, draft_model, spec)
        self._spec_config = spec
        self._draft_path = draft
        self._n_generations = self._n_emitted = 0
        config = spec or SpecConfig()
        if draft is not None or draft_model is not None:
            config = config.checked(target, draft)
        # The callable is not for the base class: it would keep the logits of all tokens, and roll back what cannot be.
        super().__init__(model_path=str(target), **kwargs)
        self.draft_model = draft_model
        if draft_model is not None and config.n_max is None:
            n_max = getattr(draft_model, "num_pred_tokens", None)
            n_max = n_max if isinstance(n_max, int) else _CALLABLE_N_MAX
            room = min(self.n_batch, int(self.context_params.n_ubatch)) - 1
            config = SpecConfig(n_max=max(1, min(n_max, room)), rollback=config.rollback)
        if draft is not None or draft_model is not None:
            n_gpu_layers = int(self.model_params.n_gpu_layers)
            self._spec = Speculative(
                self._model.model, self._ctx.ctx, draft, config, n_gpu_layers=n_gpu_layers, verbose=bool(self.verbose)
            )
            self._stack.callback(self._spec.close)
            if self.verbose:
                print(f"Llama: drafts: {self._spec.mode_text}", file=sys.stderr)

    # ----------------------------------------------------------------------------------------------------------------
    # what is going on

    @property
    def spec_mode(self) -> str:
        """How this drafts, in one line; `mode = ar` without a draft."""
        return self._spec.mode_text if self._spec else "mode = ar, no drafting: not requested"

    @property
    def spec_stats(self) -> SpecStats:
        """Counts since this was made or `reset_spec_stats`; all 0 without a draft."""
        if not self._spec:
            return SpecStats()
        stats, accepted = self._spec.stats()
        return SpecStats(
            self._n_generations, self._n_emitted, stats.n_rounds, stats.n_draft_rounds, stats.n_nodes, stats.n_accepted, accepted
        )

    def reset_spec_stats(self) -> None:
        """Count anew."""
        self._n_generations = self._n_emitted = 0
        if self._spec:
            self._spec.reset_stats()

    # ----------------------------------------------------------------------------------------------------------------
    # llama_cpp.Llama

    def reset(self) -> None:
        """Forget everything."""
        self._require_open()
        self._drop_round()
        super().reset()
        self._row = self._checkpoint = None
        if self._spec:
            self._spec.seq_rm(0)
        self._is_known = True

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens behind those of the context."""
        self._require_open()
        if not self._spec:
            super().eval(tokens)
            return
        self._require_known()
        for i in range(0, len(tokens), self.n_batch):
            piece = tokens[i : i + self.n_batch]
            pos = self._next_pos()
            self._is_known = False
            try:
                super().eval(piece)
            except Exception:
                self._is_known = self._next_pos() == pos
                raise
            self._row = None
            # An image takes other positions than tokens.
            self._spec.process(piece, self._next_pos() - len(piece))
            self._is_known = True

    def sample(self, *args: Any, idx: int | None = None, **kwargs: Any) -> int:
        """Sample behind the last token."""
        if self._row is not None and idx in (None, self.n_tokens - 1):
            idx = self._row + self.n_tokens
        return int(super().sample(*args, idx=idx, **kwargs))

    def generate(  # noqa: D417
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        grammar: Any = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Create a generator of tokens from a prompt, as `llama_cpp.Llama.generate` does.

        Args:
            tokens: of the prompt.
            reset: start anew, but reuse what the context has of this prompt.

        Yields:
            Tokens; what is sent back is a guess of what follows, and verified as a draft.
        """
        sampling: dict[str, Any] = {
            **{"top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p, "temp": temp, "tfs_z": tfs_z},
            **{"repeat_penalty": repeat_penalty, "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty},
            **{"mirostat_mode": mirostat_mode, "mirostat_tau": mirostat_tau, "mirostat_eta": mirostat_eta},
            **{"penalize_nl": penalize_nl, "logits_processor": logits_processor, "grammar": grammar},
        }
        self._require_open()
        limit, self._max_tokens = self._limit(len(tokens)), None
        if not self._spec:
            yield from super().generate(tokens, reset=reset, stopping_criteria=stopping_criteria, **sampling)
            return
        self._end_round()
        self._mirostat_mu = ctypes.c_float(2.0 * mirostat_tau)
        sampler = self._sampler = self._init_sampler(**sampling)
        self._eval_prompt(list(tokens), reset)
        n_emitted = 0
        this_round: object | None = None
        try:
            while True:
                token = int(sampler.sample(self._ctx, -1 if self._row is None else self._row))
                # llama_cpp.Llama passes the first row of scores, too.
                if stopping_criteria is not None and stopping_criteria(self._input_ids, self._scores[0, :]):
                    return
                self._n_generations += n_emitted == 0
                self._n_emitted += 1
                n_emitted += 1
                sent = yield token
                guess = [] if sent is None else [int(t) for t in sent]
                if not guess and this_round is not None and this_round is self._round and self._take(token):
                    continue
                self._end_round()
                # A character cut in two may go past the limit.
                this_round = self._begin_round(token, -1 if limit < 0 else max(1, limit - n_emitted), guess)
        finally:
            if this_round is self._round:
                self._end_round()

    def _create_completion(self, *args: Any, max_tokens: int | None = 16, **kwargs: Any) -> Any:
        self._require_open()
        self._max_tokens = max_tokens
        try:
            yield from super()._create_completion(*args, max_tokens=max_tokens, **kwargs)
        finally:
            self._max_tokens = None

    def save_state(self) -> Any:
        """Save the context, the draft's included."""
        self._require_open()
        self._require_known()
        state = super().save_state()
        if self._spec:
            state.draft_state = self._spec.state_get()
        return state

    def load_state(self, state: Any) -> None:
        """Take a saved context back; one of another `Llama` too, whose draft's part may not be of use here."""
        self._require_open()
        self._drop_round()
        super().load_state(state)
        self._row = self._checkpoint = None
        if self._spec and not self._spec.state_set(getattr(state, "draft_state", b"")):
            self._spec.seq_rm(0)
        self._is_known = True

    def __getstate__(self) -> dict[str, Any]:
        """What `__init__` takes, for pickle."""
        return {**super().__getstate__(), "draft_model_path": self._draft_path, "spec": self._spec_config}

    # ----------------------------------------------------------------------------------------------------------------
    # a round

    def _limit(self, n_prompt: int) -> int:
        """Tokens that the caller can still want; negative: no limit."""
        if self._max_tokens is None:
            return -1
        room = int(self._n_ctx) - n_prompt
        return min(self._max_tokens, room) if self._max_tokens > 0 else room

    def _next_pos(self) -> int:
        return int(_api.llama_memory_seq_pos_max(self._ctx.memory, 0)) + 1

    def _begin_round(self, token: int, n_left: int, draft: Sequence[int]) -> object:
        assert self._spec is not None
        if self.n_tokens >= self._n_ctx:
            raise SpeculativeError(f"the context of {self._n_ctx} tokens is full", "make it larger (n_ctx)")
        if not draft and self.draft_model is not None:
            self.input_ids[self.n_tokens : self.n_tokens + 1] = token
            draft = [int(t) for t in self.draft_model(self.input_ids[: self.n_tokens + 1])]
        self._is_known = False
        row = self._spec.round_begin(token, n_left, draft)
        self._round = object()
        self._add(token, row)
        self._is_known = True
        return self._round

    def _take(self, token: int) -> bool:
        assert self._spec is not None
        self._is_known = False
        row = self._spec.round_take(token)
        if row is not None:
            self._add(token, row)
        self._is_known = True
        return row is not None

    def _add(self, token: int, row: int) -> None:
        """A token of the round is part of the context now."""
        # llama.cpp rounds n_ctx up, the arrays have the size asked for: what is behind it gets lost, as in the base class.
        self.input_ids[self.n_tokens : self.n_tokens + 1] = token
        self.n_tokens += 1
        self._row = row
        self._requires_eval = False
        if self._logits_all:
            logits = self._ctx.get_logits_ith(row)
            self.scores[self.n_tokens - 1 : self.n_tokens, :] = np.ctypeslib.as_array(logits, shape=(self._n_vocab,))

    def _end_round(self) -> None:
        if self._round is not None and self._spec is not None and self._is_known:
            self._is_known = False
            self._round = None
            if not self._spec.is_closed:  # a stream may outlive its model
                self._spec.round_end()
            self._is_known = True

    def _drop_round(self) -> None:
        """The context is about to be replaced as a whole."""
        self._is_known = False
        self._round = None
        if self._spec is not None:
            self._spec.round_drop()

    def _require_open(self) -> None:
        if self._ctx.ctx is None:  # going on would end the process
            raise UsageError("the Llama is closed, expected an open one", "make another")

    def _require_known(self) -> None:
        self._end_round()
        if not self._is_known:
            raise SpeculativeError(
                "what the context holds is not known, as a call was cut short",
                "call reset() or load_state(), or generate from a whole prompt",
            )

    # ----------------------------------------------------------------------------------------------------------------
    # a prompt

    def _eval_prompt(self, tokens: list[int], reset: bool) -> None:
        assert self._spec is not None
        n_same = 0
        if not reset:
            self._require_known()
        elif self._is_known and self.n_tokens > 0:
            n_same = self.longest_token_prefix(self._input_ids.tolist(), tokens)
            if n_same == len(tokens) == self.n_tokens and not self._requires_eval:
                return
            # The last token is needed for its logits.
            n_same = self._rewind(n_same - 1 if n_same == len(tokens) else n_same)
        if reset:
            if n_same == 0:
                self.reset()
            elif self.verbose:
                print(
                    f"Llama.generate: {n_same} prefix-match hit, remaining {len(tokens) - n_same} prompt tokens to eval",
                    file=sys.stderr,
                )
        tokens = tokens[n_same:]
        if (self._is_recurrent or self._is_hybrid) and tokens:
            self.eval(tokens[:-1])
            if self.n_tokens > 0 and (self._checkpoint is None or self._checkpoint.n_tokens != self.n_tokens):
                self._checkpoint = self._make_checkpoint()
            tokens = tokens[-1:]
        self.eval(tokens)
        if self._requires_eval:  # sampling without logits would end the process
            raise UsageError("the prompt has no tokens, expected one or more")
        self._spec.begin(self._input_ids.tolist())

    def _rewind(self, n: int) -> int:
        """Make the context end before token `n`, or earlier if it must; the number of tokens kept, 0: start anew."""
        assert self._spec is not None
        if n == self.n_tokens:
            return n
        self._is_known = False
        if n > 0 and self._ctx.kv_cache_seq_rm(-1, n, -1):
            self._spec.seq_rm(n)
        elif self._checkpoint is not None and self._checkpoint.n_tokens <= n and self._restore(self._checkpoint):
            n = self._checkpoint.n_tokens
        else:
            return 0
        self.n_tokens = n
        self._row = None
        self._requires_eval = self._is_known = True
        return n

    def _make_checkpoint(self) -> _Checkpoint:
        assert self._spec is not None
        size = _api.llama_state_seq_get_size_ext(self._ctx.ctx, 0, PARTIAL_ONLY)
        data = (ctypes.c_uint8 * size)()
        if _api.llama_state_seq_get_data_ext(self._ctx.ctx, data, size, 0, PARTIAL_ONLY) != size:
            raise SpeculativeError("the target's state could not be read")
        return _Checkpoint(int(self.n_tokens), self._next_pos(), bytes(data), self._spec.state_get(PARTIAL_ONLY))

    def _restore(self, checkpoint: _Checkpoint) -> bool:
        assert self._spec is not None
        size = len(checkpoint.target)
        data = (ctypes.c_uint8 * size).from_buffer_copy(checkpoint.target)
        if _api.llama_state_seq_set_data_ext(self._ctx.ctx, data, size, 0, PARTIAL_ONLY) != size:
            return False
        if not self._ctx.kv_cache_seq_rm(-1, checkpoint.pos, -1):
            return False
        self._spec.state_set(checkpoint.draft, PARTIAL_ONLY)  # if not, it drafts worse for a while
        return True
