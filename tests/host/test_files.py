"""Publication of files: what the compile cache and `kerngen compile -o` promise of every file that they write."""

from __future__ import annotations

import os
import re
import resource
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Kerngen

from kerngen.system import files
from kerngen.system.files import locked, publish

COMPILE = ("compile", "--arch", "sm70", "--kernel", "embed", "--cases", "--jobs", "1")


def _all(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if not p.is_dir())


def test_a_file_is_there_with_the_mode_that_the_user_wants(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        publish(b"one", tmp_path / "a" / "b" / "file")
        publish(b"two", tmp_path / "a" / "b" / "file")
    finally:
        os.umask(old)
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"two"
    assert stat.S_IMODE((tmp_path / "a" / "b" / "file").stat().st_mode) == 0o640
    assert _all(tmp_path) == ["file"]


def test_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the target is one, nor where somebody had guessed the scratch name."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "target").symlink_to(victim)
    publish(b"data", tmp_path / "target")
    assert not (tmp_path / "target").is_symlink()
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / f"{files._SCRATCH}guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        publish(b"data", tmp_path / "other")
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "other").exists()


def test_a_lock_writes_to_nothing_and_waits_for_no_pipe(tmp_path: Path) -> None:
    """Whatever lies where its file is expected to be: somebody may have put it there."""
    victim, lock = tmp_path / "victim", tmp_path / ".lock"
    victim.write_bytes(b"precious")
    for put in (lambda: lock.symlink_to(victim), lambda: os.mkfifo(lock), lock.mkdir):
        put()
        with pytest.raises(OSError, match=re.escape(str(lock))), locked(lock):
            pass
        lock.rmdir() if lock.is_dir() and not lock.is_symlink() else lock.unlink()
    os.link(victim, lock)
    with locked(lock):
        pass
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("interrupt", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_what_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, interrupt: BaseException
) -> None:
    (tmp_path / "file").write_bytes(b"before")

    def fail(*_: object) -> None:
        raise interrupt

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(interrupt)):
        publish(b"after", tmp_path / "file")
    assert _all(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"before"


def _synced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Watches os.fsync; the paths that were synced."""
    seen: list[str] = []
    fsync = os.fsync

    def watch(fd: int) -> None:
        seen.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watch)
    return lambda: seen


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc here")
def test_file_and_folder_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = _synced(monkeypatch)
    publish(b"data", tmp_path / "file")
    (scratch, folder) = synced()
    assert Path(scratch).parent == tmp_path
    assert folder == str(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc here")
def test_compile_syncs_what_it_writes(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = _synced(monkeypatch)
    assert kerngen(*COMPILE, "-o", "out")[0] == 0
    out = kerngen.folder / "out"
    folders = [p for p in synced() if p.startswith(str(out)) and Path(p).is_dir()]
    assert len(folders) == len(_all(out)) > 1
    seen = len(synced())
    model = ("compile", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed", "--jobs", "1")
    assert kerngen(*model, "-o", "out.kgdb")[0] == 0
    scratch, folder = (p for p in synced()[seen:] if Path(p).parent == kerngen.folder or Path(p) == kerngen.folder)
    assert Path(scratch).name.startswith(files._SCRATCH)
    assert folder == str(kerngen.folder)


def test_a_disk_that_is_full_keeps_no_half_files(kerngen: Kerngen) -> None:
    """A limit on the size of files stands for it: room for 1,000 bytes of each."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # noqa: E731
    code, out, err = kerngen.run(*COMPILE, "-o", "out", lend=False, preexec_fn=limit)
    assert (code, out) == (1, "")
    assert "cannot write out: File too large" in err
    assert _all(kerngen.folder / "out") == []
    assert _all(kerngen.folder / "cache") == []
