"""The databases that a run asks, opened as Stores: to look at all that they hold. A run itself opens `sources`."""

from __future__ import annotations

import logging

from kerngen.errors import DatabaseError
from kerngen.tuning_db.keep.bundles import open_any
from kerngen.tuning_db.keep.store import Store
from kerngen.tuning_db.serve import places

log = logging.getLogger(__name__)


def default_stores() -> list[Store]:
    """What a run looks in (places.searched). All read-only.

    One that is not there is left out; one that cannot be opened is left out with a warning.
    """
    found: list[Store] = []
    for where, name, override, shipped in places.searched():
        try:
            found.append(open_any(where, name=name, override=override, shipped=shipped))
        except DatabaseError as e:
            log.warning("%s; looking on without it", e.message)
    return found


def stores_for(url: str | None) -> list[Store]:
    """What `--db` names, read-only, or `default_stores()` where it names nothing. Raises DatabaseError."""
    return default_stores() if url is None else [open_any(url)]
