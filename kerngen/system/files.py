"""Where kerngen keeps files of its own, how one is published, whole or not at all, and how one is opened."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from kerngen.errors import KerngenError, UsageError
from kerngen.system.owner import trusts_all

_SCRATCH = ".kerngen-scratch-"
_SCRATCH_LIFE_S = 3600.0  # a scratch file older than this was left by a process that was killed
_NAME_CHARS = 100  # of `file_name`: file systems take 255 bytes


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


def make_folder(path: Path) -> None:
    """Make a folder, and those that it lies in, if need be. Raises OSError.

    Whatever the umask, no other user can write to one that is made: what lies there would not be read (owner.py), but
    where KERNGEN_TRUST_FILES shares it.
    """
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(mode=0o777 if trusts_all() else 0o755, exist_ok=True)


def require_place(path: Path, option: str = "-o") -> None:
    """Raises KerngenError where no file can be made at `path`: to be asked before the work whose results go there. The
    folder that it lies in is made if need be. option: that names the place, for the error.
    """
    try:
        make_folder(path.parent)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileExistsError as e:
        raise unwritable(path, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)), option) from e
    except OSError as e:
        raise unwritable(path, e, option) from e


def unwritable(path: Path, error: OSError, option: str = "-o") -> KerngenError:
    """What to raise where a command cannot write what it was asked for."""
    return KerngenError(f"cannot write {path}: {error.strerror or error}", hint=f"name another place with {option}")


def publish(data: bytes, target: Path) -> None:
    """Make `target` hold `data`, whole or not at all, whatever others do and whenever this is killed; synced to disk.

    Its folder is made if need be. The bytes go into a scratch file beside it first, whose name nobody can guess and
    which is never opened through a link, so that in a folder that others write to nothing else is overwritten. Raises
    OSError; no scratch file is left then. Those of processes that were killed are removed an hour later.
    """
    publish_with(lambda f: f.write(data), target)


def publish_texts(texts: Mapping[Path, str]) -> dict[Path, int]:
    """`publish` each text at its path. Returns their sizes in bytes. Raises OSError."""
    encoded = {path: text.encode() for path, text in texts.items()}
    for path, data in encoded.items():
        publish(data, path)
    return {path: len(data) for path, data in encoded.items()}


def file_name(text: str) -> str:
    """What a file is called after `text`, which may come from a database or a file: one name in its folder.

    ASCII letters, digits and -_. stay, other characters become "-". It begins with no dot, is not empty, and is short
    enough for a suffix.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:_NAME_CHARS]
    return re.sub(r"^\.+", lambda dots: "-" * len(dots[0]), name) or "-"


def publish_with(write: Callable[[BinaryIO], object], target: Path, *, mode: int = 0o644) -> None:
    """As `publish`, of what `write` writes to the file that it is given. mode: of the file, as far as umask lets it."""
    folder = target.parent
    make_folder(folder)
    scratch = folder / f"{_SCRATCH}{secrets.token_hex(16)}"
    # Not tempfile: its mode 0600 would shut others out of what is published. Nobody writes into it again.
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(scratch, target)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
    _sync_folder(folder)
    _sweep(folder)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within it one process at a time of those that ask for `path`, a file that is made if need be; the others wait.

    Nothing is written to it, and no link is followed: its name can be guessed, and its folder may be one that others
    write to. Raises OSError, also for a pipe.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        require_regular(fd, path)
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, to read. Raises OSError, also for a folder, and for a pipe, at which a plain `open` waits."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        require_regular(fd, path)
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def require_regular(fd: int, path: str | os.PathLike[str]) -> None:
    """Raises OSError where what is open is a folder, a pipe or a device."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """All of a regular file. Raises OSError, also where it holds more than `limit` bytes."""
    with open_regular(path) as f:
        data = f.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"holds more than {limit:,} B, which is all that is read", os.fspath(path))
    return data


def read_toml(path: str | os.PathLike[str], limit: int, hint: str) -> dict[str, Any]:
    """What a regular file of `limit` bytes at most says. Raises UsageError with `hint` where it is none, or no TOML."""
    try:
        return tomllib.loads(read_regular(path, limit).decode("utf-8"))
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror or e}", hint=hint) from None
    except UnicodeDecodeError as e:
        raise UsageError(f"{path} is not UTF-8: {e}", hint=hint) from None
    except tomllib.TOMLDecodeError as e:
        raise UsageError(f"{path} is no TOML: {e}", hint=hint) from None


def _sync_folder(folder: Path) -> None:
    """Make the name that was just given to a file outlive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # what file systems answer that sync no folders
            raise
    finally:
        os.close(fd)


def _sweep(folder: Path) -> None:
    """Remove scratch files that dead processes left in `folder`."""
    oldest = time.time() - _SCRATCH_LIFE_S
    for scratch in folder.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another process may sweep too
            if scratch.lstat().st_mtime < oldest:
                scratch.unlink()
