"""Whose files are read, and whose are not."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from kerngen.system import owner
from kerngen.system.files import open_regular, read_regular
from kerngen.system.owner import why_distrusted

FILE, FOLDER, STICKY = stat.S_IFREG, stat.S_IFDIR, stat.S_IFDIR | stat.S_ISVTX
ME, ROOT, OTHER, NOBODY = 1000, 0, 1001, 65534


def _stat(mode: int, uid: int, gid: int) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))


@pytest.fixture(autouse=True)
def private_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played users: each has a group of his number to himself; group 50 is of many. The environment says nothing."""
    monkeypatch.delenv("KERNGEN_TRUST_FILES", raising=False)
    monkeypatch.setattr(owner, "_is_owners_alone", lambda uid, gid: uid == gid)


@pytest.mark.parametrize("euid", [ROOT, ME, OTHER])
@pytest.mark.parametrize("uid", [ROOT, ME, OTHER, NOBODY])
@pytest.mark.parametrize("kind", [FILE, FOLDER, STICKY])
@pytest.mark.parametrize("mode", [0o400, 0o600, 0o644, 0o755, 0o664, 0o775, 0o666, 0o777, 0o602])
@pytest.mark.parametrize("shared", [False, True])
def test_every_owner_mode_and_reader(
    monkeypatch: pytest.MonkeyPatch, euid: int, uid: int, kind: int, mode: int, shared: bool
) -> None:
    gid = 50 if shared else uid
    monkeypatch.setattr(os, "geteuid", lambda: euid)
    monkeypatch.setattr(os, "fstat", lambda fd: _stat(kind | mode, uid, gid))
    mine = uid in (ROOT, euid)
    closed = kind == STICKY or not (mode & 0o002 or (shared and mode & 0o020))
    why = why_distrusted(5)
    assert (why is None) == (mine and closed), why
    if why is not None:
        assert why.startswith("belongs to " if not mine else "can be written by ")
    monkeypatch.setenv("KERNGEN_TRUST_FILES", "1")
    assert why_distrusted(5) is None
    monkeypatch.setenv("KERNGEN_TRUST_FILES", "0")
    assert why_distrusted(5) == why


@pytest.mark.parametrize(("mode", "folder", "says"), [
    (0o644, 0o755, None), (0o600, 0o700, None), (0o644, 0o1777, None), (0o666, 0o755, "can be written by everyone"),
    (0o644, 0o777, "lies in {folder}, which can be written by everyone"),
])  # fmt: skip
def test_a_path_is_as_good_as_its_folder(tmp_path: Path, mode: int, folder: int, says: str | None) -> None:
    here = tmp_path / "here"
    here.mkdir()
    path = here / "file"
    path.write_text("x")
    path.chmod(mode)
    here.chmod(folder)
    assert why_distrusted(path) == (says and says.format(folder=here))
    link = tmp_path / "link"
    link.symlink_to(path)
    assert why_distrusted(link) == (says and says.format(folder=here)), "a link is as good as what it names"


def test_an_open_file_is_what_is_judged(tmp_path: Path) -> None:
    """Whatever its name has come to mean meanwhile."""
    path = tmp_path / "file"
    path.write_text("x")
    path.chmod(0o666)
    with path.open("rb") as f:
        path.unlink()
        path.write_text("another")
        path.chmod(0o600)
        assert why_distrusted(f.fileno()) == "can be written by everyone"
    assert why_distrusted(path) is None
    with pytest.raises(FileNotFoundError):
        why_distrusted(tmp_path / "nothing")


def test_a_private_group_is_of_its_owner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    users = {7: ("ann", 7), 8: ("bob", 8), 9: ("cat", 50)}
    groups: dict[int, tuple[str, list[str]]] = {7: ("ann", []), 8: ("bob", ["bob", "ann"]), 50: ("cat", [])}

    class User:
        def __init__(self, uid: int) -> None:
            self.pw_name, self.pw_gid = users[uid]

    class Group:
        def __init__(self, gid: int) -> None:
            self.gr_name, self.gr_mem = groups[gid]

    monkeypatch.setattr(owner.pwd, "getpwuid", User)
    monkeypatch.setattr(owner.grp, "getgrgid", Group)
    alone = owner._is_owners_alone.__wrapped__
    assert alone(7, 7)
    assert not alone(8, 8), "ann is in bob's group"
    assert not alone(8, 7)
    assert alone(9, 50)
    groups[50] = ("staff", [])
    assert not alone(9, 50)
    assert not alone(10, 10), "nobody knows them"


def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    """Opening a pipe to read would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_bytes(b"x")
    for name, number in (
        ("pipe", errno.EINVAL), ("folder", errno.EINVAL), ("none", errno.ENOENT), ("loop", errno.ELOOP),
    ):  # fmt: skip
        with pytest.raises(OSError, match=name) as caught:
            open_regular(tmp_path / name)
        assert caught.value.errno == number
    with open_regular(tmp_path / "file") as f:
        assert f.read() == b"x"
    assert read_regular(tmp_path / "file", 1) == b"x"
    with pytest.raises(OSError, match="holds more than 0 B"):
        read_regular(tmp_path / "file", 0)
    with pytest.raises(OSError, match="no regular file"):
        read_regular("/dev/zero", 1)
