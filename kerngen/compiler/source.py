"""A rendered source with a map from its lines to the template's, so that errors name the author's file and line.

A `Source` is a str: equality, hashes and every digest are those of the text alone, so where a kernel's files lie is no
part of a build's identity. NVRTC sees the text and counts its lines; `located` says them in terms of the files. (#line
directives would do the same from inside of the text, and break what stands across lines: macros, raw strings.)
"""

from __future__ import annotations

import re
import traceback
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kerngen.errors import KerngenError
from kerngen.identity import digest_of

NAME = "kernel.cu"  # what NVRTC is told a source is called
_LINE = re.compile(rf'{re.escape(NAME)}\((\d+)\)|\bat line (\d+)(?: of "{re.escape(NAME)}")?')


class Origin(NamedTuple):
    """The text's lines from `at` on, counted from 1, are the lines of `file` from `line` on. file "": of no file."""

    at: int
    file: str
    line: int


class Source(str):
    """A self-contained text with the origins of its lines, ascending."""

    origins: tuple[Origin, ...]

    def __new__(cls, text: str, origins: Iterable[Origin] = ()) -> Source:
        source = super().__new__(cls, text)
        source.origins = tuple(origins)
        return source

    @cached_property
    def digest(self) -> str:
        """identity.digest_of of the text, made once: who caches, files and compares a source all ask for it."""
        return digest_of(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Source, (str(self), self.origins)

    def place(self, line: int) -> str | None:
        """FILE:LINE that a line of the text comes from; None where it is from no file.

        The file is named from its root's name on, templates/rmsnorm/kernel.cu.jinja: what is stored of a failed build
        does not depend on where it was compiled.
        """
        before = bisect_right(self.origins, line, key=lambda o: o.at) - 1
        if before < 0 or not (origin := self.origins[before]).file:
            return None
        parts = Path(origin.file).parts
        depth = 4 if "common" in parts[-3:-2] else 3  # shared files lie in folders: templates/common/ptx/mma.cuh
        return f"{'/'.join(parts[-depth:])}:{origin.line + line - origin.at}"


def source_digest(source: str) -> str:
    """identity.digest_of of a source: no comment is part of it."""
    return source.digest if isinstance(source, Source) else digest_of(source)


def located(source: str, log: str) -> str:
    """`log` of compiling `source`, with its lines said as FILE:LINE of where they come from, if that is known."""

    def place(match: re.Match[str]) -> str:
        found = source.place(int(match[1] or match[2])) if isinstance(source, Source) else None
        return match[0] if found is None else found if match[1] else f"at {found}"

    return _LINE.sub(place, log)


def shown(path: Path | str) -> str:
    """`path` as messages have it: from the working directory where it lies below that, else whole."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def place_of(error: BaseException, folder: Path) -> tuple[Path, int] | None:
    """File and line below `folder` that `error` is about: of what does not parse, else of the innermost call there."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(name := getattr(error, "filename", None), str):  # SyntaxError, and Jinja's
        places.append((name, getattr(error, "lineno", None)))
    for name, line in reversed(places):
        if (path := Path(name).resolve()).is_relative_to(folder):
            return path, line or 1
    return None


def reason_of(error: BaseException) -> str:
    """What `error` says, in one line, with its kind where that is not one of kerngen's own."""
    text = (error.msg if isinstance(error, SyntaxError) else str(error)).strip() or "no reason given"
    return (
        text.splitlines()[0] if isinstance(error, KerngenError) else f"{type(error).__name__}: {text.splitlines()[0]}"
    )
