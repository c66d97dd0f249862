"""What a lookup asks of a tuning database, wherever it lies. `keep/store.py` has the one that does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kerngen.arch import Arch
from kerngen.compile import Cubin, Ptx
from kerngen.tuning_db.serve.values import Build, Winner


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

    def winners(
        self, kernel: str | None = None, *, arch: Arch | str | None = None, static_key: str | None = None
    ) -> list[Winner]:
        """The winners, without their cubins; a row that was altered is left out."""

    def build(self, build_id: str) -> Build:
        """Raises CorruptRecord if it was altered."""

    def image(self, build: Build) -> Cubin | Ptx | None:
        """Its machine code, None if that was not kept. Raises CorruptRecord if it was altered."""

    def rendered(self, static_key: str, closure: str) -> set[str]:
        """The builds of these compiled-in fields whose source is rendered by kernel code with this closure."""

    def revoked(self) -> dict[str, str]:
        """Ids of builds and measurements that must not count, each with the reason."""

    def renamed(self, ids: Collection[str]) -> set[str]:
        """What those of `ids` that are names of an older schema are called here now."""
