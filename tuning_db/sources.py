"""Opens the databases that a run asks, in their order: files with read/reader.py, others as a Store."""

from __future__ import annotations

import logging
import os

from kerngen.errors import DatabaseError
from kerngen.tuning_db.read import places
from kerngen.tuning_db.read.boards import PerBoard
from kerngen.tuning_db.read.installed import Revocations
from kerngen.tuning_db.read.reader import Reader
from kerngen.tuning_db.read.source import Source
from kerngen.tuning_db.shipped import Shipped

log = logging.getLogger(__name__)


def open_source(
    place: str | os.PathLike[str],
    *,
    name: str = "",
    override: bool = False,
    allow_unsigned: bool = False,
) -> Source:
    """A file, sealed or not, or a server's URL, to be served from. allow_unsigned: as Reader.open.

    A file of an older schema is migrated in a copy in memory, as Store does. Raises TrustError where the file is not
    to be trusted, SchemaTooNew, DatabaseError.
    """
    chosen = os.fspath(place).removeprefix("sqlite:///")
    if "://" not in chosen:
        found = Reader.open(chosen, name=name, override=override, allow_unsigned=allow_unsigned)
        if found is not None:
            return found
    from kerngen.tuning_db.store.bundles import open_any  # SQLAlchemy is for those who need it

    return open_any(chosen, name=name, override=override, allow_unsigned=allow_unsigned)


def default_sources() -> list[Source | PerBoard]:
    """What a run looks in: places.searched, and then what is shipped for its board.

    One that is not there is left out; one that cannot be opened, or is not to be trusted, with a warning.
    """
    found: list[Source | PerBoard] = []
    for where, name, override in places.searched():
        try:
            found.append(open_source(where, name=name, override=override))
        except DatabaseError as e:
            log.warning("%s; looking on without it%s", e.message, f" ({e.hint})" if e.hint else "")
    opened = [source for source in found if not isinstance(source, PerBoard)]
    if (beyond := Revocations.beyond(opened)) is not None:
        found.append(beyond)
    return [*found, Shipped()]


def sources_for(url: str | None) -> list[Source | PerBoard]:
    """What `--db` names, or `default_sources()` where it names nothing. Raises DatabaseError."""
    return default_sources() if url is None else [open_source(url)]
