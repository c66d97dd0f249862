"""Files that strangers send are decoded in processes: what a file takes, breaks or kills there is its own affair."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pictures import encoded, image, mutated, png, seeds

from kerngen.errors import KerngenError, ToolchainError, UsageError
from kerngen.runtime.media.decoders import Decoders
from kerngen.runtime.media.decoding import decode_image, file_pixels
from kerngen.runtime.media.images import ImageRule, image_media
from kerngen.runtime.media.limits import MediaLimits
from kerngen.runtime.media.values import Media, Source
from kerngen.system.cancellation import Cancellation

LIMITS = MediaLimits(decode_s=5.0, decode_bytes=1 << 29, kept_bytes=0)
PICTURE = encoded(image(), "PNG")
GOOD = Source("image", PICTURE)
DECODE = {"image": partial(decode_image, ImageRule()), "video": partial(decode_image, ImageRule())}


def _troublesome(source: Source, limits: MediaLimits) -> Media:
    """In place of a decoder of sound: does what its data say."""
    match source.data:
        case b"forever":
            while True:
                pass
        case b"memory":
            np.ones(1 << 30, np.uint8)
        case b"memory of torch":
            torch.zeros(1 << 30, dtype=torch.uint8)
        case b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"worker":
            os.kill(os.getppid(), signal.SIGKILL)
        case b"bug":
            raise ZeroDivisionError("of our own making")
        case b"missing":
            raise ToolchainError("no decoder", hint="pip install it")
    return Media.of("audio", np.arange(6, dtype=np.float32).reshape(3, 2), (3, 1), 3)


_OTHERS: set[int] = set()  # processes that tests before these have left


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    _OTHERS.update(process.pid for process in psutil.Process().children())
    with Decoders({**DECODE, "audio": _troublesome}, LIMITS, num_processes=2) as found:
        yield found


@contextmanager
def within(decoders: Decoders, **limits: float) -> Iterator[None]:
    before, decoders.limits = decoders.limits, replace(decoders.limits, **limits)
    try:
        yield
    finally:
        decoders.limits = before


def test_items_come_in_order_and_are_what_this_process_would_make(decoders: Decoders) -> None:
    other = encoded(image("RGBA"), "PNG")
    sources = [replace(GOOD, num_tokens=70), Source("image", other), Source("video", PICTURE), Source("audio", b"")]
    found = decoders.decode_all(sources)
    pixels, rule = file_pixels(PICTURE), ImageRule()
    want = [
        image_media(pixels, rule, 70),
        image_media(file_pixels(other), rule),
        image_media(pixels, rule, kind="video"),
        _troublesome(Source("audio", b""), LIMITS),
    ]
    for ours, theirs in zip(found, want, strict=True):
        assert (ours.kind, ours.grid, ours.num_tokens) == (theirs.kind, theirs.grid, theirs.num_tokens)
        assert ours.digest == theirs.digest
        assert ours.data.dtype == theirs.data.dtype
        assert np.array_equal(ours.data, theirs.data)
        assert not ours.data.flags.writeable
    assert decoders.decode_all([]) == []


@pytest.mark.parametrize(("data", "limits", "says"), [
    (b"forever", {"decode_s": 0.3}, "more than 0.3 s to decode"),
    (b"memory", {}, "more than 512 MB to decode"),
    (b"memory of torch", {}, "more than 512 MB to decode"),
    (b"crash", {}, "breaks its decoder"),
    (PICTURE[:100], {}, "cannot be decoded"),
], ids=["time", "memory", "torch", "crash", "damaged"])  # fmt: skip
def test_what_one_file_does_is_its_own_affair(
    decoders: Decoders, data: bytes, limits: dict[str, float], says: str
) -> None:
    kind = "image" if data.startswith(b"\x89") else "audio"
    processes = _workers()
    with within(decoders, **limits), ThreadPoolExecutor(2) as threads:
        bad = threads.submit(decoders.decode_all, [GOOD, Source(kind, data)])
        good = threads.submit(decoders.decode_all, [GOOD])
        with pytest.raises(UsageError, match=says) as found:
            bad.result(30)
        assert good.result(30)[0].digest == decoders.decode_all([GOOD])[0].digest
    assert found.value.message.startswith("image 2: " if kind == "image" else "sound: ")
    assert set(_workers()) >= set(processes), "those that fork are the same"


def test_a_file_that_was_named_is_named_in_errors(decoders: Decoders) -> None:
    bad = Source("image", PICTURE[:100], path="photos/a\x1b.png")
    with pytest.raises(UsageError) as found:
        decoders.decode_all([GOOD, bad])
    assert found.value.message.startswith(r"image photos/a\x1b.png: the image cannot be decoded")


def _workers() -> list[int]:
    here = [p for p in psutil.Process().children() if p.pid not in _OTHERS]
    return sorted(p.pid for p in here if "spawn_main" in " ".join(p.cmdline()))


def _forks() -> list[int]:
    """That are at a file: others have no limit on their memory yet, or are gone but for their number."""
    found = []
    for child in (child for pid in _workers() for child in psutil.Process(pid).children()):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            limited = child.rlimit(psutil.RLIMIT_DATA)[0] != psutil.RLIM_INFINITY
            if limited and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60  # a process that starts on a busy machine imports for seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_nobody_wants_any_more_is_killed_or_does_not_begin(decoders: Decoders) -> None:
    """Of four requests for two processes. The forks go at once, and the processes stay for whoever is next."""
    before, endless = _workers(), Source("audio", b"forever")
    asked = [Cancellation() for _ in range(4)]
    with within(decoders, decode_s=60.0), ThreadPoolExecutor(4) as threads:
        dropped = [threads.submit(decoders.decode_all, [GOOD, endless], each) for each in asked]
        _until(lambda: len(_forks()) == 2)
        began = time.monotonic()
        for each in reversed(asked):  # those that wait first
            each.cancel()
        for answer in dropped:
            with pytest.raises(CancelledError):
                answer.result(20)
        _until(lambda: not _forks())
        assert time.monotonic() - began < 20.0, "of the 60 that they might take"
        assert decoders.decode_all([GOOD])
        with pytest.raises(CancelledError):
            decoders.decode_all([GOOD], asked[0])
    assert _workers() == before


def test_no_process_that_has_answered_stays(decoders: Decoders) -> None:
    """Not even as a zombie until the next file, and one beside each file waits for that."""
    decoders.decode_all([GOOD] * 4 + [Source("audio", b"")] * 4)

    def rest_wait() -> bool:
        children = [child for pid in _workers() for child in psutil.Process(pid).children()]
        try:
            return len(children) == 2 and all(child.status() != psutil.STATUS_ZOMBIE for child in children)
        except psutil.NoSuchProcess:  # it went meanwhile
            return False

    _until(rest_wait)


def test_what_is_beside_a_bad_file_is_killed_too(decoders: Decoders) -> None:
    with within(decoders, decode_s=60.0), pytest.raises(UsageError, match=r"^image: .*damaged"):
        decoders.decode_all([Source("image", PICTURE[:100]), Source("audio", b"forever")])
    assert not _forks()


def test_a_process_that_dies_is_started_again(decoders: Decoders) -> None:
    _until(lambda: len(_workers()) == 2)
    before = _workers()
    with pytest.raises(KerngenError, match="sound: no process can decode it now") as found:
        decoders.decode_all([Source("audio", b"worker")])
    assert not isinstance(found.value, UsageError), "it is no fault of who asks"
    assert decoders.decode_all([GOOD])
    assert len(set(before) - set(_workers())) == 1


def test_errors_that_are_not_the_files_are_told_apart(decoders: Decoders) -> None:
    with pytest.raises(ToolchainError, match="no decoder") as found:
        decoders.decode_all([Source("audio", b"missing")])
    assert found.value.hint == "pip install it"
    with pytest.raises(RuntimeError, match="ZeroDivisionError: of our own making"):
        decoders.decode_all([Source("audio", b"bug")])


def test_a_request_has_limits(decoders: Decoders) -> None:
    tokens = decoders.decode_all([GOOD])[0].num_tokens
    with within(decoders, soft_tokens=2 * tokens, image_bytes=len(PICTURE)):
        assert len(decoders.decode_all([GOOD, GOOD])) == 2
    with within(decoders, soft_tokens=2 * tokens - 1), pytest.raises(UsageError, match=f"take {2 * tokens} tokens"):
        decoders.decode_all([GOOD, GOOD])
    with within(decoders, image_bytes=len(PICTURE) - 1), pytest.raises(UsageError, match="bytes: more than"):
        decoders.decode_all([GOOD])
    with within(decoders, pixels=1199), pytest.raises(UsageError, match="40 x 30 pixels: more than 1,199"):
        decoders.decode_all([GOOD])
    with pytest.raises(UsageError, match="70, 140"):
        decoders.decode_all([replace(GOOD, num_tokens=100)])
    with pytest.raises(UsageError, match="neither data nor a URL"):
        decoders.decode_all([Source("image")])


def test_what_was_decoded_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its bytes and what is asked of them; what was used longest ago goes first, and errors are not kept."""
    small, other = replace(GOOD, num_tokens=70), Source("image", encoded(image("RGBA"), "PNG"), num_tokens=70)
    bad, pixels = Source("image", PICTURE[:100]), file_pixels(PICTURE)
    room = sum(image_media(pixels, ImageRule(), tokens).data.nbytes for tokens in (None, 70))
    with Decoders(DECODE, replace(LIMITS, kept_bytes=room), num_processes=1) as decoders:
        asked, submit = list[Source](), decoders._processes.submit

        def noted(function: Any, *arguments: Any, **how: Any) -> Any:
            asked.append(arguments[1])
            return submit(function, *arguments, **how)

        monkeypatch.setattr(decoders._processes, "submit", noted)
        first = decoders.decode_all([GOOD, small])
        again = decoders.decode_all([small, replace(GOOD, data=bytes(bytearray(PICTURE))), small])
        assert sorted(map(str, asked)) == sorted(map(str, [GOOD, small]))
        assert [m.digest for m in again] == [first[n].digest for n in (1, 0, 1)]
        decoders.decode_all([small])
        assert decoders.decode_all([replace(small, kind="video")])[0].kind == "video", "another kind, and GOOD goes"
        decoders.decode_all([small])
        for _ in range(2):
            with pytest.raises(UsageError, match="damaged"):
                decoders.decode_all([bad])
        decoders.decode_all([other])
        decoders.decode_all([GOOD])
        assert asked[2:] == [replace(small, kind="video"), bad, bad, other, GOOD]
        assert decoders._decoded.num_bytes <= room


def test_a_kind_that_the_model_does_not_take_is_refused() -> None:
    with Decoders({}, num_processes=1) as none:
        for kind, noun in (("image", "image"), ("audio", "sound"), ("video", "frame of a video")):
            with pytest.raises(UsageError, match=f"this model takes no {noun}"):
                none.decode_all([Source(kind, b"")])  # type: ignore[arg-type]


def test_a_number_of_limits_leaves_something() -> None:
    for name in ("items", "decode_s", "pixels"):
        with pytest.raises(UsageError, match=f"MediaLimits.{name} is 0"):
            MediaLimits(**{name: 0})
    for host in ("https://a.example", "a.example:443", "A.example", "*.example", "u@a.example", "", "a b"):
        with pytest.raises(UsageError, match="no host's name"):
            MediaLimits(hosts=(host,))
    assert MediaLimits(hosts=("a.example", "[2606:4700::1111]")).hosts


def test_bombs_are_refused_and_take_little(decoders: Decoders) -> None:
    """Small files that would be large images: by their header, or by what they hold."""
    wide = png(60_000, 60_000, 8, 2, b"\0" * 1000)
    zeros = png(2000, 2000, 8, 0, b"\0" * 10_000_000)  # more rows than its header says
    with within(decoders, image_bytes=20_000_000):
        with pytest.raises(UsageError, match="more than 50,000,000"):
            decoders.decode_all([Source("image", wide)])
        assert decoders.decode_all([Source("image", zeros)])
    full = png(7000, 7000, 8, 6, (b"\0" + bytes(4 * 7000)) * 7000)  # 196 MB as RGBA, in 200 kB
    assert len(full) < 250_000
    # As long as a busy machine takes: what it ends by is memory.
    with within(decoders, decode_s=60), pytest.raises(UsageError, match="more than 512 MB to decode"):
        decoders.decode_all([Source("image", full)])
    assert decoders.decode_all([GOOD])


def test_damaged_files_are_errors_and_nothing_else(decoders: Decoders) -> None:
    """Of files with changed bytes each is an image or an error; the process neither dies nor grows."""
    decoders.decode_all([Source("image", data) for data in seeds() * 3])
    workers = _workers()
    processes = [psutil.Process(pid) for pid in workers]
    before, decoded, count = sum(p.memory_info().rss for p in processes), 0, 60
    for data in mutated(count, seed=1):
        with suppress(UsageError):
            [media] = decoders.decode_all([Source("image", data)])
            decoded += 1
            assert media.num_tokens <= 280
    assert 0.05 * count < decoded < 0.95 * count
    assert _workers() == workers
    assert sum(p.memory_info().rss for p in processes) - before < 16 << 20
    assert not _forks()


def test_asked_by_many_at_once_all_are_answered(decoders: Decoders) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda n: decoders.decode_all([GOOD] * (1 + n % 3)), range(24)))
    assert [len(media) for media in found] == [1 + n % 3 for n in range(24)]
    assert len({m.digest for media in found for m in media}) == 1
    _until(lambda: len(_workers()) == 2)
