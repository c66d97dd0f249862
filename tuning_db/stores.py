"""Opens the databases that a run asks as Stores, for commands that inspect them. A run opens `sources`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kerngen.arch import Target
from kerngen.errors import DatabaseError, TrustError
from kerngen.tuning_db import shipped
from kerngen.tuning_db.read import places
from kerngen.tuning_db.read.boards import nearest_board, shipped_boards
from kerngen.tuning_db.read.installed import Revocations
from kerngen.tuning_db.store import engine as engines
from kerngen.tuning_db.store import migrate
from kerngen.tuning_db.store.bundles import open_any
from kerngen.tuning_db.store.store import Store

log = logging.getLogger(__name__)


def default_stores(targets: Sequence[Target] | None = None) -> list[Store]:
    """What a run looks in, places.searched and then what is shipped. All read-only.

    targets: whose shipped results are read; None for those of every board, which takes seconds a board where
    they are not made a database of yet. One that is not there is left out; one that cannot be opened, or is not to be
    trusted, with a warning. Raises DatabaseError where the user named a server and none answers.
    """
    found: list[Store] = []
    for where, name, override in places.searched():
        try:
            found.append(open_any(where, name=name, override=override, own=True))
        except TrustError as e:
            log.warning("%s; looking on without it%s", e.message, f" ({e.hint})" if e.hint else "")
        except DatabaseError as e:
            if "://" in where:
                raise
            log.warning("%s; looking on without it", e.message)
    if (beyond := Revocations.beyond(found)) is not None:
        found.append(_holding(beyond))
    wanted = shipped_boards() if targets is None else [nearest_board(t.device) for t in targets]
    for board in {b.name: b for b in wanted if b is not None}.values():
        try:
            found.append(shipped.open_store(board))
        except DatabaseError as e:
            log.warning("%s; looking on without it", e.message)
    return found


def _holding(beyond: Revocations) -> Store:
    engine = migrate.settle(engines.in_memory(), beyond.where, read_only=False)
    store = Store(engine, beyond.where, name=beyond.name, read_only=False, override=False)
    for subject, reason in beyond.revoked().items():
        store.revoke(subject, reason)
    return store


def stores_for(url: str | None, targets: Sequence[Target] | None = None, *, own: bool = False) -> list[Store]:
    """What `--db` names, read-only, or `default_stores(targets)` where it names nothing. own: as open_any.

    Raises DatabaseError.
    """
    return default_stores(targets) if url is None else [open_any(url, own=own)]
