"""The compile cache: NVRTC's output on disk, keyed by all that decides it.

One file a key, DIR/v1/<key[:2]>/<key>.cubin (or .ptx):

    kerngen-cache 1 <sha256 of the header line>\\n
    {"arch": ..., "entries": ..., "image_bytes": ..., "image_sha256": ..., ...}\\n
    the image

The key is `compile.cache_key` (cubins) or `compile.source_key` (PTX), so a file is never stale: it is
right or it is torn. Files are published whole (files.py): readers see all of one or none. Two processes that make
the same key write the same image: the later one wins, and both are right. What another user may have written is not
read (owner.py): a digest says that a file is whole, not who made it.

A cache never stops a compile: a disk that is read-only or full costs one warning, and kerngen compiles
without it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from kerngen.arch import Arch
from kerngen.compiler.compile import (
    DEFAULT_OPTIONS,
    CompilePool,
    Cubin,
    Ptx,
    Resources,
    cache_key,
    compile_cubin,
    compile_ptx,
    nvrtc_version,
    source_key,
)
from kerngen.errors import CacheError, CompileCancelled, CompileError, ToolchainError, TuningMiss
from kerngen.system.environment import is_set
from kerngen.system.files import cache_dir, open_regular, publish
from kerngen.system.interrupts import held
from kerngen.system.owner import TRUST_HINT, why_distrusted
from kerngen.system.processes import ProcessDied

log = logging.getLogger(__name__)

MAGIC = "kerngen-cache 1"
_LAYOUT = "v1"
_KEY = re.compile(r"[0-9a-f]{64}")
_Image = TypeVar("_Image", Cubin, Ptx)


def compiling_is_forbidden() -> bool:
    """True where KERNGEN_NO_COMPILE is set (to anything but "" or "0"): every miss is then an error."""
    return is_set("KERNGEN_NO_COMPILE")


class CompileCache:
    """Cubins and PTX by key, in one folder. Any number of threads and processes may share it.

    sealed: the folder is somebody's to ship and not ours to mend: a torn file stays where it is.
    """

    def __init__(self, dir: str | os.PathLike[str] | None = None, *, sealed: bool = False) -> None:
        self.dir = Path(dir) if dir is not None else cache_dir()
        self.sealed = sealed
        self.failed = False  # the disk did not give or take a file, which was said once
        self.distrusted = False  # what others may have written was passed over, which was said once

    def path(self, key: str, kind: str = "cubin") -> Path:
        """Where the image of `key` lies, whether it is there or not. Raises CacheError for what is no key: those of a
        database may be anything, and this one would lie elsewhere.
        """
        if _KEY.fullmatch(key) is None:
            raise CacheError(f"{key!r:.80} is no key of a compiled image: it has 64 hex digits")
        return self.dir / _LAYOUT / key[:2] / f"{key}.{kind}"

    def get(self, key: str) -> Cubin | None:
        """The cubin stored under `key`, or None. A torn file is removed with a warning that names it."""
        found = self._read(key, "cubin")
        return found if isinstance(found, Cubin) else None

    def get_ptx(self, key: str) -> Ptx | None:
        """The PTX stored under `key`, or None; as `get`."""
        found = self._read(key, "ptx")
        return found if isinstance(found, Ptx) else None

    def find(self, source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Cubin | None:
        """The cubin of `source`, if it is there. Raises ToolchainError without NVRTC, whose version is in the key."""
        return self.get(self.key(source, arch, options))

    def put(self, image: Cubin | Ptx) -> bool:
        """Publish `image` under its key. False, with one warning a cache, if the disk does not take it."""
        try:
            self.write(image)
        except OSError as e:
            self._warn("write to", e)
            return False
        return True

    def write(self, image: Cubin | Ptx) -> None:
        """As `put`, for a folder that was asked for by name: raises OSError if the disk does not take it."""
        publish(encode(image), self.path(image.key, _kind(image)))

    def get_or_compile(self, source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Cubin:
        """The cubin of `source`, from disk or from NVRTC. Errors as compile_cubin.

        Raises TuningMiss where it is not on disk and KERNGEN_NO_COMPILE forbids compiling.
        """
        key = self.key(source, arch, options)
        return self._serve(self.get(key), key, arch, lambda: compile_cubin(source, arch, options))

    def get_or_compile_ptx(self, source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Ptx:
        """The PTX of `source` for `arch`'s virtual architecture; as `get_or_compile`.

        Its key does not name the NVRTC: PTX that another machine compiled serves here too.
        """
        key = source_key(source, arch.ptx_target, options)
        return self._serve(self.get_ptx(key), key, arch, lambda: compile_ptx(source, arch, options))

    @staticmethod
    def key(source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> str:
        """The key of the cubin that this machine's NVRTC makes. Raises ToolchainError without NVRTC."""
        return cache_key(source, arch.nvrtc_target, options, nvrtc_version())

    def _serve(self, found: _Image | None, key: str, arch: Arch, build: Callable[[], _Image]) -> _Image:
        if found is not None:
            return found
        self.require_allowed(key, arch)
        made = build()
        self.put(made)
        return made

    def require_allowed(self, key: str, arch: Arch) -> None:
        """Raises TuningMiss if KERNGEN_NO_COMPILE forbids to compile what `key` names."""
        if compiling_is_forbidden():
            raise TuningMiss(
                f"{key[:16]} for {arch} is not in the compile cache {self.dir}, "
                "and KERNGEN_NO_COMPILE forbids compiling it",
                hint=f"where compiling is allowed: kerngen compile --arch {arch} --model NAME -o FILE; "
                "then here: export KERNGEN_BUNDLE=FILE",
            )

    def _read(self, key: str, kind: str) -> Cubin | Ptx | None:
        path = self.path(key, kind)
        try:
            with open_regular(path) as f:
                why = why_distrusted(f.fileno()) or why_distrusted(path)
                data = f.read() if why is None else b""
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            if e.errno == errno.EINVAL:  # a pipe or a folder: of this key alone, the disk is well
                self._drop(path, str(e.strerror))
            else:
                self._warn("read", e)
            return None
        if why is not None:
            if not self.distrusted:
                self.distrusted = True
                log.warning("%s %s: it and what is like it is not used; %s", path, why, TRUST_HINT)
            return None
        try:
            return decode(data, key, kind)
        except CacheError as e:
            self._drop(path, e.message)
            return None

    def _drop(self, path: Path, why: str) -> None:
        """Say why `path` is not used, and make room for what will be compiled; a sealed folder stays as it is."""
        gone = False
        with contextlib.suppress(OSError):
            if not self.sealed:
                path.unlink()
                gone = True
        log.warning("%s: %s; %s", path, why, "removed, and compiled anew" if gone else "it is not used")

    def _warn(self, verb: str, e: OSError) -> None:
        if not self.failed:
            self.failed = True
            log.warning("cannot %s the compile cache %s: %s; compiling without it (KERNGEN_CACHE_DIR names another)",
                        verb, self.dir, e.strerror or e)  # fmt: skip


def _kind(image: Cubin | Ptx) -> str:
    return "cubin" if isinstance(image, Cubin) else "ptx"


def encode(image: Cubin | Ptx) -> bytes:
    """The bytes of a cache file. The same image gives the same bytes."""
    fields: dict[str, Any] = {
        "kind": _kind(image),
        "key": image.key,
        "arch": image.arch,
        "nvrtc": list(image.nvrtc),
        "image_bytes": len(image.image),
        "image_sha256": hashlib.sha256(image.image).hexdigest(),
    }
    if isinstance(image, Cubin):
        fields["entries"] = {name: asdict(r) for name, r in image.entries.items()}
        fields["log"] = image.log
        fields["compile_ms"] = image.compile_ms
    header = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return f"{MAGIC} {hashlib.sha256(header).hexdigest()}\n".encode() + header + b"\n" + image.image


def decode(data: bytes, key: str, kind: str) -> Cubin | Ptx:
    """What `encode` wrote. Raises CacheError, saying what is wrong, unless every byte is what was written."""
    magic, _, rest = data.partition(b"\n")
    header, newline, image = rest.partition(b"\n")
    if not magic.startswith(MAGIC.encode() + b" ") or not newline:
        raise CacheError("not a compile cache file, or cut short")
    if magic.split(b" ")[-1] != hashlib.sha256(header).hexdigest().encode():
        raise CacheError("its header does not match its digest")
    try:
        h = json.loads(header)
        if h["key"] != key or h["kind"] != kind:
            raise CacheError(f"it holds {h['kind']} {str(h['key'])[:16]}")
        if len(image) != h["image_bytes"]:
            raise CacheError(f"holds {len(image):,} of {int(h['image_bytes']):,} bytes of its image")
        if hashlib.sha256(image).hexdigest() != h["image_sha256"]:
            raise CacheError("its image does not match its digest")
        major, minor = map(_whole, h["nvrtc"])
        arch = _text(h["arch"])
        if kind == "ptx":
            return Ptx(key, arch, (major, minor), image)
        entries = {name: Resources(**{n: _whole(v) for n, v in r.items()}) for name, r in h["entries"].items()}
        return Cubin(key, arch, (major, minor), image, entries, _text(h["log"]), float(h["compile_ms"]))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as e:
        # A header that is whole, and not ours: another version wrote it, or somebody did by hand.
        raise CacheError(f"its header is not as this kerngen writes it ({type(e).__name__}: {e})") from e


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is no whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


class CachedCompiler:
    """Compiles in `jobs` processes and remembers in `cache`. Hits are answered at once and start no process.

    A source that kills its compiler process twice gives CompileError, for that source alone.
    """

    def __init__(self, jobs: int, cache: CompileCache | None = None) -> None:
        self.cache = cache if cache is not None else CompileCache()
        self._jobs = jobs
        self._pool: CompilePool | None = None
        self._lock = threading.Lock()
        self._in_flight: dict[str, Future[Cubin]] = {}
        self._closed = False
        self._dead: ToolchainError | None = None  # why no process of ours can compile anything

    def submit(self, source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Future[Cubin]:
        """A future of the cubin; one that is being compiled already is not compiled twice.

        Its exceptions are those of `CompileCache.get_or_compile`. Raises ToolchainError if there is no NVRTC.
        """
        key = self.cache.key(source, arch, options)
        with self._lock:
            if (running := self._in_flight.get(key)) is not None:
                return running
        answer: Future[Cubin] = Future()
        if (hit := self.cache.get(key)) is not None:
            answer.set_result(hit)
            return answer
        try:
            self.cache.require_allowed(key, arch)
        except TuningMiss as e:
            answer.set_exception(e)
            return answer
        with held():  # what is in flight will be settled
            with self._lock:
                if (running := self._in_flight.get(key)) is not None:
                    return running
                if self._closed:
                    raise RuntimeError("this CachedCompiler is closed")
                if self._dead is not None:
                    raise self._dead
                if self._pool is None:
                    self._pool = CompilePool(self._jobs)
                work = self._pool.submit(source, arch, options)
                self._in_flight[key] = answer
            answer.set_running_or_notify_cancel()
            work.add_done_callback(lambda done: self._finish(done, answer, key, arch))
        return answer

    def _finish(self, done: Future[Cubin], answer: Future[Cubin], key: str, arch: Arch) -> None:
        error: BaseException | None = CancelledError() if done.cancelled() else done.exception()
        if isinstance(error, CancelledError):
            error = CompileCancelled("the compile was cancelled")
        elif isinstance(error, ProcessDied) and error.started:
            error = CompileError(f"compiling {key[:16]} for {arch} kills the compiler process")
        elif isinstance(error, ProcessDied):
            error = self._dead = _no_process()
        self._settle(answer, key, cubin=None if error else done.result(), error=error)

    def _settle(
        self,
        answer: Future[Cubin],
        key: str,
        *,
        cubin: Cubin | None = None,
        error: BaseException | None = None,
    ) -> None:
        if cubin is not None:
            self.cache.put(cubin)  # before the answer: who waits for it may exit next
        with self._lock:
            self._in_flight.pop(key, None)
        if cubin is not None:
            answer.set_result(cubin)
        else:
            answer.set_exception(error)

    def close(self) -> None:
        """Stop, whatever is being compiled: its future gets CompileCancelled, as does what has not begun."""
        with self._lock:
            self._closed = True
            pool = self._pool
        if pool is not None:
            pool.close()

    def __enter__(self) -> CachedCompiler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _no_process() -> ToolchainError:
    return ToolchainError(
        "the compiler processes end as they start",
        hint="kerngen doctor says what this machine lacks",
    )
