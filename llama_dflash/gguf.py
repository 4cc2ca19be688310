"""Facts from a GGUF header, and whether a draft fits its target."""

from __future__ import annotations

import hashlib
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from llama_dflash.errors import ModelFileError, PairingError

MAGIC = b"GGUF"
DRAFT_ARCH = "dflash"
# Key schemes of older forks; pinned llama.cpp knows neither.
OLD_DRAFT_ARCHS = ("dflash-draft", "qwen35-dflash-draft")


@dataclass(frozen=True)
class ModelFacts:
    """What the header of one GGUF file says.

    Attributes:
        fields: metadata, key to value, arrays as lists; the token list is in `tokens`.
        tensors: tensor name to shape, GGUF order (`{ne0, ne1, ...}`).
        quant: the tensor type that holds most of the weights, such as `F16` or `Q4_K`.
        tokens: the vocabulary, empty if the file has none.
    """

    path: Path
    size_bytes: int
    fields: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    quant: str
    tokens: tuple[str, ...]

    @property
    def arch(self) -> str:
        """`general.architecture`."""
        return str(self.fields.get("general.architecture", ""))

    @property
    def name(self) -> str:
        """`general.name`, else the file's name."""
        return str(self.fields.get("general.name") or self.path.stem)

    def key(self, name: str) -> Any:
        """Value of `<arch>.<name>`, or None."""
        return self.fields.get(f"{self.arch}.{name}")

    @property
    def is_draft(self) -> bool:
        """Whether the file is a DFlash-family draft, which cannot run without a target."""
        return self.arch == DRAFT_ARCH or self.arch in OLD_DRAFT_ARCHS

    @property
    def n_embd(self) -> int:
        """Width of the hidden state."""
        return int(self.key("embedding_length") or 0)

    @property
    def n_layer(self) -> int:
        """Number of layers, those of an MTP head (`nextn_predict_layers`) left out."""
        return int(self.key("block_count") or 0) - self.n_layer_mtp

    @property
    def n_layer_mtp(self) -> int:
        """Layers of the MTP head behind the others; they are loaded for `draft-mtp` only."""
        return int(self.key("nextn_predict_layers") or 0)

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return len(self.tokens) or int(self.key("vocab_size") or 0)

    @property
    def block_size(self) -> int:
        """Tokens in one draft block, the anchor included; 0 if the file is no draft."""
        return int(self.key("block_size") or 0) if self.is_draft else 0

    @property
    def target_layers(self) -> list[int]:
        """Target layers whose inputs the draft reads."""
        return [int(i) for i in self.key("target_layers") or []]

    @property
    def draft_format(self) -> str:
        """`DFlash`, `DFlash2`, `DSpark`, or an empty string."""
        if not self.is_draft:
            return ""
        if "selector_hidden.weight" in self.tensors:
            return "DFlash2"
        return "DSpark" if "markov_w1.weight" in self.tensors else "DFlash"

    @cached_property
    def sha256(self) -> str:
        """Hash of the whole file."""
        h = hashlib.sha256()
        with self.path.open("rb") as f:
            for piece in iter(lambda: f.read(1 << 22), b""):
                h.update(piece)
        return h.hexdigest()

    @property
    def summary(self) -> dict[str, str]:
        """The model object of every JSON result."""
        return {"name": self.name, "arch": self.arch, "quant": self.quant, "sha256": self.sha256}

    def require_target(self) -> ModelFacts:
        """Raise ModelFileError if this is a draft; else return self."""
        if self.is_draft:
            raise ModelFileError(
                f"{self.path} is a draft (architecture {self.arch!r}), expected a target model",
                "pass it as the draft (-md), with its target as the model (-m)",
            )
        return self

    def require_draft(self) -> ModelFacts:
        """Raise ModelFileError if this is not a draft that the pinned llama.cpp loads; else return self."""
        if self.arch in OLD_DRAFT_ARCHS:
            raise ModelFileError(
                f"{self.path} is a draft in an older key scheme ({self.arch!r}), expected {DRAFT_ARCH!r}",
                "rewrite it with 'llama-dflash convert'",
            )
        if self.arch != DRAFT_ARCH:
            raise ModelFileError(
                f"{self.path} is a {self.arch!r} model, expected a draft (architecture {DRAFT_ARCH!r})",
                "pass it as the model (-m), and a draft trained for it as the draft (-md)",
            )
        return self


def read(path: Path) -> ModelFacts:
    """Read the header of a GGUF file.

    Raises:
        ModelFileError: missing, not GGUF, truncated or damaged.
    """
    path = Path(path)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path} is a folder, expected a GGUF file", "name the .gguf file in it")
        # Opening a pipe waits for its writer, and the reader maps the file into memory.
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path} is no regular file, expected a GGUF file", "save the model to a file first")
        with path.open("rb") as f:
            magic = f.read(4)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise ModelFileError(f"{path}: no such file, expected a GGUF model", "check the path") from e
    except OSError as e:
        raise ModelFileError(f"{path} cannot be read ({e.strerror}), expected a GGUF file", "check its permissions") from e
    if magic != MAGIC:
        raise ModelFileError(
            f"{path} is not a GGUF file: it starts with {magic!r}, expected {MAGIC!r}", "convert the model to GGUF first"
        )
    return _parse(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=8)  # one command reads the same header several times
def _parse(path: Path, size_bytes: int, mtime_ns: int) -> ModelFacts:
    from gguf import GGUFReader  # parsing is slow to import and only some commands need it

    class BoundedReader(GGUFReader):  # type: ignore[misc]
        # Past the end the base class reads nothing and goes on, without end when the length of an array is damaged.
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **kwargs: Any) -> Any:
            values = super()._get(offset, dtype, count, *order, **kwargs)
            if len(values) != int(count):
                raise ValueError(f"it ends before {int(count)} values at byte {int(offset)}")
            return values

    try:
        reader = BoundedReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if name != "tokenizer.ggml.tokens"}
        token_field = reader.fields.get("tokenizer.ggml.tokens")
        tokens = tuple(token_field.contents()) if token_field is not None else ()
        shapes = {t.name: tuple(int(n) for n in t.shape) for t in reader.tensors}
        weight_bytes: Counter[str] = Counter()
        for t in reader.tensors:
            weight_bytes[t.tensor_type.name] += int(t.n_bytes)
        end_bytes = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    except Exception as e:  # the reader raises whatever numpy meets in a cut-off file
        raise ModelFileError(
            f"{path} is damaged or truncated ({size_bytes} bytes; {type(e).__name__}: {_one_line(e)})",
            "download or convert it again",
        ) from e
    if end_bytes > size_bytes:
        raise ModelFileError(f"{path} is truncated: {size_bytes} bytes, expected {end_bytes}", "download or convert it again")
    _check_types(path, fields)
    quant = weight_bytes.most_common(1)[0][0] if weight_bytes else "none"
    return ModelFacts(path, size_bytes, fields, shapes, quant, tokens)


def _check_types(path: Path, fields: dict[str, Any]) -> None:
    arch = fields.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        raise ModelFileError(f"{path}: general.architecture is {arch!r}, expected a name", "convert the model again")
    for name in ("embedding_length", "block_count", "vocab_size", "context_length", "block_size", "nextn_predict_layers"):
        value = fields.get(f"{arch}.{name}")
        if value is not None and not isinstance(value, int):
            raise ModelFileError(f"{path}: {arch}.{name} is {value!r}, expected a whole number", "convert the model again")
    layers = fields.get(f"{arch}.target_layers")
    if layers is not None and not (isinstance(layers, list) and all(isinstance(i, int) for i in layers)):
        raise ModelFileError(f"{path}: {arch}.target_layers is {layers!r}, expected a list of layers", "convert the model again")


def _one_line(e: Exception) -> str:
    return " ".join(str(e).split())[:160]


def pairing_problems(target: ModelFacts, draft: ModelFacts) -> list[str]:
    """Reasons why a draft cannot serve a target; empty when they fit.

    Checks the draft's keys, hidden size, tapped layers and vocabulary, as pinned llama.cpp needs them.
    """
    out = [f"the draft lacks the key {DRAFT_ARCH}.{name}" for name in ("block_size", "target_layers") if not draft.key(name)]
    if draft.fields.get("tokenizer.ggml.mask_token_id") is None:
        out.append("the draft lacks the key tokenizer.ggml.mask_token_id")
    checks: tuple[Callable[[ModelFacts, ModelFacts], str], ...] = (_hidden_size, _layers, _vocabulary)
    return out + [problem for check in checks if (problem := check(target, draft))]


def _hidden_size(target: ModelFacts, draft: ModelFacts) -> str:
    fc = draft.tensors.get("fc.weight")
    if fc is None:
        return "the draft has no tensor fc.weight"
    n_taps = len(draft.target_layers)
    if n_taps and fc[0] != n_taps * target.n_embd:
        return f"the draft reads {n_taps} layers of width {fc[0] / n_taps:g}, the target's hidden size is {target.n_embd}"
    own_head = "token_embd.weight" in draft.tensors
    if not own_head and draft.n_embd != target.n_embd:
        return f"the draft shares the target's embedding but has hidden size {draft.n_embd}, the target {target.n_embd}"
    return ""


def _layers(target: ModelFacts, draft: ModelFacts) -> str:
    bad = [i for i in draft.target_layers if not 0 <= i < target.n_layer]
    return f"the draft reads layers {bad}, the target has {target.n_layer} layers" if bad else ""


def _vocabulary(target: ModelFacts, draft: ModelFacts) -> str:
    if not draft.tokens or not target.tokens:
        return ""
    # Files of one model may differ in padding at the end, never in a token.
    for i, (a, b) in enumerate(zip(target.tokens, draft.tokens, strict=False)):
        if a != b:
            return f"the vocabularies differ: token {i} is {a!r} in the target and {b!r} in the draft"
    extra = abs(len(target.tokens) - len(draft.tokens))
    return f"the vocabularies differ in size by {extra} tokens" if extra > 512 else ""


def check_pair(target: ModelFacts, draft: ModelFacts) -> None:
    """Raise ModelFileError or PairingError unless `draft` can draft for `target`."""
    target.require_target()
    draft.require_draft()
    problems = pairing_problems(target, draft)
    if problems:
        raise PairingError(
            f"{draft.path.name} does not fit {target.path.name}: {problems[0]}", "use the draft that was trained for this target"
        )
