#!/usr/bin/env python3
"""Collect permissively licensed Python source, learn the tokenizer from it and write token files.

    python -m train_tiny.corpus build --wheels DIR --out DIR

Sources: the wheels in DIR, the distributions installed beside this interpreter, and its standard library.
A distribution enters only when its own metadata names a permissive licence and no other.
Written to --out: tokenizer.json, train.xz and held.xz (int16 token ids, LZMA), packages.json (what went in, and why not).
Held-out text is whole packages, so that no file of a package is on both sides; near-copies of other files are dropped.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import lzma
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import numpy as np

N_VOCAB = 4096
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")  # the last ids, in this order
END_ID, MASK_ID = N_VOCAB - 4, N_VOCAB - 1
STDLIB = "python-standard-library"
HELD_PERCENT = 6  # share of packages that is held out
MAX_PACKAGE_CHARS = 9_000_000  # so that no package sets the style
MAX_FILE_CHARS = 300_000
MIN_LINE_CHARS = 24  # shorter lines are alike everywhere
COPY_SHARE = 0.5  # a file with more known lines than this is a near-copy
TOKENIZER_CHARS = 50_000_000  # enough for 4096 ids
SEED = 20260
# The pre-tokenizer that llama.cpp applies for tokenizer.ggml.pre = qwen35: merges must not cross its pieces.
PIECES = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|Unlicense|zlib|0BSD)\b", re.I)
OTHER = re.compile(
    r"\b(L?A?GPL\S*|General Public|MPL\S*|Mozilla|Proprietary|NVIDIA|EPL\S*|Eclipse|CDDL|Artistic|CC-BY\S*|Zope)\b", re.I
)


@dataclass
class Package:
    """One distribution: its licence text and its Python files as (path, text)."""

    name: str
    version: str
    licence: str
    files: list[tuple[str, str]] = field(default_factory=list)

    @property
    def n_chars(self) -> int:
        """Characters of all files."""
        return sum(len(text) for _, text in self.files)


def licence_of(meta: Message) -> str:
    """Everything that a distribution's metadata says about its licence, on one line."""
    said = [meta.get("License-Expression") or "", (meta.get("License") or "")[:200]]
    said += [c.removeprefix("License :: ") for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    return " | ".join(" ".join(part.split()) for part in said if part)


def is_permissive(licence: str) -> bool:
    """A permissive licence is named and no other kind is."""
    return bool(PERMISSIVE.search(licence)) and not OTHER.search(licence)


def usable(text: str) -> bool:
    """Hand-written code by its shape: neither tiny nor a table of data."""
    lines = text.count("\n") + 1
    return 200 <= len(text) <= MAX_FILE_CHARS and len(text) / lines <= 80


def decode(data: bytes) -> str | None:
    """UTF-8 text with Unix line ends; None for anything else."""
    try:
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return None


def from_wheel(path: Path) -> Package | None:
    """A wheel's Python files; None when it has no metadata."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        metas = [n for n in names if n.endswith(".dist-info/METADATA")]
        if not metas:
            return None
        meta = Parser().parsestr(wheel.read(metas[0]).decode("utf-8", "replace"), headersonly=True)
        found = Package(str(meta["Name"]).lower(), str(meta["Version"]), licence_of(meta))
        if is_permissive(found.licence):
            for name in sorted(n for n in names if n.endswith(".py")):
                text = decode(wheel.read(name))
                if text is not None and usable(text):
                    found.files.append((name, text))
    return found


def read_files(root: Path, paths: Iterable[Path]) -> list[tuple[str, str]]:
    """The usable files among `paths`, named relative to `root`."""
    out = []
    for path in sorted(paths):
        text = decode(path.read_bytes()) if path.is_file() else None
        if text is not None and usable(text):
            out.append((str(path.relative_to(root)), text))
    return out


def installed() -> Iterator[Package]:
    """The distributions of this interpreter, then its standard library (PSF licence)."""
    for dist in importlib.metadata.distributions():
        meta: Any = dist.metadata
        found = Package(str(meta["Name"]).lower(), dist.version, licence_of(meta))
        if is_permissive(found.licence):
            root = Path(str(dist.locate_file(""))).resolve()
            paths = [(root / str(f)).resolve() for f in dist.files or [] if str(f).endswith(".py")]
            found.files = read_files(root, (p for p in paths if p.is_relative_to(root)))
        yield found
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts)]
    yield Package(STDLIB, sys.version.split()[0], "PSF-2.0", read_files(root, paths))


def is_held(name: str) -> bool:
    """Whether a package is held out: by a hash of its name, so that the split outlives changes of the list."""
    return name != STDLIB and int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < HELD_PERCENT


def drop_copies(packages: Sequence[Package]) -> int:
    """Drop files most of whose long lines are known already, and cut packages at their limit; files dropped."""
    seen: set[int] = set()
    dropped = 0
    for package in sorted(packages, key=lambda p: (is_held(p.name), p.name)):
        order = sorted(package.files, key=lambda f: hashlib.sha256(f[0].encode()).digest())
        kept: list[tuple[str, str]] = []
        n_chars = 0
        for path, text in order:
            lines = {hash(line) for line in map(str.strip, text.split("\n")) if len(line) >= MIN_LINE_CHARS}
            is_copy = bool(lines) and len(lines & seen) > COPY_SHARE * len(lines)
            if is_copy or n_chars + len(text) > MAX_PACKAGE_CHARS:
                dropped += 1
                continue
            seen |= lines
            kept.append((path, text))
            n_chars += len(text)
        package.files = kept
    return dropped


def dress(tok: Any) -> Any:
    """Give a bare BPE its pre-tokenizer and decoder."""
    from tokenizers import Regex, decoders, pre_tokenizers

    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tok.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    return tok


def train_tokenizer(texts: Iterable[str], n_vocab: int = N_VOCAB) -> Any:
    """Byte-level BPE of `n_vocab` ids, the special tokens last."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tok = dress(Tokenizer(models.BPE()))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = n_vocab - len(SPECIALS)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, max_token_length=32, show_progress=False)
    tok.train_from_iterator(texts, trainer)
    tok.add_special_tokens(list(SPECIALS))
    if tok.get_vocab_size() != n_vocab:
        raise SystemExit(f"corpus: the tokenizer has {tok.get_vocab_size()} ids, expected {n_vocab}: more text is needed")
    return tok


def encode(tok: Any, texts: Sequence[str]) -> np.ndarray:
    """Token ids of all texts, each followed by the end token, `[n]` int16."""
    parts = []
    end = tok.token_to_id(SPECIALS[0])
    for at in range(0, len(texts), 256):
        for coded in tok.encode_batch(list(texts[at : at + 256]), add_special_tokens=False):
            parts.append(np.array([*coded.ids, end], np.int16))
    return np.concatenate(parts) if parts else np.zeros(0, np.int16)


def first_chars(texts: Sequence[str], n_chars: int) -> list[str]:
    """The first texts, of about `n_chars` characters together."""
    out: list[str] = []
    for text in texts:
        if n_chars <= 0:
            break
        out.append(text)
        n_chars -= len(text)
    return out


def pack(ids: np.ndarray, path: Path) -> None:
    """Write ids as LZMA of little-endian int16."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 28, "lc": 0, "lp": 1, "pb": 1}]
    path.write_bytes(lzma.compress(ids.astype("<i2").tobytes(), format=lzma.FORMAT_XZ, filters=filters))


def unpack(path: Path) -> np.ndarray:
    """Read what `pack` wrote, `[n]` int16."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), "<i2").copy()


def collect(wheels: Path) -> list[Package]:
    """All candidate packages, one per name: a wheel wins over an installed copy."""
    found: dict[str, Package] = {}
    for path in sorted(wheels.glob("*.whl")):
        package = from_wheel(path)
        if package is not None:
            found[package.name] = package
    for package in installed():
        found.setdefault(package.name, package)
    return list(found.values())


def build(wheels: Path, out: Path, max_tokens: int) -> dict[str, Any]:
    """Run everything; the summary that packages.json holds."""
    out.mkdir(parents=True, exist_ok=True)
    packages = collect(wheels)
    dropped = drop_copies(packages)
    train = [t for p in packages if not is_held(p.name) for _, t in p.files]
    held = [t for p in packages if is_held(p.name) for _, t in p.files]
    order = np.random.default_rng(SEED)
    order.shuffle(train)
    order.shuffle(held)
    print(f"{len(train)} + {len(held)} files, {sum(map(len, train)) / 1e6:.1f} + {sum(map(len, held)) / 1e6:.1f} MB", flush=True)
    tok = train_tokenizer(train[:: max(1, sum(map(len, train)) // TOKENIZER_CHARS)])
    tok.save(str(out / "tokenizer.json"))
    summary: dict[str, Any] = {"seed": SEED, "files_dropped": dropped, "n_chars": {"train": sum(map(len, train))}}
    for name, texts in (("train", train), ("held", held)):
        ids = encode(tok, first_chars(texts, 4 * max_tokens))[:max_tokens]
        pack(ids, out / f"{name}.xz")
        summary[f"{name}_tokens"] = len(ids)
        print(f"{name}: {len(ids) / 1e6:.2f} M tokens, {(out / f'{name}.xz').stat().st_size / 2**20:.1f} MiB", flush=True)
    summary["packages"] = [
        {k: v for k, v in asdict(p).items() if k != "files"}
        | {"part": ("held" if is_held(p.name) else "train") if p.files else "none", "files": len(p.files), "chars": p.n_chars}
        for p in sorted(packages, key=lambda p: p.name)
    ]
    (out / "packages.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """Build the corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    b = commands.add_parser("build")
    b.add_argument("--wheels", type=Path, required=True)
    b.add_argument("--out", type=Path, required=True)
    b.add_argument("--max-tokens", type=int, default=10**9, help="cut each part here, so that it can be carried")
    args = parser.parse_args(argv)
    build(args.wheels, args.out, args.max_tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
