"""Records measurements on the GPU that is here: python -m kerngen.tuning.record PLAN.json -o FOLDER --minutes 8

A plan (record_plan.py) names problems; of each, every valid configuration of its grid is compiled, checked against the
reference and timed, and its line is in the problem's file (recorded.py) before the next one begins. Compiles go on
ahead, in worker processes; the GPU times one configuration after the other in a process of its own. What is left when
the minutes are over is the end of the plan. The same command goes on there: files that are complete stay as they are,
and one that was cut, by the clock or by kill -9, is continued, on the same board.

Of a problem the configurations are timed in a shuffled order, so that a GPU that warms up favours no part of the grid.
When all have been, the fastest are timed again together, in rotated order, and the file is written anew, sorted, with a
head that says complete.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, Protocol

import click

from kerngen import __version__
from kerngen.arch import Device, Target, find_device
from kerngen.compiler.cache import CachedCompiler
from kerngen.compiler.compile import Cubin, compile_cubin, nvrtc_version
from kerngen.compiler.render import render
from kerngen.errors import CompileError, RecordingError, UsageError
from kerngen.system.progress import Progress, Reporter
from kerngen.templates.kernel import Kernel, fields_of, static_fields
from kerngen.timing.gpu import Clocks, Seen
from kerngen.tuning.checks import why_unlaunchable
from kerngen.tuning.plan import rank
from kerngen.tuning.record_plan import Points, RecordPlan, Wanted, points, read_plan
from kerngen.tuning.recorded import Head, Log, Recorded, Row, completed, read, write
from kerngen.tuning.worker import GpuWorker, Observed

SAMPLES, TARGET_MS = 8, 1.0  # of each configuration: graph replays, and how long one of them is to take
RETIMED, ROUNDS = 30, 3  # the fastest of a problem, the default among them, have a second look of so many rounds
AHEAD = 4096  # configurations whose compiles may be under way or done before the GPU gets to them
# What a dry run reckons with, seconds: a configuration beside its timing (load, check, capture); a problem (inputs and
# reference, sources of a kernel).
CHECK_S, PROBLEM_S = 0.010, 2.0
WARM_UPS = 3  # replays of measure.time_calls before it samples


class Gpu(Protocol):
    """What the recorder asks of a GPU: `worker.GpuWorker`, or a test's own."""

    def device(self) -> Device: ...
    def environment(self) -> dict[str, Any]: ...
    def uuid(self) -> str: ...
    def clocks(self) -> Clocks | None: ...

    def measure(
        self, kernel: Kernel, problem: Any, config: Any, image: bytes, *, samples: int, target_ms: float
    ) -> Observed: ...

    def finals(
        self,
        kernel: Kernel,
        problem: Any,
        configs: list[tuple[Any, bytes]],
        *,
        rounds: int,
        samples: int,
        target_ms: float,
    ) -> list[Observed]: ...


@dataclass(frozen=True, slots=True)
class Recording:
    """What came of a run. complete: files that are; left: configurations that no file has, by the name of their file,
    or 0 where only the second look is missing. rows: of this run.
    """

    complete: tuple[str, ...]
    left: Mapping[str, int]
    rows: int
    outcomes: Mapping[str, int]
    seconds: float


@dataclass(slots=True, eq=False)
class _Job:
    """One problem of the run: what is wanted, and what its file has."""

    points: Points
    head: Head
    rows: dict[Any, Row]

    @property
    def missing(self) -> list[Any]:
        """What is not recorded yet, in the order of recording: the default, then the others shuffled."""
        rest = [c for c in self.points.configs[1:] if c not in self.rows]
        random.Random(self.head.file_name).shuffle(rest)
        default = self.points.default
        return rest if default in self.rows else [default, *rest]


@dataclass(slots=True, eq=False)
class _Ahead:
    """A configuration whose compile is under way."""

    job: _Job
    config: Any
    cubin: Future[Cubin]


def record(
    plan: RecordPlan,
    folder: Path,
    gpu: Gpu,
    compiler: CachedCompiler,
    *,
    minutes: float,
    anew: bool = False,
    commit: str = "",
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Recording:
    """Record what `folder` lacks of `plan`, for at most `minutes`. anew: begin files that do not fit again.

    Raises RecordingError before anything is measured where the GPU is not the plan's, or where a file in `folder` is
    damaged or was begun with another board, driver, source or grid; ToolchainError; OSError.
    """
    recorder = _Recorder(folder, gpu, compiler, clock() + 60 * minutes, progress, clock)
    jobs = recorder.prepare(plan, anew, commit)
    return recorder.run(jobs)


class _Recorder:
    def __init__(
        self,
        folder: Path,
        gpu: Gpu,
        compiler: CachedCompiler,
        deadline: float,
        progress: Progress | None,
        clock: Callable[[], float],
    ) -> None:
        self.folder, self.gpu, self.compiler = folder, gpu, compiler
        self.target = Target.of(gpu.device())
        self._deadline, self._progress, self._clock = deadline, progress, clock
        self._start = clock()
        self._outcomes: dict[str, int] = {}
        self._total = 0

    # -- what there is and what is to be done

    def prepare(self, plan: RecordPlan, anew: bool, commit: str) -> list[_Job]:
        meant, here = find_device(plan.device), self.target.device
        if (meant.arch, meant.num_sms) != (here.arch, here.num_sms) or meant.name not in here.name:
            raise RecordingError(
                f"the plan is for {meant} ({meant.arch}, {meant.num_sms} SMs); "
                f"this is {here} ({here.arch}, {here.num_sms} SMs)"
            )
        about = self.gpu.environment() | {
            "kerngen": __version__, "nvrtc": ".".join(map(str, nvrtc_version())),
            "samples": SAMPLES, "target_ms": TARGET_MS, "retimed": RETIMED, "rounds": ROUNDS,
        }  # fmt: skip
        board = self.gpu.uuid()
        return [self._job(w, about, board, anew, commit) for w in plan.problems]

    def _job(self, wanted: Wanted, about: Mapping[str, Any], board: str, anew: bool, commit: str) -> _Job:
        p = points(wanted, self.target)
        head = Head(
            kernel=wanted.kernel, name=wanted.name, problem=fields_of(p.problem), arch=self.target.arch.name,
            device=asdict(self.target.device), grid=p.grid, default=fields_of(p.default), num_configs=len(p.configs),
            entries=tuple(dict.fromkeys(e for b in p.kernel.bodies(self.target.arch) for e in b.args)),
            exhaustive=not wanted.sample, held_out=wanted.held_out, environment=about, board=board,
            folder_digest=p.kernel.folder_digest, commit=commit,
        )  # fmt: skip
        path = self.folder / head.file_name
        if not path.is_file():
            return _Job(p, head, {})
        try:
            found = read(path, torn=True)
            if (why := _why_other(found.head, head)) is not None:
                raise RecordingError(f"{path}:1: {why}")
        except RecordingError as e:
            if anew:
                return _Job(p, head, {})
            raise RecordingError(e.message, hint="--anew begins this file again; another -o keeps it") from e
        return _Job(p, replace(found.head, held_out=wanted.held_out), dict(found.by_config))

    # -- the run

    def run(self, jobs: list[_Job]) -> Recording:
        todo = [j for j in jobs if not j.head.complete]
        self._total = sum(len(j.missing) for j in todo)
        with _Compiling(self, todo) as ahead:
            for job in todo:
                if self._is_late() or not self._record(job, ahead):
                    break
        left = {j.head.file_name: len(j.missing) for j in jobs if not j.head.complete}
        complete = tuple(j.head.file_name for j in jobs if j.head.complete)
        seconds = self._clock() - self._start
        return Recording(complete, left, sum(self._outcomes.values()), self._outcomes, seconds)

    def _record(self, job: _Job, ahead: _Compiling) -> bool:
        """All that is missing of one problem, then the second look. False if the time is over before."""
        self._noted(job)
        log = Log(self.folder / job.head.file_name, Recorded(job.head, tuple(job.rows.values())))
        try:
            for _ in range(len(job.missing)):
                if (row := self._row(ahead)) is None:
                    return False
                job.rows[row.config] = row
                log.append(row)
        finally:
            log.close()
        if job.head.exhaustive and not self._retime(job):
            return False
        self._noted(job)
        done = completed(job.head, job.rows.values())
        write(self.folder / job.head.file_name, done)
        job.head = done.head
        return True

    def _noted(self, job: _Job) -> None:
        if clocks := Seen(None, self.gpu.clocks()).noted():
            job.head = replace(job.head, clocks=(*job.head.clocks, clocks))

    def _row(self, ahead: _Compiling) -> Row | None:
        """What becomes of the next configuration; None if the time is over before that is known."""
        made: Cubin | str | None = None
        if (a := ahead.next()) is None:
            return None
        while made is None:
            if self._is_late():
                return None
            try:
                made = a.cubin.result(timeout=0.5)
            except TimeoutError:
                self._tick(a.job, "compiling")
            except CompileError as e:
                made = f"{e.message} {e.log}"
        row = self._judged(a.job.points, a.config, made)
        self._outcomes[row.outcome] = self._outcomes.get(row.outcome, 0) + 1
        self._tick(a.job, row.outcome)
        return row

    def _judged(self, p: Points, config: Any, made: Cubin | str) -> Row:
        if isinstance(made, str):
            return Row(config, "compile_failed", reason=made)
        if (why := why_unlaunchable(p.kernel, p.problem, config, self.target, made)) is not None:
            return Row(config, "invalid", takes=made.entries, reason=why)
        seen = self.gpu.measure(p.kernel, p.problem, config, made.image, samples=SAMPLES, target_ms=TARGET_MS)
        if seen.outcome != "ok":
            return Row(config, seen.outcome, takes=made.entries, reason=seen.reason)
        mhz = seen.gpu.get("sm_mhz")
        return Row(config, "ok", seen.p50_us, seen.p10_us, seen.p90_us, mhz=mhz, takes=made.entries)

    def _retime(self, job: _Job) -> bool:
        """The fastest, and the default, once more together. False if the time is over before."""
        ok = sorted((r for r in job.rows.values() if r.us is not None), key=lambda r: r.us or inf)
        default = job.points.default
        chosen = list(dict.fromkeys([r.config for r in ok[:RETIMED]] + [default] * (job.rows[default].us is not None)))
        p = job.points
        images = []
        for config in chosen:
            if self._is_late():
                return False
            source = render(p.kernel, p.problem, config, self.target)
            images.append((config, self.compiler.submit(source, self.target.arch).result().image))
        if not images:
            return True
        self._tick(job, f"the fastest {len(images)} again")
        seen = self.gpu.finals(p.kernel, p.problem, images, rounds=ROUNDS, samples=SAMPLES, target_ms=TARGET_MS)
        if not any(s.outcome == "ok" for s in seen):
            return True  # one of them took the process down: what each was seen to take stands
        for config, s in zip(chosen, seen, strict=True):
            if s.outcome == "ok":
                job.rows[config] = replace(job.rows[config], final_us=s.p50_us)
            else:  # it ran once and does not now: no configuration to be called the best
                takes = job.rows[config].takes
                job.rows[config] = Row(config, s.outcome, takes=takes, reason=f"at the second look: {s.reason}")
        return True

    def _is_late(self) -> bool:
        return self._clock() >= self._deadline

    def _tick(self, job: _Job, text: str) -> None:
        if self._progress is not None:
            done = sum(self._outcomes.values())
            self._progress.update(done, self._total, f"{job.head.kernel}-{job.head.name}: {text}")


class _Compiling:
    """Renders and submits what is missing in a thread, AHEAD of who takes it with `next`, in that order."""

    def __init__(self, recorder: _Recorder, jobs: list[_Job]) -> None:
        self._recorder = recorder
        self._todo = [(job, config) for job in jobs for config in job.missing]
        self._ready: Queue[_Ahead | BaseException | None] = Queue(AHEAD)
        self._stop = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Compiling:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def next(self) -> _Ahead | None:
        """The next configuration, when its compile is under way; None if the time is over before."""
        while not self._recorder._is_late():
            try:
                found = self._ready.get(timeout=0.5)
            except Empty:
                continue
            if isinstance(found, BaseException):
                raise found
            return found
        return None

    def _run(self) -> None:
        try:
            for job, config in self._todo:
                p, target = job.points, self._recorder.target
                source = render(p.kernel, p.problem, config, target)
                self._put(_Ahead(job, config, self._recorder.compiler.submit(source, target.arch)))
                if self._stop.is_set():
                    return
        except BaseException as e:  # raised where the row is waited for
            self._put(e)

    def _put(self, what: _Ahead | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(what, timeout=0.2)
            except Full:
                continue
            return


def _why_other(there: Head, wanted: Head) -> str | None:
    """Why what is in a file cannot be continued, or counted as done, as `wanted`; None if it can."""
    names = ["problem", "grid", "default", "entries", "exhaustive", "folder_digest", "device", "environment"]
    if not there.complete:
        names.append("board")  # two boards of a kind differ by 2 %
    for name in names:
        mine, theirs = (_plain(getattr(h, name)) for h in (wanted, there))
        if mine != theirs:
            return f"was recorded with another {name}: {_shown(theirs, mine)} there, {_shown(mine, theirs)} here"
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _shown(mine: Any, other: Any) -> str:
    if isinstance(mine, dict) and isinstance(other, dict):
        return ", ".join(f"{k}={mine.get(k)!r}" for k in sorted({*mine, *other}) if mine.get(k) != other.get(k))
    return repr(mine)[:80]


# -- without a GPU


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one problem. compile_s: of one core. gpu_s: of timing, by the cost model."""

    file_name: str
    size: int
    configs: int
    held_out: bool
    exhaustive: bool
    compile_s: float
    gpu_s: float


def estimates(plan: RecordPlan, target: Target) -> Iterator[Estimate]:
    """What recording `plan` would take, where nothing is in the compile cache. Compiles one source a problem, to time
    it; what an earlier problem of the plan compiles too is not counted again.
    """
    seen: set[tuple[str, str, Any]] = set()
    for wanted in plan.problems:
        p = points(wanted, target)
        source = render(p.kernel, p.problem, p.default, target)
        if not seen:
            compile_cubin(source, target.arch)  # the first one loads NVRTC
        start = time.perf_counter()
        compile_cubin(source, target.arch)
        each_s = time.perf_counter() - start
        sources = {(wanted.kernel, str(static_fields(p.problem)), c) for c in p.configs}
        us = [us for us, _ in rank(p.kernel, p.problem, target, p.configs)]
        again = us[:RETIMED] if not wanted.sample else []
        gpu_s = PROBLEM_S + sum(map(_timing_s, us)) + ROUNDS * sum(map(_timing_s, again))
        yield Estimate(
            f"{wanted.kernel}-{wanted.name}.csv", p.size, len(p.configs), wanted.held_out, not wanted.sample,
            each_s * len(sources - seen), gpu_s,
        )  # fmt: skip
        seen |= sources


def _timing_s(us: float) -> float:
    return CHECK_S + (SAMPLES + WARM_UPS) * max(TARGET_MS / 1e3, us / 1e6)


# -- the command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("plan", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--out", type=click.Path(file_okay=False, path_type=Path), help="The folder of recordings.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=8.0, show_default=True,
              help="Stop after so long, wherever it is.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), help="Compile processes [default: all cores but one].")
@click.option("--anew", is_flag=True, help="Begin files again that another board, driver or source began.")
@click.option("--commit", default="", help="Of the sources, where git does not say.")
@click.option("--dry-run", is_flag=True, help="Count configurations and estimate the time; needs no GPU.")
def main(
    plan: Path, out: Path | None, minutes: float, jobs: int | None, anew: bool, commit: str, dry_run: bool
) -> None:
    """Record what every configuration of PLAN's problems takes on this GPU.

    \b
    Example:
      python -m kerngen.tuning.record data/recorded/h200.plan.json --dry-run
    """
    wanted = read_plan(plan)
    jobs = jobs or max(1, (os.cpu_count() or 2) - 1)
    if dry_run:
        _dry_run(wanted, jobs)
        return
    if out is None:
        raise UsageError("-o FOLDER says where the recordings go", hint="or --dry-run, which writes none")
    out.mkdir(parents=True, exist_ok=True)
    # The thread that renders must not keep the one waiting that feeds the GPU: four hand-overs a configuration.
    sys.setswitchinterval(0.0005)
    with GpuWorker() as gpu, CachedCompiler(jobs) as compiler, Reporter("record") as progress:
        done = record(
            wanted, out, gpu, compiler, minutes=minutes, anew=anew, commit=commit or _commit(), progress=progress
        )
    outcomes = ", ".join(f"{n} {name}" for name, n in sorted(done.outcomes.items())) or "nothing"
    print(f"recorded {outcomes} in {done.seconds:.0f} s; {len(done.complete)} of {len(wanted.problems)} files complete")
    for name, count in done.left.items():
        print(f"left: {name}: {count} configurations" + (" and the second look" if not count else ""))
    if done.left:
        print("the same command goes on there")
        sys.exit(1)


def _dry_run(plan: RecordPlan, jobs: int) -> None:
    found = []
    print(f"{'file':44} {'points':>8} {'configs':>8} {'compile s':>10} {'GPU s':>7}")
    for e in estimates(plan, Target.of(find_device(plan.device))):
        found.append(e)
        kind = " ".join(["held out"] * e.held_out + ["sample"] * (not e.exhaustive))
        print(f"{e.file_name:44} {e.size:8,} {e.configs:8,} {e.compile_s:10.1f} {e.gpu_s:7.1f}  {kind}", flush=True)
    compile_s, gpu_s = sum(e.compile_s for e in found), sum(e.gpu_s for e in found)
    large = [e for e in found if e.exhaustive]
    print(
        f"{len(found)} problems, {sum(e.configs for e in found):,} configurations; {len(large)} whole grids of "
        f"{min((e.configs for e in large), default=0)} or more; {compile_s:,.0f} s of compiling on a core like this "
        f"one, {compile_s / jobs:,.0f} s on {jobs}; {gpu_s:,.0f} s of the GPU beside"
    )


def _commit() -> str:
    """The checkout's, with a + where it differs from it; empty where git does not say."""
    where = Path(__file__).parent
    try:
        run = [
            subprocess.run(["git", *a], cwd=where, capture_output=True, text=True, check=True).stdout.strip()
            for a in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run[0] + ("+" if run[1] else "")


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m kerngen.tuning.record"))
