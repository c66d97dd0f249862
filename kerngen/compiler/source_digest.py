"""The source digest of a kernel: one digest of all files that rendering reads. Equal digests render equal sources.

Rendering all winners of a model at a start, to see whether their builds are current, would take longer than the rest of
the start. A build is therefore stored with the source digest that rendered it, and is not rendered again while the
digest is the same. Where the digest differs, the source is rendered and compared. Comments in headers do not count.
The database's column for it is called `closure`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import kerngen.arch
import kerngen.identity
from kerngen.identity import without_comment_lines
from kerngen.templates.kernel import ROOT, Kernel

# The code that renders. Jinja's own is not among it: what a template of 3.x means does not change with its version.
_CODE = (
    Path(__file__).with_name("render.py"),
    ROOT / "kernel.py",
    Path(str(kerngen.identity.__file__)),
    Path(str(kerngen.arch.__file__)),
)
# What takes a template or a module from another folder: its argument, up to the end of the statement or the line.
_TAKES = re.compile(
    rb"\{%[-+]?\s*(?:include|import|extends|from)\b(.*?)%\}"
    rb"|\b(?:kerngen\.templates|from\s+\.)(?:\.(\w+)|\.?\s+import\b(\s*\([^)]*\)|.*))"
)
_NAMED = re.compile(rb"""["']([\w.-]+)(?:/[^"']*)?["']""")

_Stamp = tuple[tuple[str, int, int], ...]


def source_digest_of(kernel: Kernel) -> str:
    """sha256 over all that `render.source_of` reads for `kernel`, whatever the problem, the configuration and the arch.

    That is its folder, the shared ones, what these take from elsewhere in kerngen.templates, and the code that renders.
    Lines of a .cuh that are blank or a comment do not count.
    Files are read again when they have changed. What a spec.py takes from other packages is not seen.
    """
    root, digests, left = kernel.folder.parent, dict[str, str](), [kernel.folder, *kernel.shared]
    code = set(_CODE)
    while left:
        folder = left.pop()
        if str(folder) in digests or not folder.is_dir():
            continue
        digests[str(folder)], taken = _read(folder, tuple(sorted(_files(str(folder)))))
        for name in _folders(root) if taken is None else taken:
            left += [root / name, ROOT / name]
            if (module := ROOT / f"{name}.py").is_file():
                code.add(module)
    # Where a folder lies is no part of it, the order in which they are asked for a file is.
    first = [str(folder) for folder in (kernel.folder, *kernel.shared)]
    others = sorted((Path(f).name, digest) for f, digest in digests.items() if f not in first)
    others += sorted((path.name, _code(path)) for path in code)
    parts = [*(digests.get(f, "") for f in first), *(f"{name}={digest}" for name, digest in others)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _folders(root: Path) -> list[str]:
    return [p.name for p in root.iterdir() if p.is_dir() and p.name != "__pycache__"]


def _files(folder: str, within: str = "") -> Iterator[tuple[str, int, int]]:
    """(name, time of change, size) of each file in `folder`."""
    for entry in os.scandir(folder):
        if not entry.is_dir():
            found = entry.stat()
            yield within + entry.name, found.st_mtime_ns, found.st_size
        elif entry.name != "__pycache__":
            yield from _files(entry.path, f"{within}{entry.name}/")


@lru_cache(maxsize=512)
def _read(folder: Path, stamp: _Stamp) -> tuple[str, frozenset[str] | None]:
    """The digest of a folder's files, and the names of the folders that they take from; None where any may be meant."""
    hashed, taken, anything = hashlib.sha256(), set[str](), False
    for name, _, _ in stamp:
        data = (folder / name).read_bytes()
        counted = without_comment_lines(name, data)
        hashed.update(f"{name}\0{len(counted)}\0".encode() + counted)
        for statement, module, modules in _TAKES.findall(data):
            named = _NAMED.findall(statement)
            anything |= bool(statement) and not named  # a name that an expression gives
            taken |= {n.decode() for n in (*named, *([module] if module else []), *re.findall(rb"\w+", modules))}
    return hashed.hexdigest(), None if anything else frozenset(taken)


def _code(path: Path) -> str:
    found = path.stat()
    return _digest(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)
def _digest(path: Path, *stamp: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
