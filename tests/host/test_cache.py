"""The compile cache: what it returns, and what survives parallel writers, kills, torn files and bad disks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerngen.arch import find_arch
from kerngen.compiler import cache as cache_module
from kerngen.compiler.cache import MAGIC, CachedCompiler, CompileCache, decode, encode
from kerngen.compiler.compile import Cubin, Ptx, Resources
from kerngen.errors import CacheError, CompileError, TuningMiss

SM70 = find_arch("sm70")
SOURCE = 'extern "C" __global__ void scale(float *x, float a) { x[threadIdx.x] *= a; }\n'


def make_cubin(n: int = 0, size: int = 20_000) -> Cubin:
    key = f"{n:02x}" * 32
    image = (bytes([n]) + bytes(range(251))) * (size // 252 + 1)
    return Cubin(key, "sm70", (12, 9), image, {"scale": Resources(32, 0, 0, 8, 1024)}, "ptxas info\n", 12.5)


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "cache")


def files(cache: CompileCache) -> list[Path]:
    return [p for p in cache.dir.rglob("*") if p.is_file()]


def stored(cache: CompileCache) -> list[Path]:
    return [p for p in files(cache) if p.suffix == ".cubin"]


def test_returns_what_was_put(cache: CompileCache) -> None:
    cubin, ptx = make_cubin(), Ptx("ab" * 32, "sm75", (12, 9), b".version 8.8\n\0")
    assert cache.get(cubin.key) is None
    assert cache.put(cubin)
    assert cache.put(ptx)
    assert cache.get(cubin.key) == cubin
    assert cache.get_ptx(ptx.key) == ptx
    assert cache.get(ptx.key) is None


def test_an_image_may_hold_anything(cache: CompileCache) -> None:
    cubin = replace(make_cubin(), image=b"\n\n\0{}\n" * 100)
    cache.put(cubin)
    assert cache.get(cubin.key) == cubin


def test_compiles_once(cache: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache.get_or_compile(SOURCE, SM70)
    monkeypatch.setattr(cache_module, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert CompileCache(cache.dir).get_or_compile(SOURCE, SM70) == first
    assert cache.get_or_compile_ptx(SOURCE, SM70).image.endswith(b"\0")


def test_every_cut_and_every_flip_is_noticed() -> None:
    data = encode(make_cubin(size=200))
    key = make_cubin().key
    for end in range(len(data)):
        with pytest.raises(CacheError):
            decode(data[:end], key, "cubin")
    for at in range(len(data)):
        with pytest.raises(CacheError):
            decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], key, "cubin")
    with pytest.raises(CacheError, match="bytes of its image"):
        decode(data + b"x", key, "cubin")


def _rehashed(fields: Any, image: bytes) -> bytes:
    """A cache file with any header, whose digest is right."""
    header = json.dumps(fields).encode()
    return f"{MAGIC} {hashlib.sha256(header).hexdigest()}\n".encode() + header + b"\n" + image


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FIELDS = json.loads(encode(make_cubin(size=200)).split(b"\n")[1])


@given(st.binary() | st.builds(_rehashed, ANY_JSON, st.binary(max_size=9)), st.sampled_from(["cubin", "ptx"]))
def test_whatever_the_bytes_are_they_are_refused(data: bytes, kind: str) -> None:
    with pytest.raises(CacheError):
        decode(data, make_cubin().key, kind)


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), ANY_JSON, min_size=1), st.sets(st.sampled_from(sorted(FIELDS))))
def test_a_header_of_another_version_is_read_or_refused(changed: dict[str, Any], dropped: set[str]) -> None:
    cubin = make_cubin(size=200)
    fields = {k: v for k, v in {**FIELDS, **changed}.items() if k not in dropped}
    try:
        found = decode(_rehashed(fields, cubin.image), cubin.key, "cubin")
    except CacheError:
        return
    assert isinstance(found, Cubin)
    assert (found.key, found.image) == (cubin.key, cubin.image)
    assert isinstance(found.arch, str)
    assert isinstance(found.log, str)
    assert all(isinstance(n, int) for r in found.entries.values() for n in astuple(r))
    assert decode(encode(found), cubin.key, "cubin") == found or found.compile_ms != found.compile_ms


def test_a_deep_header_is_refused() -> None:
    header = b"[" * 100_000
    data = f"{MAGIC} {hashlib.sha256(header).hexdigest()}\n".encode() + header + b"\n"
    with pytest.raises(CacheError, match="this kerngen"):
        decode(data, make_cubin().key, "cubin")


@pytest.mark.parametrize("sealed", [False, True])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_a_miss(
    cache: CompileCache, caplog: pytest.LogCaptureFixture, sealed: bool
) -> None:
    """A device that never ends, too. At a pipe one would wait, and read the other until no memory is left."""
    paths = pipe, folder, endless = [cache.path(make_cubin(n).key) for n in (1, 2, 4)]
    cache.put(make_cubin(3))
    for path in paths:
        path.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    folder.mkdir()
    endless.symlink_to("/dev/zero")
    seen = CompileCache(cache.dir, sealed=sealed)
    assert [seen.get(make_cubin(n).key) for n in (1, 2, 3, 4)] == [None, None, make_cubin(3), None]
    assert [r.message.endswith("it is not used") for r in caplog.records] == [sealed, True, sealed]
    assert all("is no regular file" in r.message for r in caplog.records)
    assert (os.path.lexists(pipe), folder.exists(), os.path.lexists(endless)) == (sealed, True, sealed)
    assert cache.path(make_cubin(3).key).exists()
    assert not seen.failed


def test_what_others_may_write_is_not_served_and_said_once(
    cache: CompileCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest does not say who made a file: this one has the right one."""
    for n in range(3):
        cache.put(make_cubin(n))
        cache.path(make_cubin(n).key).chmod(0o666)
    assert [cache.get(make_cubin(n).key) for n in range(3)] == [None] * 3
    (said,) = caplog.records
    assert f"{cache.path(make_cubin(0).key)} can be written by everyone" in said.message
    assert "chmod go-w it, or export KERNGEN_TRUST_FILES=1" in said.message
    cache.put(make_cubin(0))
    assert cache.get(make_cubin(0).key) == make_cubin(0), "what was compiled anew is ours"
    cache.path(make_cubin(0).key).parent.chmod(0o777)
    assert cache.get(make_cubin(0).key) is None
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    monkeypatch.setenv("KERNGEN_TRUST_FILES", "1")
    assert [cache.get(make_cubin(n).key) for n in range(3)] == [make_cubin(n) for n in range(3)]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_what_was_cached_is_served_whatever_the_umask(cache: CompileCache, mask: int) -> None:
    before = os.umask(mask)
    try:
        assert cache.put(make_cubin())
    finally:
        os.umask(before)
    path = cache.path(make_cubin().key)
    assert cache.get(make_cubin().key) == make_cubin()
    assert [oct(p.stat().st_mode & 0o777) for p in (path, path.parent, cache.dir)] == [
        oct(mode & ~mask) for mode in (0o644, 0o755, 0o755)
    ]


def test_a_torn_file_is_named_removed_and_made_again(cache: CompileCache, caplog: pytest.LogCaptureFixture) -> None:
    cubin = cache.get_or_compile(SOURCE, SM70)
    path = cache.path(cubin.key)
    path.write_bytes(path.read_bytes()[:-7])
    assert cache.get(cubin.key) is None
    assert str(path) in caplog.text
    assert not path.exists()
    assert cache.get_or_compile(SOURCE, SM70).image == cubin.image
    assert cache.get(cubin.key) is not None


def test_a_file_under_another_key_is_not_served(cache: CompileCache) -> None:
    one, two = make_cubin(1), make_cubin(2)
    cache.put(one)
    cache.path(two.key).parent.mkdir(parents=True)
    cache.path(one.key).rename(cache.path(two.key))
    assert cache.get(two.key) is None


# Forked after the imports, so that 64 processes cost one start-up.
_WRITERS = """
import os, sys, traceback
sys.path.insert(0, sys.argv[1])
from test_cache import make_cubin
from kerngen.compiler.cache import CompileCache

dir, count, rounds, size = sys.argv[2], *map(int, sys.argv[3:])
children = []
for _ in range(count):
    if pid := os.fork():
        children.append(pid)
        continue
    try:
        cache = CompileCache(dir)
        for _ in range(rounds):
            for n in range(8):
                cubin = make_cubin(n, size)
                assert cache.put(cubin) and cache.get(cubin.key) == cubin, n
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in children]))
"""


def spawn_writers(cache: CompileCache, count: int, rounds: int, size: int) -> subprocess.Popen[bytes]:
    """`count` processes, in a session of their own, that write and read the same eight keys."""
    arguments = [str(Path(__file__).parent), str(cache.dir), str(count), str(rounds), str(size)]
    return subprocess.Popen(
        [sys.executable, "-c", _WRITERS, *arguments], stderr=subprocess.PIPE, start_new_session=True
    )


def test_64_writers_at_once(cache: CompileCache) -> None:
    writers = spawn_writers(cache, 64, rounds=2, size=20_000)
    _, errors = writers.communicate(timeout=60)
    assert writers.returncode == 0, errors.decode()
    assert len(files(cache)) == 8, "scratch files were left behind"
    assert all(cache.get(make_cubin(n).key) == make_cubin(n) for n in range(8))


def test_a_kill_leaves_whole_files_only(cache: CompileCache) -> None:
    size = 3_000_000  # large enough for the kill to land within a write
    for kills in range(1, 4):
        writers = spawn_writers(cache, 4, rounds=1000, size=size)
        deadline = time.monotonic() + 30
        while len(stored(cache)) < 2 * kills and time.monotonic() < deadline:
            time.sleep(0.005)
        os.killpg(writers.pid, signal.SIGKILL)
        writers.communicate()
    assert len(stored(cache)) >= 6
    for path in stored(cache):
        decode(path.read_bytes(), path.stem, "cubin")


def test_scratch_of_the_dead_is_swept(cache: CompileCache) -> None:
    folder = cache.path(make_cubin().key).parent
    folder.mkdir(parents=True)
    old, new = folder / ".kerngen-scratch-old", folder / ".kerngen-scratch-new"
    for p in (old, new):
        p.write_bytes(b"torn")
    os.utime(old, (1, 1))
    cache.put(make_cubin())
    assert not old.exists()
    assert new.exists(), "another process may be writing this one"


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_refuses_costs_one_warning(
    number: int, cache: CompileCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cache_module, "publish", refuse)
    for _ in range(2):
        assert cache.get_or_compile(SOURCE, SM70).entries["scale"].registers > 0
    assert len(caplog.records) == 1
    assert os.strerror(number) in caplog.text


def test_no_space_leaves_no_scratch(cache: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert not cache.put(make_cubin())
    assert files(cache) == []


def test_no_compile_makes_a_miss_an_error(cache: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNGEN_NO_COMPILE", "1")
    with pytest.raises(TuningMiss, match="KERNGEN_NO_COMPILE") as caught:
        cache.get_or_compile(SOURCE, SM70)
    assert "kerngen compile --arch sm70" in str(caught.value)
    with CachedCompiler(1, cache) as compiler, pytest.raises(TuningMiss):
        compiler.submit(SOURCE, SM70).result()
    monkeypatch.setenv("KERNGEN_NO_COMPILE", "0")
    cubin = cache.get_or_compile(SOURCE, SM70)
    monkeypatch.setenv("KERNGEN_NO_COMPILE", "1")
    assert cache.get_or_compile(SOURCE, SM70) == cubin


def test_the_environment_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNGEN_CACHE_DIR", str(tmp_path / "here"))
    assert CompileCache().dir == tmp_path / "here"
    monkeypatch.delenv("KERNGEN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CompileCache().dir == tmp_path / "kerngen" / "compile"


def test_the_pool_answers_hits_without_a_process(cache: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = cache.get_or_compile(SOURCE, SM70)
    monkeypatch.setattr(cache_module, "CompilePool", lambda _: pytest.fail("started a pool"))
    with CachedCompiler(2, cache) as compiler:
        answer = compiler.submit(SOURCE, SM70)
        assert answer.done()
        assert answer.result() == cubin


def test_the_pool_compiles_remembers_and_reports(cache: CompileCache) -> None:
    with CachedCompiler(1, cache) as compiler:
        good, again = compiler.submit(SOURCE, SM70), compiler.submit(SOURCE, SM70)
        bad = compiler.submit("nonsense", SM70)
        assert again is good, "one key was compiled twice"
        assert cache.get(good.result(timeout=60).key) == good.result()
        with pytest.raises(CompileError):
            bad.result(timeout=60)


def _die(source: str, *_: object) -> Cubin:
    """Stands in for compile_cubin in the worker processes."""
    if "poison" in source:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    return make_cubin(len(source) % 7)


def test_a_source_that_kills_its_compiler_fails_alone(cache: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerngen.compiler.compile.compile_cubin", _die)
    with CachedCompiler(2, cache) as compiler:
        answers = [compiler.submit(s, SM70) for s in ("first", "poison", "second one")]
        for answer in (answers[0], answers[2]):
            assert answer.result(timeout=60).arch == "sm70"
        with pytest.raises(CompileError, match="kills the compiler"):
            answers[1].result(timeout=60)


def test_a_script_without_a_guard_compiles(tmp_path: Path) -> None:
    """No process that it starts runs it again."""
    script = tmp_path / "mine.py"
    script.write_text(
        "from kerngen.arch import find_arch\n"
        "from kerngen.compiler.cache import CachedCompiler, CompileCache\n"
        "print('begun')\n"
        f"with CachedCompiler(2, CompileCache({str(tmp_path / 'cache')!r})) as compiler:\n"
        "    text = 'extern \"C\" __global__ void n(int* p) { *p = %d; }'\n"
        "    made = [compiler.submit(text % i, find_arch('sm70')) for i in range(8)]\n"
        "    print(*{m.result(60).arch for m in made})\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["begun", "sm70"]
