"""The search path of bundles: those in $KERNGEN_DB_PATH, then those that were installed for this user.

    $KERNGEN_DB_PATH                        sealed files, and folders of them (*.kgdb), between colons
    <data>/kerngen/bundles/installed.json   which are installed, in what version, newest first
    <data>/kerngen/bundles/<digest>.kgdb    those, and the versions that they can be rolled back to

Each is opened read-only and verified like any other: to be here is not to be trusted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kerngen.errors import DatabaseError, UsageError
from kerngen.system.files import locked, make_folder, open_regular, publish
from kerngen.system.owner import TRUST_HINT, why_distrusted
from kerngen.tuning_db.read.sealed import SUFFIX, Sealed, is_sealed_file

log = logging.getLogger(__name__)

_LIST = "installed.json"
_DIGITS = 16  # of a digest, in file names
_KEPT = 8  # versions of one bundle


@dataclass(frozen=True, slots=True)
class Installed:
    """versions: digests of one bundle's, the oldest first. active: the index of the one that is served.

    pinned: another version does not take its place unless that is asked for.
    """

    name: str
    versions: tuple[str, ...]
    active: int
    pinned: bool = False

    @property
    def digest(self) -> str:
        return self.versions[self.active]

    @property
    def path(self) -> Path:
        return _path(self.digest)


def folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_data_dir("kerngen", appauthor=False)) / "bundles"


def search_path() -> list[tuple[str, Path]]:
    """(name, file) of all bundles that a run asks, in their order, whether they can be read or not."""
    found: list[tuple[str, Path]] = []
    for place in filter(None, os.environ.get("KERNGEN_DB_PATH", "").split(os.pathsep)):
        path = Path(place)
        if path.is_dir():
            found += [(f.stem, f) for f in sorted(path.glob(f"*{SUFFIX}"))]
        elif is_sealed_file(path):
            found.append((path.stem, path))
        else:
            log.warning("%s, in KERNGEN_DB_PATH, is no sealed file; looking on without it", path)
    try:
        found += [(b.name, b.path) for b in installed()]
    except (DatabaseError, OSError) as e:
        log.warning("%s; looking on without what is installed", e.message if isinstance(e, DatabaseError) else e)
    return found


def installed() -> list[Installed]:
    """What is installed, the newest first. Raises DatabaseError where the list is damaged or others may write it."""
    path = folder() / _LIST
    try:
        with open_regular(path) as f:
            if (why := why_distrusted(f.fileno()) or why_distrusted(path)) is not None:
                raise DatabaseError(f"{path} {why}", hint=TRUST_HINT)
            stated = json.loads(f.read())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, RecursionError) as e:
        raise DatabaseError(f"{path}: {e}", hint=f"delete it, and install anew: kerngen db install FILE{SUFFIX}") from e
    try:
        if stated["kerngen_installed"] != 1:
            raise ValueError(f"it is of version {stated['kerngen_installed']!r:.20}")
        found = [Installed(str(b["name"]), tuple(map(str, b["versions"])), int(b["active"]), bool(b["pinned"]))
                 for b in stated["bundles"]]  # fmt: skip
        if not all(0 <= b.active < len(b.versions) and all(map(_is_digest, b.versions)) for b in found):
            raise ValueError("it names versions that there are not")
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise DatabaseError(f"{path} is damaged: {e}", hint="delete it, and install anew") from e
    return found


def install(file: str | os.PathLike[str], *, name: str = "", pin: bool = False) -> Installed:
    """Copy a sealed file that was verified to where every run looks. name: the one in its header unless given.

    Raises UsageError where another version is pinned, DatabaseError, OSError.
    """
    sealed = Sealed.open(file)
    called = name or str(sealed.header.get("name") or Path(file).stem)
    with _changing() as found:
        old = next((b for b in found if b.name == called), None)
        if old is not None and old.pinned and old.digest != sealed.digest and not pin:
            raise UsageError(
                f"{called} is pinned to {old.digest[:_DIGITS]}", hint="--pin replaces it and pins this one"
            )
        before = old.versions[: old.active + 1] if old is not None else ()
        versions = (*(v for v in before if v != sealed.digest), sealed.digest)[-_KEPT:]
        new = Installed(called, versions, len(versions) - 1, pin or (old is not None and old.pinned))
        with open_regular(file) as f:
            publish(f.read(), new.path)
        if Sealed.open(new.path).digest != sealed.digest:
            raise DatabaseError(f"{os.fspath(file)} was changed while it was copied")
        found[:] = [new, *(b for b in found if b.name != called)]
    return new


def change(name: str, *, rollback: bool = False, pinned: bool | None = None) -> Installed:
    """Go back to the version before, or pin or unpin. Raises UsageError, DatabaseError, OSError."""
    with _changing() as found:
        at, old = _find(found, name)
        new = old
        if rollback:
            if old.active == 0:
                raise UsageError(f"there is no version of {name} before {old.digest[:_DIGITS]}")
            new = replace(new, active=old.active - 1)
        if pinned is not None:
            new = replace(new, pinned=pinned)
        if not new.path.is_file():
            raise DatabaseError(f"{new.path} is gone: {name} cannot go back to it")
        found[at] = new
    return new


def uninstall(name: str) -> Installed:
    """Remove a bundle, all its versions. Raises UsageError, DatabaseError, OSError."""
    with _changing() as found:
        at, old = _find(found, name)
        del found[at]
    return old


def _find(found: list[Installed], name: str) -> tuple[int, Installed]:
    for at, bundle in enumerate(found):
        if bundle.name == name or (bundle.digest.startswith(name) and len(name) >= _DIGITS):
            return at, bundle
    names = ", ".join(b.name for b in found) or "nothing"
    raise UsageError(f"{name} is not installed; {names} is", hint="kerngen db install --list")


def _path(digest: str) -> Path:
    return folder() / f"{digest[:_DIGITS]}{SUFFIX}"


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


@contextlib.contextmanager
def _changing() -> Iterator[list[Installed]]:
    """The list, written back if the block ends well. One process at a time; readers see the old list or the new."""
    place = folder()
    make_folder(place)
    with locked(place / ".lock"):
        found = installed()
        yield found
        stated = {"kerngen_installed": 1, "bundles": [asdict(b) for b in found]}
        publish(json.dumps(stated, indent=1).encode(), place / _LIST)
        kept = {_path(v) for b in found for v in b.versions}
        for file in place.glob(f"*{SUFFIX}"):
            if file not in kept:
                file.unlink()
