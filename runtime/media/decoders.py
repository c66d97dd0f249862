"""Decodes what requests name in processes that may be killed for it: a file can be made to take any time and memory.

Each file is decoded in a fork of a process that holds torch and the decoders, under limits on its time and memory, and
gone with it is all that the file did there. What it writes into its pipe is a line of JSON and an array's bytes. A fork
waits for the next file, since to fork and to touch the first pages takes longer than to decode a photograph.
"""

from __future__ import annotations

import gc
import io
import json
import os
import resource
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from math import prod
from multiprocessing.connection import wait
from typing import NoReturn

import numpy as np
import torch

from kerngen.errors import KerngenError, ToolchainError, UsageError, printable_name
from kerngen.runtime.media.decoded import Decoded, key_of
from kerngen.runtime.media.decoding import file_pixels
from kerngen.runtime.media.fetch import read_url
from kerngen.runtime.media.images import ImageRule, check_budget, image_media
from kerngen.runtime.media.limits import MediaLimits
from kerngen.runtime.media.values import FileKind, Media, Source
from kerngen.system.cancellation import Cancellation
from kerngen.system.cores import usable_cores
from kerngen.system.processes import ProcessDied, Processes, cancelled

# What a model is given of a file's bytes. A function of a module, or a partial of one: a process is told its name.
Decode = Callable[[Source, MediaLimits], Media]

MAX_PROCESSES = 4  # unless more are asked for: each holds torch
_MAX_AT_ONCE = 8  # items of a request whose files are in memory, fetched or waiting for a process
_MAX_HEAD_BYTES = 1 << 20  # of what a fork says before its array
_NOUNS: Mapping[FileKind, str] = {
    "image": "image", "video": "frame of a video", "video_file": "video", "audio": "sound",
}  # fmt: skip
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Decoders:
    """For one model. decode: of each kind that it takes, such as {"image": partial(decode_image, rule)}.

    Any thread may ask. Close it, or use it as a context.
    """

    def __init__(
        self, decode: Mapping[FileKind, Decode], limits: MediaLimits | None = None, *, num_processes: int | None = None
    ) -> None:
        """num_processes: that decode at once; None for one a core, and MAX_PROCESSES at most."""
        self.limits = limits or MediaLimits()
        self._decode = dict(decode)
        self._decoded = Decoded(self.limits.kept_bytes)
        most = num_processes or min(MAX_PROCESSES, usable_cores())
        self._processes = Processes(most, gives_up=False)
        for _ in range(most):  # which takes its seconds while a model is loaded
            self._processes.submit(_make_ready, self._decode)

    def decode_all(self, sources: Sequence[Source], cancellation: Cancellation | None = None) -> list[Media]:
        """What the model is given of each item of a request, in order; items are fetched and decoded side by side, and
        no longer once one has failed. What the same bytes were decoded to is kept (`limits.kept_bytes`).
        cancellation: of the request, whose decoders are killed then.

        Raises CancelledError then; UsageError for the first item that cannot be fetched or decoded, that is more than
        `limits` allow, or of a kind that the model does not take; ToolchainError where its decoder is not installed;
        KerngenError where no process can be started.
        """
        limits = self.limits
        for source in sources:
            if source.kind not in self._decode:
                raise UsageError(f"this model takes no {_NOUNS[source.kind]}")
            if source.num_tokens is not None:
                check_budget(source.num_tokens)
        work = Cancellation()
        asked = nullcontext() if cancellation is None else cancellation.interrupting(work.cancel)
        with ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="kerngen-media") as threads, asked:
            named = zip(_names(sources), sources, strict=True)
            waiting = [threads.submit(self._one, name, source, limits, work) for name, source in named]
            try:
                media = [future.result() for future in waiting]
            finally:
                work.cancel()
                for future in waiting:
                    future.cancel()
        if (total := sum(item.num_tokens for item in media)) > limits.soft_tokens:
            raise UsageError(f"the request's images and sounds take {total:,} tokens: more than {limits.soft_tokens:,}")
        return media

    def _one(self, name: str, source: Source, limits: MediaLimits, work: Cancellation) -> Media:
        try:
            source = read_source(source, limits, work)
            if (known := self._decoded.get(key := key_of(source, limits))) is not None:
                return known
            decoding = self._processes.submit(_decoded, self._decode, source, limits, cancellation=work)
            with work.interrupting(decoding.cancel):  # where it waits for a process
                media = decoding.result()
        except UsageError as e:
            raise UsageError(f"{name}: {e.message}", hint=e.hint) from e
        except (ProcessDied, OSError) as e:
            raise KerngenError(f"{name}: no process can decode it now: {e}", hint="ask again") from e
        media.data.flags.writeable = False  # which does not travel between processes
        self._decoded.put(key, media)
        return media

    def close(self) -> None:
        """End the processes."""
        self._processes.close()

    def __enter__(self) -> Decoders:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_source(source: Source, limits: MediaLimits, work: Cancellation) -> Source:
    """The same with its file's bytes, fetched if need be. Raises as read_url, and UsageError for too many bytes."""
    most = limits.file_bytes(source.kind)
    data = source.data
    if data is None:
        if source.url is None:
            raise UsageError(f"the {_NOUNS[source.kind]} has neither data nor a URL")
        data = read_url(source.url, most, limits, work)
    if len(data) > most:
        raise UsageError(f"the file has {len(data):,} bytes: more than {most:,}")
    return replace(source, data=data, url=None)


def _names(sources: Sequence[Source]) -> list[str]:
    """How errors call each: by its file, or with its number where there are several of its kind."""
    of_kind, seen = Counter(source.kind for source in sources), Counter[FileKind]()
    names = []
    for source in sources:
        seen[source.kind] += 1
        which = printable_name(source.path) or (f"{seen[source.kind]}" if of_kind[source.kind] > 1 else "")
        names.append(f"{_NOUNS[source.kind]} {which}".rstrip())
    return names


# -- in such a process


@dataclass(frozen=True, slots=True)
class _Fork:
    """A process that decodes one file. work, answer: the ends of its pipes here."""

    pid: int
    work: int
    answer: int


_decode: dict[FileKind, Decode] = {}  # those of Decoders, once they are known here; a fork has them from here
_waiting: list[_Fork] = []  # for a file; one at most
_answered: list[int] = []  # pids of forks that are killed and nobody waits for: `_reap` does


@cache
def _prepare() -> bytes:
    """Load what forks need, and start no thread: a fork has none. Returns a picture for a fork to begin with. In the
    main thread, which alone may say what a signal does.
    """
    torch.set_num_threads(1)
    for module in (*(f"PIL.{name}ImagePlugin" for name in ("Gif", "Mpo", "Png", "WebP")), "soundfile", "soxr", "av"):
        with suppress(ImportError):  # whose decoder says what to install
            import_module(module)
    image_media(np.zeros((1, 1, 3), np.uint8), ImageRule())  # what torch does when it first scales
    picture = io.BytesIO()
    with suppress(ImportError):
        from PIL import Image

        Image.new("RGB", (960, 540)).save(picture, "JPEG")
    signal.signal(signal.SIGCHLD, _reap)
    gc.collect()
    gc.freeze()  # so that forks share it
    return picture.getvalue()


def _reap(*_: object) -> None:
    """Of `_answered` those that have ended; as SIGCHLD's handler as soon as they have. It may interrupt itself."""
    for pid in tuple(_answered):
        with suppress(ChildProcessError, ValueError):
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                _answered.remove(pid)


def _make_ready(decode: Mapping[FileKind, Decode]) -> None:
    _prepare()
    _decode.update(decode)
    if not _waiting:
        _waiting.append(_fork())


def _fork(*others: int) -> _Fork:
    """One more process, which waits for its file. others: pipes of this process that are none of its business."""
    (its_work, work), (answer, its_answer) = os.pipe(), os.pipe()
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # the other thread here only waits
            pid = os.fork()
    except OSError:
        for pipe in (its_work, work, answer, its_answer):
            os.close(pipe)
        raise
    if pid == 0:
        for pipe in (work, answer, *others):
            os.close(pipe)
        _decode_and_exit(its_work, its_answer)
    os.close(its_work)
    os.close(its_answer)
    return _Fork(pid, work, answer)


def _hand_over(source: Source, limits: MediaLimits) -> _Fork:
    """A process that has been given it: a line of JSON, then the file."""
    about = {"kind": source.kind, "num_tokens": source.num_tokens, "limits": asdict(limits)}
    while True:
        fork, was_waiting = (_waiting.pop(), True) if _waiting else (_fork(), False)
        try:
            with os.fdopen(fork.work, "wb") as pipe:
                pipe.write(json.dumps(about).encode() + b"\n")
                pipe.write(source.data or b"")
            return fork
        except BrokenPipeError:  # it has died: while it waited anything may have killed it
            os.close(fork.answer)
            os.waitpid(fork.pid, 0)
            if not was_waiting:
                raise


def _decoded(decode: Mapping[FileKind, Decode], source: Source, limits: MediaLimits) -> Media:
    _prepare()
    _decode.update(decode)
    fork = _hand_over(source, limits)
    if not _waiting:
        with suppress(OSError):  # the next file tries again, and says so
            _waiting.append(_fork(fork.answer))
    with os.fdopen(fork.answer, "rb") as pipe:
        if is_dropped := cancelled() in wait([fork.answer, cancelled()]):  # before it says anything: that takes no time
            os.kill(fork.pid, signal.SIGKILL)
        line = pipe.readline(_MAX_HEAD_BYTES)
        told = json.loads(line) if line.endswith(b"\n") else {}
        kind, dtype, shape, grid, num_tokens, digest, times = told.get("media", ("", "u1", (0,), (0, 0), 0, "", ()))
        data = pipe.read(size := prod(shape) * np.dtype(dtype).itemsize)
    if "media" in told and len(data) == size and not is_dropped:  # its end is waited for later: it takes some time
        _answered.append(fork.pid)
        os.kill(fork.pid, signal.SIGKILL)
        array = np.frombuffer(data, dtype).reshape(shape)
        return Media(kind, array, (grid[0], grid[1]), num_tokens, bytes.fromhex(digest), tuple(times))
    ended = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
    if is_dropped:
        raise CancelledError
    if ended == -signal.SIGALRM:
        raise UsageError(f"the file takes more than {limits.seconds(source.kind):g} s to decode")
    if ended != 0 or "media" in told:
        raise UsageError(f"the file takes more than {limits.decode_bytes >> 20} MB to decode, or breaks its decoder")
    if "bug" in told:
        raise RuntimeError(told["bug"])
    raise (UsageError if told["usage"] else ToolchainError)(told["error"], hint=told["hint"])


def _decode_and_exit(work: int, answer: int) -> NoReturn:
    """In the fork, which ends here: by a signal where it takes too long, in any code where it gets no more memory."""
    try:
        gc.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders' warnings
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with suppress(KerngenError):  # without Pillow, whose decoder says so
            image_media(file_pixels(_prepare()), ImageRule())
        with os.fdopen(work, "rb") as pipe:
            asked = json.loads(pipe.readline())  # ValueError: its parent is gone
            source = Source(asked["kind"], pipe.read(), num_tokens=asked["num_tokens"])
        limits = MediaLimits(**asked["limits"])
        most = _data_bytes() + limits.decode_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        signal.setitimer(signal.ITIMER_REAL, limits.seconds(source.kind))
        media, told = None, dict[str, object]()
        try:
            media = _decode[source.kind](source, limits)
            told = {"media": (media.kind, media.data.dtype.str, media.data.shape, media.grid, media.num_tokens,
                              media.digest.hex(), media.times)}  # fmt: skip
        except KerngenError as e:
            told = {"error": e.message, "hint": e.hint, "usage": isinstance(e, UsageError)}
        except Exception as e:
            if isinstance(e, MemoryError) or "can't allocate memory" in str(e):  # the latter is torch's
                os._exit(1)
            told = {"bug": traceback.format_exc()}
        with os.fdopen(answer, "wb") as file:
            file.write(json.dumps(told).encode() + b"\n")
            if media is not None:
                file.write(media.data.data)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _data_bytes() -> int:
    """Of this process: what RLIMIT_DATA counts."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[5]) * _PAGE_BYTES
