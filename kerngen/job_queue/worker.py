"""Takes jobs from the queue, one after another, and does them as `kerngen tune` would.

Procrastinate hands out the jobs and keeps the worker's heartbeat in its event loop; a job is done in a thread beside.
Every worker looks after the others: what one that fell silent was at goes back into the queue, for one of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from kerngen.arch import Arch, Target, find_arch
from kerngen.compiler.cache import CachedCompiler
from kerngen.errors import DatabaseError, KerngenError
from kerngen.job_queue.compiling import compile_ahead, fetch_images, forget_images
from kerngen.job_queue.job import Job, code_digest, queue_name
from kerngen.job_queue.queue import COMPILE, HEARTBEAT_S, SILENT, TUNE, Queue, Worker, app_for_worker
from kerngen.templates.kernel import fields_of

if TYPE_CHECKING:
    import procrastinate
    from procrastinate import JobContext

    from kerngen.timing.gpu import GpuLock
    from kerngen.tuning.objective import Objective
    from kerngen.tuning.report import Report
    from kerngen.tuning.worker import GpuWorker

log = logging.getLogger(__name__)

TELL_S = 1.0  # how often a job's progress is told
MOST_ATTEMPTS = 3  # workers that a job may take with it before it is given up


@dataclass(frozen=True, slots=True)
class Options:
    """What a worker does. kinds: of jobs (see `job.KINDS`). arches: of those that need no GPU."""

    url: str
    kinds: tuple[str, ...]
    arches: tuple[Arch, ...]
    jobs: int
    until_empty: bool = False
    heartbeat_s: float = HEARTBEAT_S
    say: Callable[[str], None] = print


@dataclass(slots=True)
class _Gpu:
    worker: GpuWorker
    lock: GpuLock
    target: Target


def work(options: Options) -> int:
    """Take jobs until told to stop (SIGTERM, Ctrl-C) or, `until_empty`, until its queues have none. Returns how many.

    Raises DatabaseError where the server cannot be had, DeviceError where there is no GPU to measure on.
    """
    from kerngen.tuning_db import Store

    with ExitStack() as stack:
        queue = stack.enter_context(Queue.open(options.url))
        Store.open(options.url).close()  # its tables, before anybody counts on them
        gpu = _gpu(stack) if "measured" in options.kinds else None
        me = Worker(f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:4]}", queues_of(options, gpu), _about(gpu))
        options.say(f"{me.name} ({me.about}) takes {', '.join(me.queues)}")
        running = _Running(options, queue, me, gpu)
        return asyncio.run(running.serve())


def queues_of(options: Options, gpu: _Gpu | None) -> tuple[str, ...]:
    """Those that this worker takes jobs from, as far as its NVRTC can build for them."""
    code = code_digest()
    names = [] if gpu is None else [queue_name("measured", gpu.target.device.name, code)]
    for kind in ("predicted", "compile"):
        if kind in options.kinds:
            names += [queue_name(kind, arch.name, code) for arch in options.arches]
    return tuple(names)


def _gpu(stack: ExitStack) -> _Gpu:
    from kerngen.timing.gpu import GpuLock
    from kerngen.tuning.worker import GpuWorker

    worker = stack.enter_context(GpuWorker())
    lock = GpuLock(worker.uuid())
    stack.callback(lock.release)
    return _Gpu(worker, lock, worker.target())


def _about(gpu: _Gpu | None) -> str:
    from kerngen import __version__
    from kerngen.compiler.compile import nvrtc_version

    what = "no GPU" if gpu is None else str(gpu.target.device)
    return f"{what}, kerngen {__version__}, NVRTC {'.'.join(map(str, nvrtc_version()))}, {os.cpu_count()} cores"


class _Running:
    def __init__(self, options: Options, queue: Queue, me: Worker, gpu: _Gpu | None) -> None:
        self.options, self.queue, self.me, self.gpu = options, queue, me, gpu
        self.compiler = CachedCompiler(options.jobs)
        self.num_done = 0

    async def serve(self) -> int:
        import procrastinate

        app = app_for_worker(self.queue.conninfo)
        retry = _retry_strategy()
        app.task(name=TUNE, pass_context=True, retry=retry)(self._tune)
        app.task(name=COMPILE, pass_context=True, retry=retry)(self._compile)
        beat = self.options.heartbeat_s
        await asyncio.to_thread(self.queue.greet, self.me)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(app.open_async())
            taking = asyncio.create_task(app.run_worker_async(
                queues=list(self.me.queues), name=self.me.name, concurrency=1, shutdown_graceful_timeout=0.0,
                fetch_job_polling_interval=min(5.0, beat), abort_job_polling_interval=min(5.0, beat),
                update_heartbeat_interval=beat, stalled_worker_timeout=SILENT * beat,
            ))  # fmt: skip
            watching = asyncio.create_task(self._watch(app, taking))
            try:
                await taking
            except asyncio.CancelledError:
                pass
            except procrastinate.exceptions.ConnectorException as e:
                raise DatabaseError(f"the queue is lost: {e.__cause__ or e}") from e
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
                self.compiler.close()
        with suppress(DatabaseError):
            self.queue.part(self.me)
        return self.num_done

    async def _watch(self, app: procrastinate.App, taking: asyncio.Task[None]) -> None:
        """Between heartbeats: take over from the dead, and end where there is nothing more to do."""
        from procrastinate.exceptions import ConnectorException

        between_s = min(self.options.heartbeat_s, 1.0) if self.options.until_empty else self.options.heartbeat_s
        while True:
            try:
                with await asyncio.to_thread(Queue.open, self.options.url) as queue:
                    while True:
                        await asyncio.to_thread(queue.greet, self.me)
                        await self._take_over(app, queue)
                        if self.options.until_empty and not await asyncio.to_thread(queue.num_open, self.me.queues):
                            taking.cancel()
                        await asyncio.sleep(between_s)
            except (DatabaseError, ConnectorException) as e:  # the server was away: with a new connection, then
                log.warning("%s", e)
                await asyncio.sleep(between_s)

    async def _take_over(self, app: procrastinate.App, queue: Queue) -> None:
        """Put back what those were at who fell silent. One worker at a time does, so nothing is put back twice."""
        jobs = app.job_manager
        with queue.alone() as is_alone:
            if not is_alone:
                return
            for job in await jobs.get_stalled_jobs(seconds_since_heartbeat=SILENT * self.options.heartbeat_s):
                if job.task_name in (TUNE, COMPILE) and job.id is not None:
                    await self._put_back(jobs, queue, job, job.id)

    async def _put_back(
        self, jobs: procrastinate.manager.JobManager, queue: Queue, job: procrastinate.jobs.Job, id: int
    ) -> None:
        from procrastinate.exceptions import UniqueViolation
        from procrastinate.jobs import Status

        said = f"job {id} ({job.queue}) lost its worker"
        why = f"{MOST_ATTEMPTS} workers died of it, or with it"
        if job.attempts + 1 < MOST_ATTEMPTS:
            try:
                await jobs.retry_job(job)
            except UniqueViolation:  # two asked for it at the same moment
                why = "the same is in the queue as another job"
            else:
                self.options.say(f"{said}; it is to be done again")
                return
        self.options.say(f"{said}; given up: {why}")
        await asyncio.to_thread(queue.tell, id, "", 0, 0, "", {"error": why})
        await jobs.finish_job(job, Status.FAILED, delete_job=False)

    # ---- a job, in its thread

    def _tune(self, context: JobContext, job: dict[str, Any]) -> None:
        self._do(context, Job.of_json(job), self._tuned)

    def _compile(self, context: JobContext, job: dict[str, Any]) -> None:
        self._do(context, Job.of_json(job), self._compiled)

    def _do(self, context: JobContext, job: Job, do: Callable[[Job, _Told], dict[str, Any]]) -> None:
        from procrastinate.exceptions import JobAborted

        if context.job.id is None:
            raise DatabaseError("the queue gave a job that has no id")
        what = f"{job.kernel} ({len(job.problems)} problems, {job.kind})"
        start = time.monotonic()
        with Queue.open(self.options.url) as queue:
            told = _Told(queue, context, self.me.name, what)
            try:
                result = do(job, told)
            except KeyboardInterrupt:
                self.options.say(f"stopped: job {context.job.id}, {what}")
                raise JobAborted from None
            except Exception as e:
                why = e.message if isinstance(e, KerngenError) else f"{type(e).__name__}: {e}"
                self.options.say(f"failed: job {context.job.id}, {what}: {why}")
                with suppress(DatabaseError):
                    told.end({"error": why})
                raise
            told.require_ours()  # else another has it, and ends it
            told.end(result)
        self.num_done += 1
        self.options.say(f"done: job {context.job.id}, {what}, {time.monotonic() - start:.1f} s")

    def _tuned(self, job: Job, told: _Told) -> dict[str, Any]:
        from kerngen.tuning.tuner import Tuner
        from kerngen.tuning_db import Store

        with ExitStack() as stack:
            store = stack.enter_context(Store.open(self.options.url))
            objective = self._objective(job, stack)
            if objective.needs_image:
                fetch_images(store, self.compiler.cache, job, objective.target.arch)
            tuner = Tuner(objective, store, self.compiler, trials=job.trials, seed=job.seed, progress=told)
            report = tuner.run(job.items())
            if report.interrupted:
                raise KeyboardInterrupt
            if objective.needs_image:
                forget_images(store, job)
        return _result(report)

    def _objective(self, job: Job, stack: ExitStack) -> Objective:
        from kerngen.tuning.objective import Measured, Predicted

        if job.kind == "predicted":
            return Predicted(job.target())
        if self.gpu is None:
            raise KerngenError("a job to measure came to a worker without a GPU")
        stack.callback(self.gpu.lock.release)  # between jobs the GPU is whoever's
        return Measured(self.gpu.worker, self.gpu.lock)

    def _compiled(self, job: Job, told: _Told) -> dict[str, Any]:
        from kerngen.tuning_db import Store

        with Store.open(self.options.url) as store:
            num_built = compile_ahead(store, self.compiler, job, told)
            if not told.queue.is_wanted(measuring_lock(job)):
                forget_images(store, job)
        return {"num_compiled": num_built, "results": []}


def measuring_lock(job: Job) -> str:
    """The lock of the job that a compile job works for."""
    return Job.of_json(job.as_json() | {"kind": "measured"}).lock


class _Told:
    """A job's progress, as the tuner tells it: passed on now and then, with a look at whether the job is still ours."""

    def __init__(self, queue: Queue, context: JobContext, worker: str, what: str) -> None:
        self.queue, self._context, self._worker, self._what = queue, context, worker, what
        self._id = context.job.id or 0
        self._is_held_as = queue.holder(self._id)
        self._said = 0.0
        self._last = 0, 0
        self._tell(0, 0)

    def update(self, done: int, total: int, text: str) -> None:
        """Raises KeyboardInterrupt, which a tune ends well by, where the job is to stop here."""
        self._last = done, total
        if self._context.should_abort():
            raise KeyboardInterrupt
        if time.monotonic() - self._said >= TELL_S:
            self._tell(done, total)
            self.require_ours()

    def end(self, result: dict[str, Any]) -> None:
        self.queue.tell(self._id, self._worker, *self._last, self._what, result)

    def require_ours(self) -> None:
        """Ends this process where another has the job by now: it was taken for dead, and must not end what is not its.

        What it found so far is in the database, and is the other's to go on from.
        """
        if self.queue.holder(self._id) != self._is_held_as:
            print(f"job {self._id} was given to another worker: this one was silent for too long", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)

    def _tell(self, done: int, total: int) -> None:
        self._said = time.monotonic()
        self.queue.tell(self._id, self._worker, done, total, self._what)


def _result(report: Report) -> dict[str, Any]:
    """What whoever waits for the job is to know and cannot read in the database."""
    results = [
        {
            "problem": fields_of(r.item.problem), "default_us": r.default_us, "note": r.note,
            "explanation": r.explanation, "registers": r.registers, "smem_bytes": r.smem_bytes,
            "spill_bytes": r.spill_bytes, "num_valid": r.num_valid, "num_refused": r.num_refused,
            "num_tried": r.num_tried, "num_failed": r.num_failed,
        }
        for r in report.results
    ]  # fmt: skip
    return {
        "run": report.run, "seconds": report.seconds, "num_trials": report.num_trials,
        "num_compiled": report.num_compiled, "num_from_database": report.num_from_database,
        "num_spaces": report.num_spaces, "num_refused": report.num_refused, "failures": report.failures,
        "results": results,
    }  # fmt: skip


def _retry_strategy() -> Any:
    """What a worker left because it was told to end is done again at once; a server that was away is tried anew."""
    from procrastinate import BaseRetryStrategy, RetryDecision
    from procrastinate.exceptions import JobAborted

    class Again(BaseRetryStrategy):
        def get_retry_decision(self, *, exception: BaseException, job: Any) -> RetryDecision | None:
            if isinstance(exception, JobAborted):
                return RetryDecision(retry_in={"seconds": 0})
            if isinstance(exception, DatabaseError) and job.attempts + 1 < MOST_ATTEMPTS:
                return RetryDecision(retry_in={"seconds": 5})
            return None

    return Again()


def able_arches(names: Iterable[str] | None = None) -> tuple[Arch, ...]:
    """Those of `names`, or of all, that this machine's NVRTC can build for."""
    from kerngen.arch import ARCHES
    from kerngen.compiler.compile import require_target, supported_targets

    if names is None:
        return tuple(a for a in ARCHES.values() if a.number in supported_targets())
    found = tuple(find_arch(n) for n in names)
    for arch in found:
        require_target(arch)
    return found
