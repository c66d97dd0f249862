"""Every error that kerngen raises on purpose.

KerngenError                 exit 1
├── UsageError               exit 2   the request itself cannot be right
│   ├── UnknownName                   no such arch, kernel, model or device; says which there are
│   └── ProblemError                  a Problem's fields contradict each other
├── TemplateError                     a kernel's folder is not as the contract asks; names file and line
├── ConfigRefused                     a Config cannot run this Problem on this Arch; holds the numbers
├── ToolchainError                    NVRTC or CuPy is missing, or cannot target the arch; names the extra
├── CompileError                      NVRTC rejected the source; holds its log
├── CompileCancelled                  nobody waits for it any more; it says nothing of the source
├── CacheError                        the compile cache cannot be read or written
├── DatabaseError                     the tuning database cannot be used as asked
│   ├── SchemaTooNew                  written by a newer kerngen
│   ├── CorruptRecord                 a stored row or blob does not match its own digest
│   └── TrustError                    a bundle that nobody answers for who is trusted here; a key file that is not safe
├── RecordingError                    recorded measurements, or the plan of them, are not what they should be
├── TuningMiss                        no record serves this problem
├── LaunchError                       a kernel could not be loaded or launched
├── CheckpointError                   a model folder is incomplete, torn or lies about its sizes
├── NumericsError                     the model computed NaN or infinity where a number was needed
├── PageError                         a step's page, slot or length is out of bounds ($KERNGEN_CHECK_PAGES)
├── RankFailed                        a rank of a divided model has ended, or hangs; says which and why
└── DeviceError                       no usable GPU, or not the one asked for
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

# What is no text for a terminal: control characters but tab and line feed, what turns the direction of writing, and
# lone surrogates, which are bytes of a path or a damaged file that no UTF-8 stream takes.
_UNPRINTABLE = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE_CHARS = 2000  # of a line of a message: what a file holds may be quoted in it
NAME_CHARS = 200  # of a name that is quoted


def printable(text: str) -> str:
    r"""`text` with everything escaped (`\x1b`, `\udc80`) that a terminal might obey or a stream refuse; tabs and line
    feeds stay.
    """
    return _UNPRINTABLE.sub(_escape, text)


def printable_name(name: str) -> str:
    """A name that a file gave, to be quoted in a line: as `printable`, without line feeds, and not longer than one."""
    shown = printable(name[:NAME_CHARS]).replace("\n", "\\n").replace("\t", "\\t")
    return shown if len(name) <= NAME_CHARS else f"{shown}… ({len(name):,} characters)"


def is_printable_name(name: object) -> bool:
    """True for text that can be quoted as it is: on one line, of NAME_CHARS at most, and not empty."""
    return isinstance(name, str) and 0 < len(name) <= NAME_CHARS and printable_name(name) == name


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _clipped(text: str) -> str:
    lines = printable(text).split("\n")
    return "\n".join(line if len(line) <= _LINE_CHARS else f"{line[:_LINE_CHARS]}…" for line in lines)


class KerngenError(Exception):
    """Base of all deliberate errors. `hint` is the next command or step, on a line of its own."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = _clipped(message)
        self.hint = hint and _clipped(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class UsageError(KerngenError):
    exit_code = 2


class UnknownName(UsageError):
    """`kind` is the noun ("arch", "kernel", "model"); `known` is what exists; `guess` beats the nearest spelling."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, guess: str = "") -> None:
        names = list(known)
        if not guess and (close := get_close_matches(name, names, n=1, cutoff=0.5)):
            guess = f"did you mean {close[0]}? "
        super().__init__(f"unknown {kind} {name!r}", hint=f"{guess}known: {', '.join(names)}")


class ProblemError(UsageError):
    pass


class TemplateError(KerngenError):
    pass


class ConfigRefused(KerngenError):
    pass


class ToolchainError(KerngenError):
    pass


class CompileError(KerngenError):
    def __init__(self, message: str, *, log: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.log = log


class CompileCancelled(KerngenError):
    pass


class CacheError(KerngenError):
    pass


class DatabaseError(KerngenError):
    pass


class SchemaTooNew(DatabaseError):
    pass


class CorruptRecord(DatabaseError):
    pass


class TrustError(DatabaseError):
    pass


class RecordingError(KerngenError):
    pass


class TuningMiss(KerngenError):
    pass


class LaunchError(KerngenError):
    pass


class CheckpointError(KerngenError):
    pass


class NumericsError(KerngenError):
    pass


class PageError(KerngenError):
    pass


class RankFailed(KerngenError):
    pass


class DeviceError(KerngenError):
    pass
