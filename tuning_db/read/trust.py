"""Trusted keys: a bundle is a program, so who signed it decides whether it is run.

A public key is a file of one line, `kerngen-ed25519 <base64 of its 32 bytes> <comment>`. Those in these places are
trusted, all of them:

    $KERNGEN_TRUST                   files and folders, between colons
    <config>/kerngen/trusted/*.pub   the user's (~/.config on Linux)
    /etc/kerngen/trusted/*.pub       the host's

A folder there may also hold `<64 hex digits>.digest`: one bundle, by its header's digest, whoever signed it or nobody.
A file that another user may have written (owner.py) or that is no key counts for nothing, with a warning.
KERNGEN_TRUST_UNSIGNED=1 trusts every bundle.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kerngen.errors import TrustError
from kerngen.system.environment import is_set
from kerngen.system.files import open_regular, publish
from kerngen.system.owner import TRUST_HINT, why_distrusted

log = logging.getLogger(__name__)

MAGIC = "kerngen-ed25519"
_LINE_BYTES = 1024  # of a key file at most
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HOST = Path("/etc/kerngen/trusted")


def key_id(raw: bytes) -> str:
    """What a public key is called in signatures and commands: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(raw).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PublicKey:
    """raw: the 32 bytes of an ed25519 public key. comment: whose it is, in words; printable."""

    raw: bytes
    comment: str = ""

    def __str__(self) -> str:
        return f"{self.id} ({self.comment})" if self.comment else self.id

    @property
    def id(self) -> str:
        return key_id(self.raw)

    @property
    def line(self) -> str:
        """What its file holds."""
        return f"{MAGIC} {base64.b64encode(self.raw).decode()} {self.comment}".rstrip() + "\n"

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """The key of a file's line. Raises TrustError, saying what is wrong."""
        raw, comment = parse_line(text, MAGIC)
        return cls(raw, comment)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PublicKey:
        """The key in a file, whoever wrote that. Raises TrustError; OSError where it cannot be read."""
        with open_regular(path) as f:
            return cls.parse(decode_line(f.read(_LINE_BYTES + 1)))

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """True if this key's owner signed `message`."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError):  # ValueError: no point of the curve
            return False
        return True


def parse_line(text: str, magic: str) -> tuple[bytes, str]:
    """(the 32 bytes, the comment) of `<magic> <base64> <comment>`. Raises TrustError."""
    word, _, rest = text.rstrip("\r\n").partition(" ")
    if word != magic:
        raise TrustError(f"it does not begin with {magic!r}")
    code, _, comment = rest.partition(" ")
    try:
        raw = base64.b64decode(code, validate=True)
    except ValueError as e:
        raise TrustError("its key is not base64") from e
    if len(raw) != 32 or base64.b64encode(raw).decode() != code:
        raise TrustError("its key is not the base64 of 32 bytes")
    if not comment.isprintable():
        raise TrustError("its comment is not of one printable line")
    return raw, comment.strip()


def decode_line(data: bytes) -> str:
    """A key file's text. Raises TrustError."""
    try:
        if len(data) <= _LINE_BYTES:
            return data.decode()
    except UnicodeDecodeError:
        pass
    raise TrustError("it is no line of text")


def user_folder() -> Path:
    """Where the user's own keys lie, and in it, in `trusted`, the keys that he trusts."""
    import platformdirs

    return Path(platformdirs.user_config_dir("kerngen", appauthor=False))


def trusted_places() -> list[Path]:
    """The files and folders that are looked in, whether they are there or not."""
    named = [Path(p) for p in os.environ.get("KERNGEN_TRUST", "").split(os.pathsep) if p]
    return [*named, user_folder() / "trusted", _HOST]


def trusted_keys() -> dict[str, PublicKey]:
    """The keys that are trusted, by id."""
    found: dict[str, PublicKey] = {}
    for path in _trusted_files(".pub"):
        try:
            with open_regular(path) as f:
                if (why := _why(path, f.fileno())) is not None:
                    raise TrustError(why)
                key = PublicKey.parse(decode_line(f.read(_LINE_BYTES + 1)))
        except (OSError, TrustError) as e:
            log.warning("%s: %s; it is not trusted", path, e.strerror if isinstance(e, OSError) else e.message)
            continue
        found.setdefault(key.id, key)
    return found


def trusted_digests() -> set[str]:
    """The bundles that are trusted by themselves, by the SHA-256 of their header, in hex."""
    found = set()
    for path in _trusted_files(".digest"):
        try:
            why = "its name is no digest" if _DIGEST.fullmatch(path.stem) is None else _why(path)
        except OSError as e:
            why = e.strerror or str(e)
        if why is None:
            found.add(path.stem)
        else:
            log.warning("%s: %s; it is not trusted", path, why)
    return found


def _trusted_files(suffix: str) -> list[Path]:
    """What has this ending in the trusted places, whoever wrote it."""
    found: list[Path] = []
    for place in trusted_places():
        try:
            found += [p for p in (sorted(place.iterdir()) if place.is_dir() else [place]) if p.suffix == suffix]
        except OSError as e:
            log.warning("%s: %s; what is trusted there is not", place, e.strerror or e)
    return [p for p in found if os.path.lexists(p)]


def _why(path: Path, fd: int | None = None) -> str | None:
    """Why a file in a trusted place counts for nothing: others may have written it."""
    why = (None if fd is None else why_distrusted(fd)) or why_distrusted(path)
    return why and f"it {why} ({TRUST_HINT})"


def trusts_unsigned() -> bool:
    """True where KERNGEN_TRUST_UNSIGNED is set (to anything but "" or "0")."""
    return is_set("KERNGEN_TRUST_UNSIGNED")


def signed_message(digest: str) -> bytes:
    """What is signed of a bundle whose header has the SHA-256 `digest`, in hex."""
    return b"kerngen-bundle-1\0" + bytes.fromhex(digest)


def why_untrusted(digest: str, signatures: Mapping[str, bytes]) -> str | None:
    """Why a bundle is not run, to go after its name: "is not signed"; None if it is. One trusted signature is enough.

    digest: the SHA-256 of its header, in hex. signatures: by the id of the key that is said to have made each.
    """
    if trusts_unsigned() or digest in trusted_digests():
        return None
    keys = trusted_keys()
    known = [keys[id] for id in signatures if id in keys]
    if any(k.verifies(signatures[k.id], signed_message(digest)) for k in known):
        return None
    if known:
        return f"has a signature of {known[0]} that does not hold: it was changed since"
    return (
        f"is signed by no key that is trusted here, but by {', '.join(signatures)}" if signatures else "is not signed"
    )


def trust(key: PublicKey) -> Path:
    """Trust what `key` signs, as this user: the file that says so. Raises OSError."""
    path = user_folder() / "trusted" / f"{key.id}.pub"
    publish(key.line.encode(), path)
    return path


def trust_digest(digest: str) -> Path:
    """Trust the bundle whose header has this SHA-256: the file that says so. Raises TrustError, OSError."""
    if _DIGEST.fullmatch(digest) is None:
        raise TrustError(f"{digest!r:.80} is no SHA-256: it has 64 hex digits", hint="kerngen db verify FILE says it")
    path = user_folder() / "trusted" / f"{digest}.digest"
    publish(b"", path)
    return path


def distrust(id: str) -> list[Path]:
    """Trust a key id, or a digest, no longer: the user's files that were removed.

    Raises TrustError if it is still trusted from where they are not the user's to remove; OSError.
    """
    removed = []
    for path in (user_folder() / "trusted").glob("*"):
        try:
            named = PublicKey.read(path).id if path.suffix == ".pub" else path.stem
        except (TrustError, OSError):  # no key, so not this one
            continue
        if named == id:
            path.unlink()
            removed.append(path)
    if id in trusted_keys() or id in trusted_digests():
        places = ", ".join(map(str, trusted_places()))
        raise TrustError(f"{id} is still trusted by a file in {places}", hint="remove that one")
    return removed
