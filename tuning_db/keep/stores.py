"""The databases that a run asks, opened in their order."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kerngen.errors import DatabaseError
from kerngen.tuning_db.keep.bundles import open_any, open_bundle
from kerngen.tuning_db.keep.engine import is_absent
from kerngen.tuning_db.keep.store import Store
from kerngen.tuning_db.serve.installed import search_path
from kerngen.tuning_db.serve.places import PREBUILT, default_path

log = logging.getLogger(__name__)


def default_stores() -> list[Store]:
    """What a run looks in: $KERNGEN_DB_OVERRIDE, the user's database, bundles, then the prebuilt ones. All read-only.

    Bundles: those in $KERNGEN_DB_PATH, then those that were installed. One that is not there is left out; one that
    cannot be opened, or is signed by nobody who is trusted here, is left out with a warning.
    """
    places: list[Callable[[], Store]] = []
    if override := os.environ.get("KERNGEN_DB_OVERRIDE"):
        places.append(partial(open_any, override, name="override", override=True))
    user = default_path()
    if "://" in user or not is_absent(Path(user)):
        places.append(partial(open_any, user, name="user"))
    places += [partial(open_bundle, path, name=f"bundle {name}") for name, path in search_path()]
    for path in sorted(PREBUILT.glob("*.sqlite")):
        places.append(partial(Store.open, path, read_only=True, sealed=True, name=f"prebuilt {path.stem}"))
    stores: list[Store] = []
    for opened in places:
        try:
            stores.append(opened())
        except DatabaseError as e:
            log.warning("%s; looking on without it", e.message)
    return stores


def stores_for(url: str | None) -> list[Store]:
    """What `--db` names, read-only, or `default_stores()` where it names nothing. Raises DatabaseError."""
    return default_stores() if url is None else [open_any(url)]
