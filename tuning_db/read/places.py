"""Where tuning databases lie: the user's own, bundles, and the results that kerngen is shipped with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from kerngen.tuning_db.read.files import is_absent
from kerngen.tuning_db.read.installed import search_path

PREBUILT = Path(__file__).resolve().parents[1] / "prebuilt"  # shipped, and never written to
NO_ANSWER = "is that server up, and may this host and user reach it? --db names another"  # to whom one gives none


def default_path() -> str:
    """$KERNGEN_DB (a path or a URL), or tuning.db in the user's data folder."""
    if chosen := os.environ.get("KERNGEN_DB"):
        return chosen
    import platformdirs

    return str(Path(platformdirs.user_data_dir("kerngen", appauthor=False)) / "tuning.db")


class Place(NamedTuple):
    """A database that a run asks."""

    where: str
    name: str
    override: bool = False


def searched() -> list[Place]:
    """What a run looks in before what is shipped: $KERNGEN_DB_OVERRIDE, the user's database, bundles."""
    found = []
    if override := os.environ.get("KERNGEN_DB_OVERRIDE"):
        found.append(Place(override, "override", override=True))
    user = default_path().removeprefix("sqlite:///")
    if "://" in user or not is_absent(Path(user)):
        found.append(Place(user, "user"))
    return found + [Place(str(path), f"bundle {name}") for name, path in search_path()]
