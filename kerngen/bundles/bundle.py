"""A bundle: one sealed file with everything that a model's kernels need on a host that must not, or cannot, compile.

It is a tuning database (docs/tuning-database.md) with the winners that were chosen, their machine code, and that of the
default configurations where nothing was tuned. `kerngen compile --model NAME -o FILE` makes one, and so does `kerngen
db export`, of winners alone. `--bundle FILE`, or $KERNGEN_BUNDLE, has it answer in place of the user's and the shipped
databases: what was chosen there is what runs here. It is read and never written to, and run if somebody signed it who
is trusted here (tuning_db/read/trust.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kerngen.arch import Arch
from kerngen.compiler.cache import CompileCache, compiling_is_forbidden
from kerngen.compiler.compile import DEFAULT_OPTIONS, Cubin, source_key
from kerngen.errors import TuningMiss, UsageError

if TYPE_CHECKING:
    from kerngen.tuning_db import Source
    from kerngen.tuning_db.read.boards import PerBoard

_MADE_BY = "kerngen compile --arch ARCH --model NAME -o FILE makes one"


@dataclass(frozen=True, slots=True)
class Bundle:
    """One that was opened. nvrtc: that made what no database had. targets: (arch, board), by name."""

    path: str
    model: str
    nvrtc: tuple[int, int]
    targets: tuple[tuple[str, str], ...]
    source: Source

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, allow_unsigned: bool = False) -> Bundle:
        """The bundle in a file. Raises UsageError where there is none, TrustError, DatabaseError."""
        from kerngen.tuning_db import open_source
        from kerngen.tuning_db.read.sealed import Sealed, is_sealed_file

        name = os.fspath(path)
        if not os.path.isfile(name) or not is_sealed_file(name):
            what = "a folder" if os.path.isdir(name) else "no sealed file" if os.path.exists(name) else "not there"
            raise UsageError(f"{name} is no bundle: it is {what}", hint=_MADE_BY)
        contents: dict[str, Any] = Sealed.open(name).header.get("contents", {})
        source = open_source(name, name="bundle", allow_unsigned=allow_unsigned)
        major, minor = contents.get("nvrtc", (0, 0))
        targets = tuple((str(arch), str(board)) for arch, board, *_ in contents.get("boards", ()))
        return cls(name, ", ".join(contents.get("models", ())) or "NAME", (major, minor), targets, source)

    def sources(self) -> list[Source | PerBoard]:
        """Its database, and no other."""
        return [self.source]

    def require(self, arch: Arch) -> None:
        """Raises UsageError unless it was made for `arch`."""
        arches = dict.fromkeys(a for a, _ in self.targets)
        if arch.name not in arches:
            raise UsageError(
                f"the bundle {self.path} was made for {', '.join(arches)}, not for {arch}",
                hint=f"make one: kerngen compile --arch {arch} --model {self.model} -o FILE",
            )


class BundleCache(CompileCache):
    """What stands behind a bundle, whose code comes with its answers: the user's cache, or nothing.

    Where compiling is forbidden, only what the bundle holds is served: so it is shown to be complete.
    """

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self._bundle = bundle

    def get_or_compile(self, source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Cubin:
        if compiling_is_forbidden():
            key = source_key(source, arch.nvrtc_target)
            raise TuningMiss(
                f"source {key[:16]} for {arch} is not in the bundle {self._bundle.path}, and KERNGEN_NO_COMPILE "
                "forbids compiling it",
                hint=f"say what it lacks: kerngen doctor --model {self._bundle.model} --bundle {self._bundle.path}",
            )
        return super().get_or_compile(source, arch, options)

    def find(self, source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Cubin | None:
        """What the user's cache holds; nothing under KERNGEN_NO_COMPILE."""
        return None if compiling_is_forbidden() else super().find(source, arch, options)


def sources_for(db_url: str | None, file: str | None) -> tuple[list[Source | PerBoard], CompileCache, Bundle | None]:
    """Where winners and machine code come from: (databases, cache, the bundle if it is one).

    db_url: --db. file: --bundle. With neither, $KERNGEN_BUNDLE counts, and then what `default_sources` finds. Raises
    UsageError where both are given, and as `Bundle.open` and `tuning_db.sources_for`.
    """
    from kerngen import tuning_db

    if db_url and file:
        raise UsageError("--db and --bundle both say which configurations to run", hint="give one of them")
    if not db_url and (named := file or os.environ.get("KERNGEN_BUNDLE")):
        bundle = Bundle.open(named)
        return bundle.sources(), BundleCache(bundle), bundle
    return tuning_db.sources_for(db_url or None), CompileCache(), None
