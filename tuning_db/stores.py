"""The databases that a run asks, opened as Stores: to look at all that they hold. A run itself opens `sources`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kerngen.arch import Target
from kerngen.errors import DatabaseError
from kerngen.tuning_db import shipped
from kerngen.tuning_db.keep.bundles import open_any
from kerngen.tuning_db.keep.store import Store
from kerngen.tuning_db.serve import places
from kerngen.tuning_db.serve.boards import nearest_board

log = logging.getLogger(__name__)


def default_stores(targets: Sequence[Target] = ()) -> list[Store]:
    """What a run looks in, places.searched and then what is shipped. All read-only.

    targets: whose shipped sheets are made a database of, if that was not done before; those of other boards are among
    these as far as they were. One that is not there is left out; one that cannot be opened is left out with a warning.
    """
    found: list[Store] = []
    for where, name, override in places.searched():
        try:
            found.append(open_any(where, name=name, override=override))
        except DatabaseError as e:
            log.warning("%s; looking on without it", e.message)
    for board in {b.name: b for t in targets if (b := nearest_board(t.device)) is not None}.values():
        if isinstance(made := shipped.open_board(board), Store):  # that could not be kept
            found.append(made)
        else:
            made.close()
    for name, path in shipped.kept_files():
        found.append(open_any(str(path), name=name, allow_unsigned=True))
    return found


def stores_for(url: str | None, targets: Sequence[Target] = ()) -> list[Store]:
    """What `--db` names, read-only, or `default_stores(targets)` where it names nothing. Raises DatabaseError."""
    return default_stores(targets) if url is None else [open_any(url)]
