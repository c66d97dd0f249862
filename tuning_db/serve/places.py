"""Where tuning databases lie: the user's own, and those that are shipped with kerngen."""

from __future__ import annotations

import os
from pathlib import Path

PREBUILT = Path(__file__).resolve().parents[1] / "prebuilt"  # shipped, and never written to


def default_path() -> str:
    """$KERNGEN_DB (a path or a URL), or tuning.db in the user's data folder."""
    if chosen := os.environ.get("KERNGEN_DB"):
        return chosen
    import platformdirs

    return str(Path(platformdirs.user_data_dir("kerngen", appauthor=False)) / "tuning.db")
