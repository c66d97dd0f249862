"""JSON files of a checkpoint, read without believing them: bounded in size, typed, and named in every complaint."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from kerngen.errors import CheckpointError, UsageError, printable_name

MAX_JSON_BYTES = 16 * 1024 * 1024  # an index of 35,000 tensors has 4 MB; more would take long to parse
# Bounds on what one field may ask for, far above any released model: sizes are products of them.
LIMITS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "head_dim": 4096,
    "sliding_window": 1 << 22,
    "max_position_embeddings": 1 << 26,
}
MAX_NUMBER = 1e30  # of what is not a count (theta, eps, a cap): above any that makes sense, and within fp32


GET_AGAIN = "get the whole folder again: hf download REPO --local-dir FOLDER"
_NAME_GGUF = "name the file itself, in place of the folder"
# What else a folder may hold in place of safetensors: endings, words, and what to do.
_OTHER_FORMATS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors"),
     "a LoRA adapter",
     "adapters are not applied; peft merges one into its model: merge_and_unload, then save_pretrained to a folder"),
    ((".gguf",), "a GGUF file", _NAME_GGUF),
    ((".bin", ".pt", ".pth", ".ckpt"), "pickled weights",
     "they are programs and are never run; convert them with transformers: from_pretrained, then save_pretrained"),
    ((".npz", ".msgpack", ".h5", ".onnx"), "weights of another format",
     "only safetensors are read; get the model's: hf download REPO --local-dir FOLDER"),
    ((".safetensors",), "safetensors",
     "one file must be called model.safetensors; several need their model.safetensors.index.json"),
)  # fmt: skip

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
RELEASED = Path(__file__).parent / "released"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_gguf(place: Path) -> bool:
    """Whether the model at `place` is a GGUF file and not a folder. It need not be there."""
    return place.suffix == ".gguf" and not place.is_dir()


def config_path(place: Path) -> Path:
    """Of the file that says how the model at `place` is built."""
    return place if is_gguf(place) else place / "config.json"


def require_folder(folder: Path) -> None:
    """Raises UsageError unless `folder` is one, or a GGUF file; it says how to get what looks like the hub's name."""
    if folder.is_dir() or (is_gguf(folder) and folder.exists()):
        return
    name = str(folder)
    if _HUB_NAME.fullmatch(name) and not name.startswith(".") and not folder.parent.exists():
        there = folder.name
        raise UsageError(
            f"{name} is not a folder here, and nothing is downloaded",
            hint=f"from the Hugging Face hub: hf download {name} --local-dir {there}; then name ./{there}",
        )
    if folder.exists():
        raise UsageError(f"{name} is a file", hint="name the folder that holds config.json and the safetensors")
    if (RELEASED / name / "config.json").is_file():
        raise UsageError(
            f"{name} is not a folder: as a released model's name it stands for shapes, not for weights",
            hint="name a folder in Hugging Face format, or what the Hugging Face hub calls it: OWNER/NAME",
        )
    if is_gguf(folder):
        raise UsageError(f"there is no file {name}", hint="name a GGUF file, or a folder in Hugging Face format")
    raise UsageError(f"{name} is not a folder", hint="name a folder in Hugging Face format")


def nothing_there(folder: Path, what: str) -> CheckpointError:
    """Says that `folder` holds `what` ("no config.json"), what it holds instead, and what to do about it."""
    return nothing_among([path.name for path in folder.iterdir()], str(folder), what)


def nothing_among(names: Iterable[str], where: str, what: str) -> CheckpointError:
    """As nothing_there, of a place that holds files with these names."""
    there = sorted(names)
    for suffixes, words, hint in _OTHER_FORMATS:
        if found := [name for name in there if name.endswith(suffixes)]:
            return CheckpointError(f"{where} holds {what}, but {words}: {printable_name(found[0])}", hint=hint)
    return CheckpointError(f"{where} holds {what}", hint=GET_AGAIN if there else "name a folder with a checkpoint")


def require_content(path: Path, head: bytes) -> None:
    """Raises CheckpointError where a file that begins with `head` is what Git LFS leaves in place of a large one."""
    if head.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer: the file that it stands for was never downloaded",
            hint=f"in {path.parent}: git lfs pull; or: hf download REPO --local-dir FOLDER",
        )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint, or what a GGUF file says in its place. Raises UsageError where `folder` is none,
    CheckpointError as read_json.
    """
    require_folder(folder)
    if is_gguf(folder):
        from kerngen.runtime.gguf.config import config_json  # which few models need

        return config_json(folder)
    path = config_path(folder)
    if not path.exists():
        raise nothing_there(folder, f"no {path.name}")
    return read_json(path)


def open_file(path: Path) -> BinaryIO:
    """Open what is at `path` for reading, if it is an ordinary file: a FIFO would block and a device never end.

    Raises CheckpointError for anything else, OSError where it cannot be opened.
    """
    # Not blocking matters until it is known what was opened; of an ordinary file it changes nothing.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(mode := os.fstat(fd).st_mode):
        os.close(fd)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise CheckpointError(
            f"{path} is {kind}, not an ordinary file", hint="name a folder in Hugging Face format, with files in it"
        )
    return open(fd, "rb")


def read_file(path: Path, limit: int) -> bytes:
    """The content of an ordinary file. Raises CheckpointError where it is missing, unreadable or above `limit` bytes,
    or where it is what Git LFS leaves."""
    try:
        with open_file(path) as f:
            data = f.read(limit + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing", hint="name a folder in Hugging Face format") from None
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}") from e
    if len(data) > limit:
        raise CheckpointError(f"{path} holds more than {limit:,} B, which is all that is read")
    require_content(path, data[:64])
    return data


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError where it is missing, too large, torn or not an object."""
    try:
        value = json.loads(read_file(path, MAX_JSON_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def short(value: Any) -> str:
    """repr, cut to what fits in a message: JSON's numbers may have hundreds of digits."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


class Fields:
    """Typed access to a JSON object; every complaint names the file and the field."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}")

    def get(self, name: str) -> Any:
        if name not in self.values:
            raise self.error(f"field {name!r} is missing")
        return self.values[name]

    def integer(self, name: str, default: int | None = None, low: int = 1) -> int:
        if default is not None and self.values.get(name) is None:
            return default
        value = self.get(name)
        high = LIMITS.get(name, 1 << 31)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(f"{name} is {short(value)}; it must be a whole number from {low} to {high:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        if default is not None and name not in self.values:
            return default
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            raise self.error(f"{name} is {short(value)}; it must be a positive number up to {MAX_NUMBER:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name} is {short(value)}; it must be true or false")
        return value

    def section(self, name: str, default: dict[str, Any] | None = None) -> Fields:
        value = default if default is not None and self.values.get(name) is None else self.get(name)
        if not isinstance(value, dict):
            raise self.error(f"{name} is {short(value)}; it must be an object")
        return Fields(value, f"{self.where}: {name}")
