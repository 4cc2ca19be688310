"""Fetch GGUF files and draft checkpoints from the Hugging Face hub, with huggingface_hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from llama_dflash import gguf
from llama_dflash.convert.layout import listed
from llama_dflash.errors import DFlashError, ModelFileError, UsageError
from llama_dflash.files import require_space
from llama_dflash.presets import PRESETS

# What a checkpoint's folder needs for `convert` and for a tokenizer.
CHECKPOINT = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "mask_embedding.pt")
SPLIT = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")


@dataclass(frozen=True)
class RemoteFile:
    """One file on the hub.

    Attributes:
        repo: repository, `owner/name`.
        name: path in the repository.
        revision: commit that is fetched.
        size_bytes: what the hub says it has.
    """

    repo: str
    name: str
    revision: str
    size_bytes: int

    def path(self, folder: Path) -> Path:
        """Where it is kept below `folder`."""
        return folder / self.repo / self.name

    def is_there(self, folder: Path) -> bool:
        """Whether a file of the right size is there; fetching compares it with the hub."""
        path = self.path(folder)
        return path.is_file() and path.stat().st_size == self.size_bytes


def choose(name: str, pattern: str | None = None) -> list[RemoteFile]:
    """Files that `name` stands for.

    Args:
        name: one of `presets.PRESETS`, or a repository's id.
        pattern: shell pattern of file names in a repository; all parts of a split file come with one of them.

    Raises:
        UsageError: no such preset, or `pattern` with a preset.
        ModelFileError: no such repository or file; the message lists what there is.
        DFlashError: the hub cannot be reached.
    """
    preset = PRESETS.get(name.lower())
    if preset is None and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UsageError(
            f"{name!r} is neither a preset nor a repository, expected {', '.join(PRESETS)} or OWNER/NAME", "check the name"
        )
    if preset is None:
        return _of_repository(name, pattern)
    if pattern is not None:
        raise UsageError(
            f"--file is {pattern!r} with the preset {name}, expected a repository",
            f"such as {preset.draft.repo} --file {pattern!r}",
        )
    out = []
    listings = {part.repo: repository(part.repo) for part in (preset.target, preset.draft)}
    for part in (preset.target, preset.draft):
        files = listings[part.repo]
        found = [f for f in files if f.name == part.file]
        if not found:
            raise ModelFileError(
                f"{part.repo} has no {part.file} any more, expected one of: {_names(files)}", "choose one with --file"
            )
        out += found
    return out


def repository(repo: str) -> list[RemoteFile]:
    """All files of a repository.

    Raises:
        ModelFileError: it is not there, or not for this user.
        DFlashError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    with _told(repo):
        info = HfApi(library_name="llama-dflash").model_info(repo, files_metadata=True)
    files = info.siblings or []
    return [RemoteFile(repo, f.rfilename, info.sha or "main", f.size or 0) for f in files]


def _of_repository(repo: str, pattern: str | None) -> list[RemoteFile]:
    files = repository(repo)
    ggufs = [f for f in files if f.name.endswith(".gguf")]
    if pattern is not None:
        chosen = [f for f in files if fnmatchcase(f.name, pattern) or fnmatchcase(Path(f.name).name, pattern)]
        if not chosen:
            raise ModelFileError(
                f"{repo} has no file {pattern!r}, expected one of: {_names(ggufs or files)}", "choose one with --file"
            )
        return _with_parts(chosen, ggufs)
    if not ggufs:
        chosen = [f for f in files if any(fnmatchcase(f.name, p) for p in CHECKPOINT)]
        if not any(f.name.endswith(".safetensors") for f in chosen):
            raise ModelFileError(
                f"{repo} has neither GGUF files nor safetensors, expected a model; it has: {_names(files)}",
                "choose one with --file",
            )
        return chosen
    whole = {_stem(f.name) for f in ggufs}
    if len(whole) > 1:
        raise UsageError(
            f"{repo} has {len(whole)} GGUF models, expected --file to choose: {_names(ggufs)}", "such as --file '*Q4_K_M*'"
        )
    return ggufs


def _stem(name: str) -> str:
    split = SPLIT.fullmatch(name)
    return split[1] if split else name


def _with_parts(chosen: Sequence[RemoteFile], ggufs: Sequence[RemoteFile]) -> list[RemoteFile]:
    stems = {_stem(f.name) for f in chosen if SPLIT.fullmatch(f.name)}
    return [*chosen, *(f for f in ggufs if f not in chosen and SPLIT.fullmatch(f.name) and _stem(f.name) in stems)]


def _names(files: Iterable[RemoteFile]) -> str:
    return listed((f.name for f in files), most=20) or "nothing"


def fetch(files: Sequence[RemoteFile], folder: Path) -> list[Path]:
    """Fetch what is not there yet, with huggingface_hub's progress bars on stderr; returns the paths.

    A broken connection is taken up again where it broke, several times. huggingface_hub drops what a failed run had of a file;
    whole files stay.

    Raises:
        ModelFileError: a file is gone or not for this user.
        DFlashError: not enough room, or the hub cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    need = sum(f.size_bytes for f in files if not f.is_there(folder))
    require_space(folder, need, "the files")
    out = []
    for f in files:
        with _told(f.repo, f.name):
            hf_hub_download(f.repo, f.name, revision=f.revision, local_dir=folder / f.repo, library_name="llama-dflash")
        path = f.path(folder)
        if f.size_bytes and path.stat().st_size != f.size_bytes:
            raise ModelFileError(
                f"{path} has {path.stat().st_size} bytes, expected {f.size_bytes}", "delete it and run the command again"
            )
        out.append(path)
    return out


@contextmanager
def _told(repo: str, name: str = "") -> Iterator[None]:
    """Turn what huggingface_hub raises into one line; a full disk and the like stay as they are."""
    try:
        yield
    except Exception as e:
        if isinstance(e, OSError) and e.errno is not None and not isinstance(e, ConnectionError):
            raise
        raise _error(repo, name, e) from e


def _error(repo: str, name: str, e: Exception) -> DFlashError:
    from huggingface_hub import constants, errors

    hub, what = constants.ENDPOINT, f"{repo}/{name}" if name else repo
    # What hides behind "not found on disk either".
    cause = e.__cause__ if isinstance(e, errors.LocalEntryNotFoundError) and isinstance(e.__cause__, Exception) else e
    reason = " ".join(str(cause).split())[:160] or type(cause).__name__
    login = "'hf auth login' or set HF_TOKEN"
    if isinstance(cause, errors.GatedRepoError):
        message = f"{what} is gated, expected a token of an account that has access"
        return ModelFileError(message, f"accept its terms at {hub}/{repo}, then {login}")
    if isinstance(cause, errors.RepositoryNotFoundError):
        message = f"{repo} is not on {hub}, or it is private, expected a repository OWNER/NAME"
        return ModelFileError(message, f"check the name; for a private one {login}")
    if isinstance(cause, errors.HFValidationError):
        return UsageError(f"{repo!r} is no repository id, expected OWNER/NAME", "check the name")
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return DFlashError(f"{what} cannot be fetched: huggingface_hub is offline, expected the network", "unset HF_HUB_OFFLINE")
    if isinstance(cause, errors.HfHubHTTPError):
        return DFlashError(f"{hub} answered {_status(cause)} for {what}, expected the file", "try again later")
    message = f"{what} cannot be fetched from {hub} ({type(cause).__name__}: {reason}), expected the hub to answer"
    return DFlashError(message, "check the network and HF_ENDPOINT, then run the command again")


def _status(e: Exception) -> Any:
    return getattr(getattr(e, "response", None), "status_code", "an error")


def next_command(paths: Sequence[Path]) -> list[str]:
    """The command that uses what was fetched: `serve` for models, `convert` for drafts that need it; empty if there is none."""
    # llama.cpp finds the other parts of a split file by itself.
    ggufs = [p for p in paths if p.suffix == ".gguf" and (not SPLIT.fullmatch(p.name) or "-00001-of-" in p.name)]
    if not ggufs:
        arguments = [str(paths[0].parent), "draft.gguf", "--target", "TARGET.gguf"]
        return ["llama-dflash", "convert", *arguments] if _is_checkpoint(paths) else []
    # A vision projector ("clip") is neither.
    facts = [f for f in map(gguf.read, ggufs) if f.arch != "clip"]
    if not facts:
        return []
    targets = [f for f in facts if not f.is_draft]
    drafts = [f for f in facts if f.is_draft]
    target = str(targets[0].path) if targets else "TARGET.gguf"
    if drafts and drafts[0].arch in gguf.OLD_DRAFT_ARCHS:
        return ["llama-dflash", "convert", str(drafts[0].path), "draft.gguf", "--target", target]
    if targets and drafts:
        gguf.check_pair(targets[0], drafts[0])
    return ["llama-dflash", "serve", "-m", target, *(["-md", str(drafts[0].path)] if drafts else [])]


def _is_checkpoint(paths: Sequence[Path]) -> bool:
    return any(p.suffix == ".safetensors" for p in paths) and any(p.name == "config.json" for p in paths)
