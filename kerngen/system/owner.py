"""Checks who may write a file before it is read, since machine code and databases are programs.

A file or folder is trusted that belongs to root or to the user that asks, and that no other can write. A group that is
its owner's alone, as most distributions give to each user, is no other; a folder that all may write but where each
may only touch what is his (/tmp, the sticky bit) is as good as one's own. KERNGEN_TRUST_FILES=1 trusts all.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from functools import cache
from pathlib import Path

from kerngen.system.environment import is_set

TRUST_HINT = "if it is meant to be read: chown and chmod go-w it, or export KERNGEN_TRUST_FILES=1"


def trusts_all() -> bool:
    """True where KERNGEN_TRUST_FILES is set (to anything but "" or "0"): nobody is asked whose a file is."""
    return is_set("KERNGEN_TRUST_FILES")


def why_distrusted(place: str | os.PathLike[str] | int) -> str | None:
    """Why another user may have written what is at `place`, to go after its name: "belongs to uid 7"; None if none may.

    place: a path, whose folder is looked at too (and, of a link, that of its target), or an open descriptor, which is
    the very file that is then read, whatever a path has come to name meanwhile. Raises OSError where there is none.
    """
    if trusts_all():
        return None
    if isinstance(place, int):
        return _why(os.fstat(place))
    path = str(Path(place).absolute())
    if (why := _why(os.stat(path))) is not None:
        return why
    for name in (path, os.path.realpath(path)) if os.path.islink(path) else (path,):
        folder = os.path.dirname(name)
        if (why := _why(os.stat(folder))) is not None:
            return f"lies in {folder}, which {why}"
    return None


def _why(found: os.stat_result) -> str | None:
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to {_user(found.st_uid)}"
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return None
    if found.st_mode & stat.S_IWOTH:
        return "can be written by everyone"
    if found.st_mode & stat.S_IWGRP and not _is_owners_alone(found.st_uid, found.st_gid):
        return f"can be written by the group {_group(found.st_gid)}"
    return None


@cache
def _is_owners_alone(uid: int, gid: int) -> bool:
    """True for a user's private group: of his name, his first group, and nobody else's."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _group(gid: int) -> str:
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"
