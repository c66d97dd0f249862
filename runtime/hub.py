"""A name on the Hugging Face hub in place of a folder: what is needed of it is downloaded, or found in the hub's cache.

OWNER/REPO is a model of safetensors, OWNER/REPO/FILE.gguf the GGUF file in a repository, of which most have several.

Downloading, resuming, the cache (`HF_HOME`), tokens (`HF_TOKEN`), `HF_ENDPOINT` and `HF_HUB_OFFLINE` are those of
huggingface_hub, on which tokenizers depends too. Here is what is asked of it, and words for what goes wrong.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kerngen.errors import CheckpointError, KerngenError, UsageError
from kerngen.runtime.config_fields import nothing_among, require_folder
from kerngen.runtime.gguf.place import files_wanted, place_of_model

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

# No other format, no training state, and of safetensors none that transformers would not read.
FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors",
)  # fmt: skip
TIMEOUT_S = 15.0
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w.][\w./-]*))?")
_FILE = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w.][\w.-]*))?/(?P<file>(?:[\w-][\w.-]*/)*[\w-][\w.-]*\.gguf)"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """google/gemma-4-31B-it, or google/gemma-4-31B-it@REVISION (a branch, a tag or a commit).

    file: a GGUF file in the repository, behind either: OWNER/REPO/FILE.gguf, OWNER/REPO@REVISION/FOLDER/FILE.gguf.
    """

    repo: str
    revision: str | None
    file: str | None = None

    def __str__(self) -> str:
        name = self.repo if self.revision is None else f"{self.repo}@{self.revision}"
        return name if self.file is None else f"{name}/{self.file}"

    @property
    def patterns(self) -> list[str]:
        """Of the files that are downloaded."""
        return list(FILES) if self.file is None else files_wanted(self.file)

    def place(self, snapshot: str) -> Path:
        """Of the model in a folder that has the repository's files."""
        return Path(snapshot) if self.file is None else Path(snapshot) / self.file


def hub_name(model: str | os.PathLike[str]) -> HubName | None:
    """`model` as a name on the hub, or None where it is a path: what is there, or lies in a folder that is there."""
    text, path = os.fspath(model), Path(model)
    found = _FILE.fullmatch(text) or _NAME.fullmatch(text)
    if found is None or text.startswith(".") or path.exists() or path.parent.exists():
        return None
    return HubName(**found.groupdict())


def find_checkpoint(model: str | os.PathLike[str]) -> Path:
    """The folder or the GGUF file that `model` names: itself, the GGUF file in it, or what the hub has under that name,
    downloaded where it must be.

    Raises UsageError for a name that the hub does not know, CheckpointError for one that cannot be had.
    """
    name = hub_name(model)
    return place_of_model(Path(model)) if name is None else _download(name)


def require_checkpoint(model: str | os.PathLike[str]) -> None:
    """Raises as `find_checkpoint` and `require_folder` do where there is no such model; nothing is downloaded."""
    if (name := hub_name(model)) is None:
        require_folder(Path(model))
    elif find_cached(name) is None:
        with _explaining(name):
            _model_info(name)


def find_cached(name: HubName) -> Path | None:
    """The folder, or the GGUF file, of a model that was downloaded before, without asking the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        place = name.place(
            snapshot_download(name.repo, revision=name.revision, allow_patterns=name.patterns, local_files_only=True)
        )
        return place if place.exists() else None
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _download(name: HubName) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    with _explaining(name):
        try:
            info = _model_info(name)
        except HfHubHTTPError:
            raise
        except (HTTPError, OSError):  # no network: what was downloaded before will do
            if (cached := find_cached(name)) is not None:
                return cached
            raise
        _require_files(name, [file.rfilename for file in info.siblings or ()], f"{constants.ENDPOINT}/{name.repo}")
        return name.place(snapshot_download(name.repo, revision=name.revision, allow_patterns=name.patterns))


def _require_files(name: HubName, there: list[str], where: str) -> None:
    """Raises CheckpointError unless `there`, the files of the repository, are what `name` needs."""
    of_gguf = [file for file in there if file.endswith(".gguf")]
    if name.file is not None:
        if name.file not in there:
            raise CheckpointError(f"{where} has no {name.file}", hint=f"it has: {', '.join(of_gguf) or 'no GGUF file'}")
        return
    for needed in (("config.json",), ("model.safetensors", "model.safetensors.index.json")):
        if not set(needed) & set(there):
            lacking = nothing_among(there, where, "no " + " and no ".join(needed))
            if of_gguf:
                raise CheckpointError(
                    lacking.message, hint=f"name the file: {', '.join(f'{name}/{f}' for f in of_gguf)}"
                )
            raise lacking


def _model_info(name: HubName) -> ModelInfo:
    from huggingface_hub import HfApi

    return HfApi().model_info(name.repo, revision=name.revision, timeout=TIMEOUT_S)


@contextmanager
def _explaining(name: HubName) -> Iterator[None]:
    """Turns what huggingface_hub raises into words and the next step."""
    from huggingface_hub import constants, errors

    place = constants.ENDPOINT
    what, then = (name.repo, "./FOLDER") if name.file is None else (f"{name.repo} {name.file}", f"./FOLDER/{name.file}")
    by_hand = f"or where there is a network: hf download {what} --local-dir FOLDER; then name {then}"
    try:
        yield
    except KerngenError:
        raise
    except errors.GatedRepoError as e:
        raise CheckpointError(
            f"{name} is gated: {place} gives it to those who accepted its licence",
            hint=f"accept it at {place}/{name.repo}, then: hf auth login",
        ) from e
    except errors.RevisionNotFoundError as e:
        raise UsageError(f"{place} has {name.repo}, but no revision {name.revision}") from e
    except errors.RepositoryNotFoundError as e:
        raise UsageError(
            f"{name} is not a folder here, and {place} has no such model, or not for you",
            hint="check the spelling; a private one needs: hf auth login",
        ) from e
    except errors.HfHubHTTPError as e:
        status = e.response.status_code if e.response is not None else "nothing"
        raise CheckpointError(f"{place} answered {status} when asked for {name}", hint=f"try again, {by_hand}") from e
    except errors.OfflineModeIsEnabled as e:
        raise CheckpointError(
            f"{name} was not downloaded before, and HF_HUB_OFFLINE forbids it now", hint=f"unset it, {by_hand}"
        ) from e
    except errors.HFValidationError as e:
        raise UsageError(f"{name} is not a folder here, nor a name on {place}") from e
    except (errors.HTTPError, OSError) as e:
        reason = (e.strerror if isinstance(e, OSError) else None) or str(e) or type(e).__name__
        raise CheckpointError(
            f"{name} is not a folder here, and could not be downloaded from {place}: {reason}",
            hint=f"try again (what has arrived is kept), {by_hand}",
        ) from e
