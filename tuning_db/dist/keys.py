"""Secret keys that sign bundles; read/trust.py has the public ones that are trusted.

A secret key is a file of one line, `kerngen-ed25519-secret <base64 of its 32 bytes> <comment>`, that nobody but its
owner can read (mode 0600); the public half lies beside it, with `.pub` after its name.
"""

from __future__ import annotations

import base64
import getpass
import os
import secrets
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kerngen.errors import TrustError
from kerngen.system.files import make_folder, open_regular, publish
from kerngen.tuning_db.read.trust import PublicKey, decode_line, parse_line, trust, user_folder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAGIC = "kerngen-ed25519-secret"
_KEYGEN = "kerngen db keygen FILE makes one"


@dataclass(frozen=True, slots=True)
class SecretKey:
    """An ed25519 key that signs. Its seed is in no message, log or repr."""

    _seed: bytes = field(repr=False)
    comment: str = ""

    @classmethod
    def generate(cls, comment: str = "") -> SecretKey:
        """A new one. Raises TrustError for a comment that is not one printable line of up to 500 bytes."""
        if not comment.isprintable() or len(comment.encode()) > 500:
            raise TrustError(f"{comment!r:.80}: a key's comment is one printable line of up to 500 bytes")
        return cls(secrets.token_bytes(32), comment.strip())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SecretKey:
        """The key in a file. Raises TrustError if others may read or have written it, or it is none."""
        try:
            with open_regular(path) as f:
                found = os.fstat(f.fileno())
                if found.st_uid not in (0, os.geteuid()):
                    raise TrustError(f"{path} belongs to uid {found.st_uid}, not to you: it is not signed with")
                if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
                    raise TrustError(f"{path} is open to others (mode {mode:04o}): it is not signed with",
                                     hint=f"chmod 600 {path}, or if somebody may have read it: {_KEYGEN}")  # fmt: skip
                data = f.read(1025)
        except OSError as e:
            raise TrustError(f"{path}: {e.strerror or e}", hint=_KEYGEN) from e
        try:
            return cls(*parse_line(decode_line(data), MAGIC))
        except TrustError as e:
            raise TrustError(f"{path} is no secret key: {e.message}", hint=_KEYGEN) from e

    def write(self, path: str | os.PathLike[str]) -> None:
        """Its file, mode 0600, and the public half beside it. Raises TrustError where a file is there already."""
        target, public = Path(path), Path(f"{os.fspath(path)}.pub")
        line = f"{MAGIC} {base64.b64encode(self._seed).decode()} {self.comment}".rstrip() + "\n"
        shown = self.public.line.encode()
        taken = "is there already; a key is never written over"
        try:
            make_folder(target.parent)
            if there := [p for p in (target, public) if os.path.lexists(p)]:
                raise TrustError(f"{there[0]} {taken}", hint="name another")
            # Not `publish`, which would put it in place of a key that is there, and is read by others meanwhile.
            try:
                fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                raise TrustError(f"{target} {taken}", hint="name another") from None
            with open(fd, "wb") as f:
                f.write(line.encode())
                f.flush()
                os.fsync(f.fileno())
            publish(shown, public)
        except OSError as e:
            raise TrustError(f"{target}: {e.strerror or e}", hint="name another place") from e

    @property
    def public(self) -> PublicKey:
        return PublicKey(self._key().public_key().public_bytes_raw(), self.comment)

    def sign(self, message: bytes) -> bytes:
        """64 bytes, the same for the same message."""
        return self._key().sign(message)

    def _key(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self._seed)


def read_public(path: str | os.PathLike[str]) -> PublicKey:
    """The public key that a user names by its file. Raises TrustError, naming the file."""
    try:
        return PublicKey.read(path)
    except OSError as e:
        raise TrustError(f"{os.fspath(path)}: {e.strerror or e}", hint=_KEYGEN) from e
    except TrustError as e:
        raise TrustError(f"{os.fspath(path)} is no public key: {e.message}", hint=f"{_KEYGEN}, and FILE.pub") from e


def user_key_path() -> Path:
    """Where the user's own secret key lies, or would."""
    return user_folder() / "signing.key"


def user_key() -> SecretKey:
    """The user's own key, which is made where there is none, and trusted then. Raises TrustError, OSError."""
    path = user_key_path()
    if not os.path.lexists(path):
        made = SecretKey.generate(whose())
        try:
            made.write(path)
        except TrustError:  # another process was faster, or the disk does not take it: reading says which
            return SecretKey.read(path)
        trust(made.public)
        return made
    return SecretKey.read(path)


def whose() -> str:
    """user@host, as far as they are known."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user without a name, as in containers
        return socket.gethostname()
