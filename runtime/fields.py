"""JSON files of a checkpoint, read without believing them: bounded in size, typed, and named in every complaint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kerngen.errors import CheckpointError, UsageError

MAX_JSON_BYTES = 64 * 1024 * 1024
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


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def require_folder(folder: Path) -> None:
    """Raises UsageError unless `folder` is one; it says how to get what looks like a name on the Hugging Face hub."""
    if folder.is_dir():
        return
    name = str(folder)
    if _HUB_NAME.fullmatch(name) and not name.startswith(".") and not folder.parent.exists():
        there = folder.name
        raise UsageError(
            f"{name} is not a folder here, and nothing is downloaded",
            hint=f"from the Hugging Face hub: hf download {name} --local-dir {there}; then name ./{there}",
        )
    raise UsageError(f"{name} is not a folder", hint="name a folder in Hugging Face format")


def require_content(path: Path, head: bytes) -> None:
    """Raises CheckpointError where a file that begins with `head` is what Git LFS leaves in place of a large one."""
    if head.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer: the file that it stands for was never downloaded",
            hint=f"in {path.parent}: git lfs pull; or: hf download REPO --local-dir FOLDER",
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError where it is missing, too large, torn or not an object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} holds {path.stat().st_size:,} B; at most {MAX_JSON_BYTES:,} B are read")
        with path.open("rb") as f:
            require_content(path, f.read(len(_LFS_POINTER)))
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing", hint="name a folder in Hugging Face format") from None
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}") from e
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
