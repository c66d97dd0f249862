"""Decodes what requests name in processes that may be killed for it: a file can be made to take any time and memory.

Each file is decoded in a fork of a process that holds torch and the decoders, under limits on its time and memory, and
gone with it is all that the file did there. What it writes into its pipe is a line of JSON and an array's bytes.
"""

from __future__ import annotations

import gc
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
from dataclasses import replace
from functools import cache
from importlib import import_module
from math import prod
from multiprocessing.connection import wait
from typing import NoReturn

import numpy as np
import torch

from kerngen.errors import KerngenError, ToolchainError, UsageError
from kerngen.runtime.media.decoded import Decoded, key_of
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
            self._processes.submit(_prepare)

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
            decode = self._decode[source.kind]
            decoding = self._processes.submit(_decoded, decode, source, limits, cancellation=work)
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
    """How errors call each: with its number where there are several of its kind."""
    of_kind, seen = Counter(source.kind for source in sources), Counter[FileKind]()
    names = []
    for source in sources:
        seen[source.kind] += 1
        number = f" {seen[source.kind]}" if of_kind[source.kind] > 1 else ""
        names.append(f"{_NOUNS[source.kind]}{number}")
    return names


# -- in such a process


@cache
def _prepare() -> None:
    """Load what forks need, and start no thread: a fork has none of them."""
    torch.set_num_threads(1)
    for module in (*(f"PIL.{name}ImagePlugin" for name in ("Gif", "Mpo", "Png", "WebP")), "soundfile", "soxr", "av"):
        with suppress(ImportError):  # whose decoder says what to install
            import_module(module)
    image_media(np.zeros((1, 1, 3), np.uint8), ImageRule())  # what torch does when it first scales
    gc.collect()
    gc.freeze()  # so that forks share it


def _decoded(decode: Decode, source: Source, limits: MediaLimits) -> Media:
    _prepare()
    ours, theirs = os.pipe()
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # the other thread here only waits
            child = os.fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        raise
    if child == 0:
        os.close(ours)
        _decode_and_exit(decode, source, limits, theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        if is_dropped := cancelled() in wait([ours, cancelled()]):  # before it says anything, which takes no time then
            os.kill(child, signal.SIGKILL)
        line = pipe.readline(_MAX_HEAD_BYTES)
        told = json.loads(line) if line.endswith(b"\n") else {}
        kind, dtype, shape, grid, num_tokens, digest, times = told.get("media", ("", "u1", (0,), (0, 0), 0, "", ()))
        data = pipe.read(prod(shape) * np.dtype(dtype).itemsize)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if is_dropped:
        raise CancelledError
    if ended == -signal.SIGALRM:
        raise UsageError(f"the file takes more than {limits.seconds(source.kind):g} s to decode")
    if ended != 0:
        raise UsageError(f"the file takes more than {limits.decode_bytes >> 20} MB to decode, or breaks its decoder")
    if "media" in told:
        array = np.frombuffer(data, dtype).reshape(shape)
        return Media(kind, array, (grid[0], grid[1]), num_tokens, bytes.fromhex(digest), tuple(times))
    if "bug" in told:
        raise RuntimeError(told["bug"])
    raise (UsageError if told["usage"] else ToolchainError)(told["error"], hint=told["hint"])


def _decode_and_exit(decode: Decode, source: Source, limits: MediaLimits, pipe: int) -> NoReturn:
    """In the fork, which ends here: by a signal where it takes too long, in any code where it gets no more memory."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = _data_bytes() + limits.decode_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders' warnings
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limits.seconds(source.kind))
        media, told = None, dict[str, object]()
        try:
            media = decode(source, limits)
            told = {"media": (media.kind, media.data.dtype.str, media.data.shape, media.grid, media.num_tokens,
                              media.digest.hex(), media.times)}  # fmt: skip
        except KerngenError as e:
            told = {"error": e.message, "hint": e.hint, "usage": isinstance(e, UsageError)}
        except Exception as e:
            if isinstance(e, MemoryError) or "can't allocate memory" in str(e):  # the latter is torch's
                os._exit(1)
            told = {"bug": traceback.format_exc()}
        with os.fdopen(pipe, "wb") as file:
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
