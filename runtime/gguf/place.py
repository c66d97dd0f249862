"""Where a model's GGUF file is: in a folder that holds one."""

from __future__ import annotations

import re
from pathlib import Path

from kerngen.errors import UsageError

_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")
_NO_MODEL = "mmproj"  # what embeds images, in a file of its own beside the model's


def place_of_model(path: Path) -> Path:
    """`path`, or the GGUF file that it holds, where it is a folder without a config.json: its first part, if it is
    split.

    Raises UsageError where there are several.
    """
    if not path.is_dir() or (path / "config.json").exists():
        return path
    found = sorted(
        file
        for file in path.glob("*.gguf")
        if not _LATER_PART.fullmatch(file.name) and not file.name.lower().startswith(_NO_MODEL)
    )
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:8])
        raise UsageError(f"{path} holds {len(found)} GGUF files: {names}", hint=f"name one: {found[0]}")
    return found[0] if found else path


def files_wanted(name: str) -> list[str]:
    """What of a repository belongs to its GGUF file `name`, as patterns for fnmatch: its parts, a tokenizer and
    settings in its folder.
    """
    folder, _, file = name.rpartition("/")
    parts = re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"-*\1", file)
    return [f"{folder}/{wanted}".lstrip("/") for wanted in (parts, "tokenizer.json", "generation_config.json")]
