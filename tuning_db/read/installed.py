"""The search path of bundles: those in $KERNGEN_DB_PATH, then those that were installed for this user.

    $KERNGEN_DB_PATH                        sealed files, and folders of them (*.kgdb), between colons
    <data>/kerngen/bundles/installed.json   which are installed, in what version, newest first
    <data>/kerngen/bundles/<digest>.kgdb    those, and the versions that they can be rolled back to

Each is opened read-only and verified like any other: to be here is not to be trusted. The list keeps what each bundle,
in any version that was installed, revoked: that holds whatever becomes of its file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kerngen.errors import DatabaseError, TrustError, UsageError, printable_name
from kerngen.system.files import locked, make_folder, open_regular, publish
from kerngen.system.owner import TRUST_HINT, why_distrusted
from kerngen.tuning_db.read.sealed import SUFFIX, Sealed, is_sealed_file
from kerngen.tuning_db.read.source import ClosedAtEnd, Source
from kerngen.tuning_db.read.values import Build, Winner

log = logging.getLogger(__name__)

_LIST = "installed.json"
_DIGITS = 16  # of a digest, in file names
_KEPT = 8  # versions of one bundle


@dataclass(frozen=True, slots=True)
class Installed:
    """versions: digests of one bundle's, the oldest first. active: the index of the one that is served.

    pinned: another version does not take its place unless that is asked for. sequence: the highest that was installed
    (Sealed.sequence). revoked: what any of them revoked, each with the reason; None of what an older kerngen installed,
    which noted none.
    """

    name: str
    versions: tuple[str, ...]
    active: int
    pinned: bool = False
    sequence: int = 0
    revoked: dict[str, str] | None = None

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
        found = [Installed(str(b["name"]), tuple(map(str, b["versions"])), int(b["active"]), bool(b["pinned"]),
                           int(b.get("sequence", 0)), _revoked(b.get("revoked")))
                 for b in stated["bundles"]]  # fmt: skip
        if not all(0 <= b.active < len(b.versions) and all(map(_is_digest, b.versions)) for b in found):
            raise ValueError("it names versions that there are not")
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise DatabaseError(f"{path} is damaged: {e}", hint="delete it, and install anew") from e
    return found


def _revoked(stated: Any) -> dict[str, str] | None:
    return None if stated is None else {str(subject): str(reason) for subject, reason in stated.items()}


def revoked() -> dict[str, str]:
    """What installed bundles revoked, in any of their versions, each with the reason. Raises DatabaseError."""
    return {subject: reason for b in installed() for subject, reason in (b.revoked or {}).items()}


class Revocations(ClosedAtEnd):
    """A Source that has nothing but what installed bundles revoked whose files do not say so (any more)."""

    name, override = "installed", False

    def __init__(self, revoked: dict[str, str]) -> None:
        self.where = str(folder() / _LIST)
        self._revoked = revoked

    @classmethod
    def beyond(cls, sources: Iterable[Source]) -> Revocations | None:
        """Of what no source revokes itself; None where there is none of that."""
        with contextlib.suppress(DatabaseError, OSError):  # which search_path said
            left = revoked()
            for source in sources if left else ():
                with contextlib.suppress(DatabaseError):
                    left = {subject: why for subject, why in left.items() if subject not in source.revoked()}
            return cls(left) if left else None
        return None

    def line(self, kernel: str, static_key: str, arch: str) -> None:
        return None

    def image(self, build: Build) -> None:
        return None

    def winners(self, kernel: str | None = None) -> list[Winner]:
        return []

    def revoked(self) -> dict[str, str]:
        return self._revoked

    def renamed(self, ids: Collection[str]) -> set[str]:
        return set()

    def close(self) -> None:
        pass


def install(file: str | os.PathLike[str], *, name: str = "", pin: bool = False, force: bool = False) -> Installed:
    """Copy a sealed file that was verified to where every run looks. name: the one in its header unless given.

    force: though it is older than what was installed by that name, or that cannot be read any more, and so what it
    revoked. Raises UsageError where another version is pinned, TrustError without force, DatabaseError, OSError.
    """
    sealed = Sealed.open(file)
    called = name or printable_name(str(sealed.header.get("name") or Path(file).stem))
    with _changing() as found:
        old = next((b for b in found if b.name == called), None)
        if old is not None and old.pinned and old.digest != sealed.digest and not pin:
            raise UsageError(
                f"{called} is pinned to {old.digest[:_DIGITS]}", hint="--pin replaces it and pins this one"
            )
        known = old and _known(old, sealed, force)
        before = old.versions[: old.active + 1] if old is not None else ()
        versions = (*(v for v in before if v != sealed.digest), sealed.digest)[-_KEPT:]
        new = Installed(called, versions, len(versions) - 1, pin or (old is not None and old.pinned),
                        max(sealed.sequence, old.sequence if old is not None else 0),
                        (known or {}) | sealed.revocations())  # fmt: skip
        with open_regular(file) as f:
            publish(f.read(), new.path)
        if Sealed.open(new.path).digest != sealed.digest:
            raise DatabaseError(f"{os.fspath(file)} was changed while it was copied")
        found[:] = [new, *(b for b in found if b.name != called)]
    return new


def _known(old: Installed, sealed: Sealed, force: bool) -> dict[str, str]:
    """What is known to be revoked by what `sealed` takes the place of. Raises TrustError unless force."""
    known, newest, why = dict(old.revoked or {}), old.sequence, ""
    for digest in old.versions if old.revoked is None else ():  # an older kerngen's: what its files say
        try:
            before = Sealed.open(_path(digest))
            known |= before.revocations()
            newest = max(newest, before.sequence)
        except DatabaseError as e:
            why = f"what {old.name} revoked is not known, and would be served: {e.message}"
    if sealed.sequence < newest:
        why = f"{old.name} was installed with results up to {_when(newest)}, and {sealed.path} has none after "
        why += f"{_when(sealed.sequence)}: what was corrected since would come back"
    if why and not force:
        raise TrustError(why, hint="--force installs it all the same; --rollback NAME goes back to what was installed")
    return known


def _when(sequence: int) -> str:
    try:
        return datetime.fromtimestamp(sequence / 1e6, UTC).isoformat(" ", "seconds") if sequence else "an unknown date"
    except (OverflowError, ValueError):
        return str(sequence)


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
