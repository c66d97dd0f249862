"""The databases that a run asks, opened in their order."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from kerngen.errors import DatabaseError
from kerngen.tuning_db.keep.bundles import open_any
from kerngen.tuning_db.keep.engine import is_absent
from kerngen.tuning_db.keep.store import Store
from kerngen.tuning_db.serve.places import PREBUILT, default_path

log = logging.getLogger(__name__)


def default_stores() -> list[Store]:
    """What a run looks in: $KERNGEN_DB_OVERRIDE, the user's database, then the prebuilt ones. All read-only.

    One that is not there is left out; one that cannot be opened is left out with a warning.
    """
    stores: list[Store] = []
    places: list[tuple[str, dict[str, Any]]] = []
    if override := os.environ.get("KERNGEN_DB_OVERRIDE"):
        places.append((override, {"name": "override", "override": True}))
    user = default_path()
    if "://" in user or not is_absent(Path(user)):
        places.append((user, {"name": "user"}))
    places += [(str(p), {"name": f"prebuilt {p.stem}", "sealed": True}) for p in sorted(PREBUILT.glob("*.sqlite"))]
    for place, options in places:
        try:
            stores.append(Store.open(place, read_only=True, **options))
        except DatabaseError as e:
            log.warning("%s; looking on without it", e.message)
    return stores


def stores_for(url: str | None) -> list[Store]:
    """What `--db` names, read-only, or `default_stores()` where it names nothing. Raises DatabaseError."""
    return default_stores() if url is None else [open_any(url)]
