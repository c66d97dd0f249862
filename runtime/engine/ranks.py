"""The processes of a divided model, seen from rank 0, which decides all: it plans, and sends each plan to the others.

Rank 0 is the process that opened the model. Every other rank is a process of its own (rank_worker.py), started here, or
by torchrun. Each has two connections to rank 0, over a socket that only this user's processes reach: one for what it is
to do, one for signs of life. When a rank dies, is stopped, or stays behind in a forward for PATIENCE_S, the group ends:
all that wait for it get RankFailed, which says which rank and why. Where rank 0 itself stays in a library that waits
for the rank, its process says so and ends. When rank 0 ends, however it ends, the others do.

No rank decides by its own clock. What steps take is measured on rank 0 alone, and goes into plans.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

import kerngen
from kerngen.errors import KerngenError, RankFailed, UsageError
from kerngen.runtime.engine.plan import StepPlan
from kerngen.runtime.engine.runner import EmbeddingFailed
from kerngen.runtime.executors.collectives import MOST_GATHERED, Distributed
from kerngen.runtime.world import World
from kerngen.system.cores import usable_cores
from kerngen.system.leaving import leave, leave_at_once

if TYPE_CHECKING:
    from kerngen.runtime.engine.runner import Runner, StepOutput
    from kerngen.runtime.sampling import Sampling

ALIVE_S = 0.5  # between two signs of life
PATIENCE_S = 4.0  # without one, or behind rank 0 in a forward
STEP_S = 60.0  # that the GPUs have for a step: none of 8,192 tokens takes as long
LOAD_PATIENCE_S = 120.0  # ... while weights load, and while a step may compile: loading a library may stop all threads
START_S = 120.0  # within which a process has started, and the group has met
REASON_S = 5.0  # that a failure waits for the rank's own words about it
END_S = 5.0  # within which a rank that was told to end has ended, then it is killed; and a library, then nobody waits
FOLDER = "kerngen-ranks-"  # what the folder that ranks meet in begins with
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What is importable here is there. Not by PYTHONPATH, whose folders would come before Python's own.
_START = (
    "import sys; sys.path[:] = sys.argv.pop(1).split(':'); "
    "from kerngen.runtime.engine.rank_worker import main; main(*sys.argv[1:])"
)


class Opened(Protocol):
    """What a rank has of a divided model: a Session, or less. ranks: is set on rank 0. For engines of it `model` and
    `drafter` are there, too.
    """

    ranks: Ranks | None


Part = TypeVar("Part", bound=Opened)


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says of itself before anything is loaded. board: of its GPU, "" without one."""

    rank: int
    pid: int
    version: str
    board: str


@dataclass(frozen=True, slots=True)
class Alive:
    """plans, collectives: how many of each the rank has begun."""

    plans: int
    collectives: int


@dataclass(frozen=True, slots=True)
class Last:
    """What a rank says of the error that it ends with."""

    message: str
    hint: str | None = None


@dataclass(slots=True)
class _Rank:
    """Another rank, as rank 0 knows it. told: what it said of itself before it ended."""

    rank: int
    control: Connection
    life: Connection
    pid: int
    process: subprocess.Popen[bytes] | None
    seen: float = field(default_factory=time.monotonic)
    at: Alive = Alive(0, 0)
    moved: float = field(default_factory=time.monotonic)  # when `at` last changed
    told: Last | None = None


def torchrun_world() -> World | None:
    """Which rank torchrun made this process, where it did. Raises UsageError where its variables are none, or where
    there are several hosts.
    """
    if any(name not in os.environ for name in _TORCHRUN):
        return None
    try:
        world = World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    except ValueError as e:
        raise UsageError(f"RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are to be numbers: {e}") from e
    if here != world.size:
        raise UsageError(f"torchrun has {here} of {world.size} ranks on this host; a model is divided within one host")
    return world if world.size > 1 else None


def local_device(device: str | None, rank: int) -> str | None:
    """The device of a rank: the rank-th GPU from `device` on, or the CPU."""
    if device is not None and not device.startswith("cuda"):
        return device
    if device is None and not torch.cuda.is_available():
        return None
    first = int(device.partition(":")[2] or 0) if device else 0
    return f"cuda:{first + int(os.environ.get('LOCAL_RANK', rank))}"


def _require_gpus(device: str | None, size: int) -> None:
    """Raises UsageError where there are fewer GPUs from `device` on than ranks."""
    last = local_device(device, size - 1)
    if last is None or not last.startswith("cuda") or torchrun_world() is not None:
        return
    if int(last.partition(":")[2]) >= (there := torch.cuda.device_count()):
        raise UsageError(f"{size} ranks take GPUs up to {last}; there are {there}",
                         hint="fewer ranks, or --backend torch --device cpu")  # fmt: skip


def board_of(device: str | None) -> str:
    """What must be equal on all ranks: the name and the memory of the GPU."""
    if device is None or not device.startswith("cuda"):
        return ""
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, sm{found.major}{found.minor}, {found.total_memory / 1e9:.1f} GB"


def meet(store: dist.Store, world: World, device: str | None) -> Distributed:
    """This rank's collectives, once all ranks are there."""
    store.set_timeout(timedelta(seconds=START_S))
    on_gpu = device is not None and device.startswith("cuda")
    where: dict[str, Any] = {"device_id": torch.device(device)} if on_gpu and device else {}
    if on_gpu:
        torch.cuda.set_device(device)
        # Whether a rank hangs is seen here, in seconds. NCCL's own monitor asks a store that goes with the group.
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=world.rank, world_size=world.size,
                            timeout=timedelta(minutes=30), **where)  # fmt: skip
    return Distributed(world)


def connect(ranks: Distributed, device: str | None) -> None:
    """Have all ranks run the collectives that a model asks for, small and large: NCCL connects ranks at the first one
    of a kind and a size, and that is not to be within a step that is captured.
    """
    few, many = (torch.zeros(n, dtype=torch.float16, device=device or "cpu") for n in (1, MOST_GATHERED))
    for x in (few, many):
        ranks.all_gather(x, 0)
        ranks.all_reduce(x)
    if few.is_cuda:
        torch.cuda.synchronize(few.device)


class Ranks:
    """The other ranks of a divided model. From one thread, that of the engine."""

    def __init__(self, size: int, device: str | None = None) -> None:
        """Starts them, or waits for those that torchrun started. device: as of `kerngen.load`; ranks take the GPUs from
        there on. Raises UsageError and RankFailed, before anything is loaded.
        """
        if dist.is_initialized():
            raise UsageError("torch.distributed has a process group in this process; a divided model makes its own",
                             hint="open one divided model a process")  # fmt: skip
        self.world = World(0, size)
        self.device = local_device(device, 0)
        _require_gpus(device, size)
        self.error: RankFailed | None = None  # why the group has ended, where it has
        self.plans = 0
        self.runners: WeakSet[Runner] = WeakSet()  # of this rank's engines
        self._device = device
        self._ranks: list[_Rank] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_loading, self._is_ready = False, False
        self._failed, self._closing, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._threads_before = torch.get_num_threads()
        self._watcher: threading.Thread | None = None
        self._giving_up: threading.Thread | None = None  # the group, when a rank has ended
        self._collecting_since: float | None = None
        self._at_work: int | None = None  # the thread of the engine, while it does what the others do or waits for it
        self._folder = _private_folder()
        try:
            self.collectives = self._start(self._folder)
            self._watcher = threading.Thread(target=self._watch, name="kerngen-ranks", daemon=True)
            self._watcher.start()
            with self._all("connect"):
                connect(self.collectives, self.device)
        except BaseException:
            self.close()
            raise

    # -- the start

    def _start(self, folder: Path) -> Distributed:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(os.fspath(folder / "ranks"))
            listener.listen(2 * self.world.size)
            store: dist.Store
            if (run := torchrun_world()) is not None:
                store = next(dist.rendezvous("env://"))[0]
                store.set("kerngen-ranks", os.fspath(folder / "ranks"))
                if run.size != self.world.size:
                    raise UsageError(f"torchrun started {run.size} ranks, and the model is to have {self.world.size}",
                                     hint=f"--tensor-parallel {run.size}")  # fmt: skip
            else:
                store = dist.FileStore(os.fspath(folder / "store"), self.world.size)
                self._spawn(folder)
            hellos = self._greeted(listener)
        self._require_alike(hellos)
        threads = 0
        if not board_of(self.device):  # the same number on all, since a product's bits may depend on it
            threads = max(1, min(self._threads_before, usable_cores() // self.world.size))
            torch.set_num_threads(threads)
        self._send("meet", threads)
        return meet(store, self.world, self.device)

    def _spawn(self, folder: Path) -> None:
        for rank in range(1, self.world.size):
            command = [sys.executable, "-c", _START, ":".join(sys.path), os.fspath(folder), str(rank),
                       str(self.world.size), local_device(self._device, rank) or ""]  # fmt: skip
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))

    def _greeted(self, listener: socket.socket) -> dict[int, Hello]:
        """What all ranks say of themselves; each has two connections then."""
        found: dict[int, list[Connection]] = {}
        hellos: dict[int, Hello] = {}
        until = time.monotonic() + START_S
        while sum(map(len, found.values())) < 2 * (self.world.size - 1):
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    raise RankFailed(f"rank {rank} {_ended(process.returncode)} as it started")
            if time.monotonic() > until:
                missing = sorted(set(range(1, self.world.size)) - found.keys())
                raise RankFailed(f"rank {missing[0] if missing else 1} has not come within {START_S:g} s")
            if wait([listener], 0.1):
                connection = Connection(listener.accept()[0].detach())
                said: Hello = connection.recv()
                hellos[said.rank] = said
                found.setdefault(said.rank, []).append(connection)
        for rank, (control, life) in sorted(found.items()):
            own = self._processes[rank - 1] if self._processes else None
            self._ranks.append(_Rank(rank, control, life, hellos[rank].pid, own))
        return hellos

    def _require_alike(self, hellos: Mapping[int, Hello]) -> None:
        board = board_of(self.device)
        for rank, said in hellos.items():
            if said.version != kerngen.__version__:
                raise RankFailed(f"rank {rank} is kerngen {said.version}, rank 0 {kerngen.__version__}",
                                 hint="install one version for all ranks")  # fmt: skip
            if said.board != board:
                raise UsageError(f"rank {rank} has {said.board or 'no GPU'}, rank 0 {board or 'none'}",
                                 hint="a model is divided among equal GPUs: CUDA_VISIBLE_DEVICES chooses")  # fmt: skip

    # -- what they are told

    def load(self, opens: Callable[..., Part], digest: Callable[[], str] | None = None, advance: Any = None) -> Part:
        """What `opens(collectives, device, advance)` gives on this rank, once all ranks have opened their parts: a
        function of a module, since the other processes call it too. digest: of what is opened, which
        must be equal on all; looked at first. Raises as `opens` does, RankFailed where another rank fails.
        """
        with self._all("digest", digest) as others:
            mine = "" if digest is None else digest()
        for rank, its in others.items():
            if its != mine:
                raise RankFailed(f"rank {rank} sees another checkpoint than rank 0 does",
                                 hint="all ranks are to read the same files")  # fmt: skip
        with self._all("load", opens):
            part = opens(self.collectives, self.device, advance)
        part.ranks = self
        return part

    def room(self, batch: int, max_len: int) -> list[tuple[int, dict[str, int] | None]]:
        """What `Session.room` gives on the other ranks."""
        with self._all("room", batch, max_len) as others:
            pass
        return list(others.values())

    @property
    def pids(self) -> list[int]:
        """Of the other ranks' processes."""
        return [other.pid for other in self._ranks]

    @contextmanager
    def making_engine(self, options: Mapping[str, Any], drafts: bool) -> Iterator[None]:
        """While rank 0 makes an engine the others make theirs with the same options, and where it drafts with their
        part's drafter.
        """
        self._is_ready = False
        with self._all("engine", dict(options), drafts):
            yield

    @contextmanager
    def making_ready(self, usual: Sampling | None) -> Iterator[None]:
        with self._all("ready", usual):
            yield
        self._is_ready = True

    def run(self, runner: Runner, plan: StepPlan) -> StepOutput:
        """`runner.run(plan)`, on all ranks. What raises in there ends the group, as ranks that have not all begun the
        same collectives cannot go on: but EmbeddingFailed, with which no rank has begun any.
        """
        with self._breaking():
            self._send("plan", plan)
            self.plans += 1
            try:
                return runner.run(plan, self._agree)
            except EmbeddingFailed as e:
                failed = e
        raise failed

    def _agree(self, failed: EmbeddingFailed | None) -> EmbeddingFailed | None:
        """The first rank's failure to embed, which all are told; None where none has failed."""
        with self.collecting():
            each = [failed, *[other.control.recv() for other in self._ranks]]
        first = next((found for found in each if found is not None), None)
        self._send("embedded", first)
        return first

    @contextmanager
    def _all(self, what: str, *values: Any) -> Iterator[dict[int, Any]]:
        """While this rank does `what`, the others do; what they say of it is there at the end."""
        answers: dict[int, Any] = {}
        with self._breaking():
            self._is_loading = True
            self._send(what, *values)
            yield answers
            for other in self._ranks:
                answers[other.rank] = other.control.recv()
            self._is_loading = False

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While this thread waits for what the ranks' GPUs compute: for STEP_S at most, then the group ends."""
        self._collecting_since = time.monotonic()
        try:
            with self.at_work():
                yield
        finally:
            self._collecting_since = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While this thread computes with the others, or waits for what was computed."""
        before, self._at_work = self._at_work, threading.get_ident()
        try:
            yield
        finally:
            self._at_work = before

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        self.require_alive()
        try:
            with self.at_work():
                yield
        except BaseException as e:
            if isinstance(e, KerngenError) and not isinstance(e, RankFailed):
                self._end("rank 0 has ended in an error")
                raise
            if isinstance(e, (EOFError, OSError, RuntimeError)) and not isinstance(e, torch.OutOfMemoryError):
                # a connection that broke, here or within torch
                self._failed.wait(REASON_S)
                if self.error is not None:
                    raise self.error from e
            self._end(f"rank 0 has ended in {type(e).__name__}")
            raise

    def require_alive(self) -> None:
        """Raises RankFailed where the group has ended."""
        if self.error is not None:
            raise self.error
        if self._closing.is_set():
            raise RankFailed("the model's ranks have been closed")

    def _send(self, what: str, *values: Any) -> None:
        data = ForkingPickler.dumps((what, *values))
        for other in self._ranks:
            other.control.send_bytes(data)

    # -- the end

    def _watch(self) -> None:
        """In a thread: hears the others' signs of life. Where one is missing it ends the group, and this process where
        that does not bring the engine's thread back.
        """
        lives = {other.life: other for other in self._ranks}
        while not self._failed.is_set() and not self._closing.is_set():
            for life in wait(list(lives), ALIVE_S / 2):
                other = lives[life]  # type: ignore[index]
                try:
                    said = other.life.recv()
                except (EOFError, OSError):
                    self._end(self._why_gone(other), other)
                    return self._leave_if_stuck()
                now = time.monotonic()
                other.seen = now
                if isinstance(said, Last):
                    other.told = said
                elif said != other.at:
                    other.at, other.moved = said, now
            for other in self._ranks:
                if why := self._why_late(other):
                    self._end(f"rank {other.rank} (process {other.pid}) {why}", other)
                    return self._leave_if_stuck()
            if (since := self._collecting_since) is not None and time.monotonic() - since > STEP_S:
                self._end(f"a step has not ended within {STEP_S:g} s, and all ranks are there: their GPUs hang")
                return self._leave_if_stuck()

    @property
    def _patience(self) -> float:
        """An engine on GPUs that was not made ready compiles in its steps, and not as long on each rank."""
        compiles = bool(board_of(self.device)) and not self._is_ready
        return LOAD_PATIENCE_S if self._is_loading or compiles else PATIENCE_S

    def _why_late(self, other: _Rank) -> str:
        now, patience = time.monotonic(), self._patience
        if (silent := now - other.seen) > patience:
            return f"gave no sign of life for {silent:.0f} s: it is stopped or hangs"
        mine = Alive(self.plans, self.collectives.begun)
        if (mine.plans, mine.collectives) <= (other.at.plans, other.at.collectives):
            other.moved = now
        elif now - other.moved > patience:
            return (
                f"hangs: for {now - other.moved:.0f} s it has been at collective {other.at.collectives:,} of plan "
                f"{other.at.plans:,}, and rank 0 waits at collective {mine.collectives:,} of plan {mine.plans:,}"
            )
        return ""

    def _why_gone(self, other: _Rank) -> str:
        """Of a rank whose connection has ended."""
        if other.told is not None:
            return f"rank {other.rank}: {other.told.message}"
        how = "has ended"
        if other.process is not None:
            with suppress(subprocess.TimeoutExpired):
                how = _ended(other.process.wait(1.0))
        return f"rank {other.rank} (process {other.pid}) {how}"

    def _end(self, why: str, by: _Rank | None = None) -> None:
        """No rank goes on. by: whose fault it is; None for this one's own. Waits for no library: `close` does."""
        with self._lock:
            if self._failed.is_set() or self._closing.is_set():
                return
            hint = by.told.hint if by is not None and by.told is not None else None
            self.error = RankFailed(why, hint=hint or "open the model anew; all its ranks have ended")
            self._failed.set()
        self._kill()
        for go_on in self.collectives.when_given_up:
            go_on()
        if dist.is_initialized() and dist.get_backend() == "nccl":  # or kernels would wait for the others for ever
            self._giving_up = _begun(dist.distributed_c10d._abort_process_group)

    def _leave_if_stuck(self) -> None:
        """Once the group has ended: end the process where the engine's thread stays in one call of a library. No error
        can be raised there, and whoever waits for it would wait for ever.
        """
        since, seen = time.monotonic(), (0, 0)
        while self.error is not None and (thread := self._at_work) is not None:
            frame = sys._current_frames().get(thread)
            at = (0, 0) if frame is None else (id(frame), frame.f_lasti)
            del frame  # nor what it holds
            if at != seen:
                since, seen = time.monotonic(), at
            elif time.monotonic() - since > END_S:
                print(f"{RankFailed.__name__}: {self.error}", file=sys.stderr)
                leave_at_once()
                leave(1)
            time.sleep(ALIVE_S / 2)

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for other in self._ranks:  # those that torchrun started end by it
            for connection in (other.control, other.life):
                with suppress(OSError):
                    socket.socket(fileno=os.dup(connection.fileno())).shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all other ranks: at once where the group has failed, else when they have done what they were told."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        if not self._failed.is_set():
            with suppress(OSError):
                self._send("end")
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        until = time.monotonic() + END_S
        for other in self._ranks:  # its connection ends with it
            with suppress(EOFError, OSError):
                while other.life.poll(max(until - time.monotonic(), 0.0)):
                    other.life.recv()
        self._kill()
        for process in self._processes:
            process.wait()
        for other in self._ranks:
            other.control.close()
            other.life.close()
        with suppress(RuntimeError):  # of a device that a dead rank has left with an error
            for runner in self.runners:
                runner.free_graphs()  # NCCL waits for those that have its kernels
        if self._giving_up is not None:
            self._giving_up.join(END_S)
        if dist.is_initialized() and (self._giving_up is None or not self._giving_up.is_alive()):
            self._giving_up = _begun(dist.destroy_process_group)
            self._giving_up.join(END_S)
        if self._giving_up is not None and self._giving_up.is_alive():
            leave_at_once()
        shutil.rmtree(self._folder, ignore_errors=True)
        torch.set_num_threads(self._threads_before)


def _begun(work: Callable[[], Any]) -> threading.Thread:
    """`work` in a thread of its own: a library may wait for a GPU, and that for a rank that is gone."""

    def quietly() -> None:
        with suppress(RuntimeError):
            work()

    thread = threading.Thread(target=quietly, name="kerngen-ranks-end", daemon=True)
    thread.start()
    return thread


def _private_folder() -> Path:
    """That only this user's processes may look into, for a socket, whose path has at most 107 bytes."""
    folder = tempfile.mkdtemp(prefix=FOLDER)
    if len(os.fsencode(folder)) > 90:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix=FOLDER, dir="/tmp")
    return Path(folder)


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
