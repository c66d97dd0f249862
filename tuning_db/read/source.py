"""The interface of a tuning database to a lookup: reader.py reads a file, store/store.py any database."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, Self

from kerngen.compiler.compile import Cubin, Ptx
from kerngen.tuning_db.read.kernel_index import KernelIndex
from kerngen.tuning_db.read.values import Build, Winner


class ClosedAtEnd:
    """A database that the end of a `with` closes. where: as Source has it."""

    where: str

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where!r})"


class Source(Protocol):
    """A tuning database to look up in. All of it raises DatabaseError where the database cannot be read.

    name: what an answer calls it. where: the file or server, for messages. override: it is asked before all others.
    """

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> str: ...

    @property
    def override(self) -> bool: ...

    def line(self, kernel: str, static_key: str, arch: str) -> KernelIndex | None:
        """What it has for these compiled-in fields, None if nothing. Raises CorruptRecord where that was altered."""

    def image(self, build: Build) -> Cubin | Ptx | None:
        """The machine code of a line's build, None if that was not kept. Raises CorruptRecord if it was altered."""

    def winners(self, kernel: str | None = None) -> list[Winner]:
        """Those of a kernel, without their cubins, for a report of what is there; what was altered is left out."""

    def revoked(self) -> dict[str, str]:
        """Ids of builds and measurements that must not count, each with the reason."""

    def renamed(self, ids: Collection[str]) -> set[str]:
        """What those of `ids` that are names of an older schema are called here now."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
