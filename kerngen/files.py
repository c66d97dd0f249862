"""Where kerngen keeps files of its own."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path


def cache_dir() -> Path:
    """The compile cache: $KERNGEN_CACHE_DIR, or a folder in the user's cache folder (~/.cache/kerngen on Linux)."""
    if chosen := os.environ.get("KERNGEN_CACHE_DIR"):
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("kerngen", appauthor=False)) / "compile"


@cache
def make_room_for_cupy() -> None:
    """To be called before CuPy is imported: it makes a cache folder then, ~/.cupy, and cannot be imported without.

    Where that cannot be made and $CUPY_CACHE_DIR names no other, it gets one in kerngen's cache, or a temporary one.
    kerngen itself keeps nothing there. Raises OSError where there is no temporary folder either.
    """
    if "CUPY_CACHE_DIR" in os.environ:
        return
    with contextlib.suppress(OSError):
        os.makedirs(os.path.expanduser("~/.cupy/kernel_cache"), exist_ok=True)
        return
    own = cache_dir() / "cupy"
    try:
        own.mkdir(parents=True, exist_ok=True)
    except OSError:
        own = Path(tempfile.mkdtemp(prefix="kerngen-cupy-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
    os.environ["CUPY_CACHE_DIR"] = str(own)
