"""`kerngen bench ab`: configurations or patched sources beside each other, alone or in a whole step of a model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from kerngen.cli.keeping_options import keeping_options
from kerngen.cli.model_options import draft_option
from kerngen.cli.step_options import step_of, step_options
from kerngen.errors import LaunchError, UsageError
from kerngen.runtime.config import Keeping
from kerngen.system.cores import usable_cores

if TYPE_CHECKING:
    from kerngen.arch import Target
    from kerngen.compiler.cache import CachedCompiler
    from kerngen.timing.measure import Ceilings
    from kerngen.tuning.ab import Compared, InStep, Look, Place, Trial
    from kerngen.tuning.ab_plan import Entry
    from kerngen.tuning.ab_rows import Rows
    from kerngen.tuning.worker import GpuWorker
    from kerngen.workload.steps import Step
    from kerngen.workload.workload import Model

CHECK_S = 0.010  # of a dry run: a candidate beside its timing (load, check, capture)


@dataclass(frozen=True, slots=True)
class Where:
    """The step that candidates are timed in."""

    model: Model
    step: Step


@click.command()
@click.argument("what", metavar="[KERNEL|FILE.toml]...", nargs=-1)
@click.option("--case", "wanted", default="", help="Of KERNEL, only bench cases whose name contains this.")
@click.option("--problem", "problems", multiple=True, metavar="FIELD=VALUE,...", help="In place of the bench cases.")
@click.option("--config", "configs", multiple=True, metavar="FIELD=VALUE,...",
              help="Of KERNEL, a configuration over the default; repeatable.")  # fmt: skip
@click.option("--body", default="", metavar="NAME",
              help="Of KERNEL, the configurations of this body that the cost model expects most of.")  # fmt: skip
@click.option("--most", type=click.IntRange(1), default=24, show_default=True, help="So many of --body.")
@click.option("--random", "count", type=click.IntRange(0), default=None,
              help="So many valid configurations of each problem, of all bodies. Default with --step: 40.")  # fmt: skip
@click.option("--step", "model_name", default=None, metavar="MODEL",
              help="Time in a whole step of this model: its problems, or those of FILE.toml.")  # fmt: skip
@step_options
@draft_option
@keeping_options
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="Times through a step's problems.")
@click.option("--least", type=click.FloatRange(0, 0.5), default=0.001, show_default=True,
              help="Of the step's time, what must be gained for a candidate to stay in it.")  # fmt: skip
@click.option("--again", type=click.IntRange(0), default=8, show_default=True,
              help="So many of a problem's fastest are timed again together, with the default.")  # fmt: skip
@click.option("--csv", "folder", type=click.Path(file_okay=False, path_type=Path), default=None,
              help="Write a recording of each entry that has a name here: what fits and replays read.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Take what an earlier run on this very board saw of the same builds.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=None, help="Stop after so long.")
@click.option("--dry-run", is_flag=True, help="List the problems, and what the cost model expects. Needs no GPU.")
@click.option("--device", "device_name", default=None, help="Of a dry run. Default: the file's, else this machine's.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True,
              help="Seconds a look; the first at a step makes the model.")  # fmt: skip
@click.option("--db", "db_url", default=None, help="Tuning database to write. Default: $KERNGEN_DB or the user's.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@click.option("--seed", default=0, show_default=True, help="Of what is drawn, and of a grid's order.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ab(
    what: tuple[str, ...], wanted: str, problems: tuple[str, ...], configs: tuple[str, ...], body: str, most: int,
    count: int | None, model_name: str | None, phase: str, batch: int, context: int, tokens: int | None,
    draft: str | None, kept: Keeping, rounds: int, least: float, again: int, folder: Path | None, resume: bool,
    minutes: float | None, dry_run: bool, device_name: str | None, timeout_s: float, db_url: str | None,
    jobs: int | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Time configurations or patched sources of kernels beside the defaults, alone or in a whole step of a model.

    Files say what to compare (docs/tuning.md), or KERNEL and the options do. Each candidate is compared with the fp32
    reference before it is timed; one that is wrong, faults or waits for ever is a line that says so. Every look is
    written to the tuning database. Exit code 1 if a candidate is wrong or fails, or if the time ended before the work.

    Example: kerngen bench ab w4a16_gemm --problem n=43008,k=5376,num_tokens=32 --body wgmma_ws
    """
    from kerngen.arch import find_device
    from kerngen.tuning.ab import InStep
    from kerngen.tuning.ab_plan import read_plan

    plans = [read_plan(Path(w)) for w in what if w.endswith(".toml")]
    names = [w for w in what if not w.endswith(".toml")]
    where = where_of(plans, model_name, draft, kept, lambda: step_of(phase, batch, context, tokens))
    listed = [e for p in plans for e in p.entries]
    if plans and (names or configs or body or problems or wanted):
        raise UsageError(
            "FILE.toml says what to compare: KERNEL, --case, --problem, --config and --body do not go with it"
        )
    if not plans and where is None:
        listed = _of_kernel(names, wanted, problems, configs, body, most, count or 0)
    elif not plans and (configs or body or problems or wanted):
        raise UsageError("of a step --random draws what to compare; a file says it in full")

    def entries_on(target: Target) -> tuple[list[Entry], list[Place], Mapping[tuple[str, Any], bool]]:
        """What to compare, the places of the step that it is of, and which kernels the step asks apart for it."""
        if where is None:
            return listed, [], {}
        return _in_step(where, listed, target, names, 40 if count is None else count)

    device = device_name or next((p.device for p in plans if p.device), None)
    if dry_run:
        _dry_run(entries_on, _target(device), seed, as_json)
        return
    if folder is not None and any(not (e.name and (e.grid or e.sample)) for e in listed):
        raise UsageError("--csv records entries that have a name and a grid or a sample")
    end = monotonic() + 60 * minutes if minutes else None
    with ExitStack() as stack:
        from kerngen.tuning.worker import GpuWorker

        gpu: GpuWorker = stack.enter_context(GpuWorker(timeout_s))
        target = gpu.target()
        if folder is not None and device and not _is_of(target, meant := find_device(device)):
            raise UsageError(f"the file is for {meant} ({meant.arch}, {meant.num_sms} SMs); this is {target.device}")
        entries, places, fused = entries_on(target)
        run = _Run(stack, gpu, target, jobs or usable_cores(), db_url, as_json, folder, resume)
        run.begin(where)
        run.alone([e for e in entries if not run.is_recorded(e)], again, seed,
                  lambda: end is not None and monotonic() >= end)  # fmt: skip
        if where is not None and run.complete:
            by_call = {(c.entry.kernel.name, c.entry.problem): c.trials for c in run.done}
            for place in places:
                place.trials = by_call[place.called]
            run.in_step(InStep(where.model, where.step, places, gpu, run.rows, least, fused), where, rounds, end)
        run.conclude()


def where_of(plans: Sequence[Any], model_name: str | None, draft: str | None, kept: Keeping, step: Any) -> Where | None:
    """The step that the files say, or the options do; None of kernels alone. Raises UsageError."""
    from kerngen.workload.workload import find_model

    steps = [p.step for p in plans if p.step]
    if model_name is not None:
        return Where(find_model(model_name, draft, kept), step())
    if draft is not None:
        raise UsageError(f"--draft {draft} goes with --step MODEL", hint='of a file [step] says it: draft = "dflash"')
    if not steps:
        return None
    if len(steps) < len(plans) or any(s != steps[0] for s in steps):
        raise UsageError("the files are timed in different places", hint="one command for each step, or --step MODEL")
    said: dict[str, Any] = {"phase": "decode", "batch": 1, "context": 512, "tokens": None, "draft": None}
    said |= steps[0]
    model = find_model(said["model"], said["draft"], Keeping.of(said))
    return Where(model, step_of(said["phase"], said["batch"], said["context"], said["tokens"]))


def _of_kernel(
    names: Sequence[str], wanted: str, problems: Sequence[str], configs: Sequence[str], body: str, most: int, count: int
) -> list[Entry]:
    from kerngen.templates import find_kernel
    from kerngen.templates.kernel import parse_fields
    from kerngen.tuning.ab_plan import Entry, Written

    if len(names) != 1 or not (configs or body or count):
        raise UsageError("what to compare is not clear",
                         hint="FILE.toml, or one KERNEL with --config, --body or --random; or --step")  # fmt: skip
    kernel = find_kernel(names[0])
    found = [parse_fields(kernel.problem_type, text) for text in problems]
    if not (found := found or [c.problem for c in kernel.bench_cases(wanted)]):
        raise UsageError(f"no bench case of {kernel.name} contains {wanted!r}",
                         hint=f"there are: {', '.join(c.name for c in kernel.bench.BENCH_CASES)}")  # fmt: skip
    return [Entry(kernel, problem, tuple(map(Written, configs)), count, body, most) for problem in found]


def _in_step(
    where: Where, listed: Sequence[Entry], target: Target, names: Sequence[str], count: int
) -> tuple[list[Entry], list[Place], Mapping[tuple[str, Any], bool]]:
    """The entries, in the step's places, and `fused` as ab.places_of has it. Raises UsageError where the step does not
    launch one of them.
    """
    from kerngen.tuning.ab import apart_for, places_of, unasked_places

    fused = apart_for(where.model, where.step, target, [(e.kernel.name, e.problem) for e in listed])
    places = places_of(where.model, where.step, target, names, fused)
    if not listed:
        for place in places:
            place.entry = replace(place.entry, random=count)
        return [p.entry for p in places], places, fused
    by_call = {p.called: p for p in [*places, *unasked_places(where.model, where.step, target)]}
    found: list[Place] = []
    for entry in listed:
        if (known := by_call.get((entry.kernel.name, entry.problem))) is None:
            raise UsageError(f"the step does not launch {entry.about}",
                             hint=f"kerngen bench ab --step {where.model.name} --dry-run lists them")  # fmt: skip
        known.entry = entry
        found.append(known)
    return list(listed), found, fused


def _target(device: str | None) -> Target:
    from kerngen.arch import Target, find_device
    from kerngen.tuning.worker import present_arch

    if device is not None:
        return Target.of(find_device(device))
    if (arch := present_arch()) is None:
        raise UsageError("this machine has no GPU: say for which board", hint="--device H200")
    return Target.of(arch)


def _is_of(target: Target, meant: Any) -> bool:
    here = target.device
    return (meant.arch, meant.num_sms) == (here.arch, here.num_sms) and meant.name in here.name


def _dry_run(entries_on: Any, target: Target, seed: int, as_json: bool) -> None:
    from kerngen.templates.kernel import describe
    from kerngen.tuning.ab import SAMPLES, TARGET_MS
    from kerngen.tuning.plan import rank

    entries, places, _ = entries_on(target)
    launches = {p.called: p.launches for p in places}
    rows = []
    for entry in entries:
        candidates = entry.candidates(target, seed)
        us = [us for us, _ in rank(entry.kernel, entry.problem, target, [c.config for c in candidates])]
        gpu_s = sum(CHECK_S + SAMPLES * max(TARGET_MS / 1e3, t / 1e6) for t in us)
        rows.append({"kernel": entry.kernel.name, "problem": describe(entry.problem), "name": entry.name,
                     "launches": launches.get((entry.kernel.name, entry.problem), 0), "candidates": len(candidates),
                     "best_expected_us": us[0], "gpu_s": gpu_s})  # fmt: skip
    if as_json:
        click.echo(json.dumps({"device": target.device.name, "entries": rows}))
        return
    for r in rows:
        launched = f", {r['launches']} launches" if r["launches"] else ""
        named = f" ({r['name']})" if r["name"] else ""
        click.echo(f"{r['kernel']}{named} {r['problem']}{launched}: {r['candidates']} candidates, the best is expected "
                   f"to take {r['best_expected_us']:.1f} us")  # fmt: skip
    click.echo(f"{len(rows)} problems, {sum(r['candidates'] for r in rows):,} candidates, "
               f"{sum(r['gpu_s'] for r in rows):,.0f} s of {target.device.name} alone")  # fmt: skip


class _Run:
    """A command: what it holds, says and counts."""

    def __init__(
        self, stack: ExitStack, gpu: GpuWorker, target: Target, jobs: int, db_url: str | None, as_json: bool,
        folder: Path | None, resume: bool,
    ) -> None:  # fmt: skip
        from kerngen.compiler.cache import CachedCompiler
        from kerngen.tuning.ab_rows import Rows
        from kerngen.tuning_db import Store

        store = stack.enter_context(Store.open(db_url))
        self.compiler: CachedCompiler = stack.enter_context(CachedCompiler(jobs))
        self.rows: Rows = Rows(store, target, gpu, resume=resume)
        stack.callback(self.rows.flush)
        self.gpu, self.target, self.as_json = gpu, target, as_json
        self.folder, self._resume, self._commit = folder, resume, _commit()
        self.done: list[Compared] = []
        self.complete, self.failed = True, 0
        self.told: dict[str, Any] = {}

    def say(self, text: str) -> None:
        if not self.as_json:
            click.echo(text)

    def begin(self, where: Where | None) -> None:
        limits = self.gpu.ceilings()
        self.told = {"device": self.target.device.name, "read_gbps": limits.read_gbps,
                     "matmul_tflops": limits.matmul_tflops, "entries": []}  # fmt: skip
        place = "" if where is None else f"; {where.model.name}, {where.step.name}"
        self.say(f"{self.target.device}: reads {limits.read_gbps:.0f} GB/s, multiplies {limits.matmul_tflops:.0f} "
                 f"TFLOP/s{place}")  # fmt: skip
        self._limits: Ceilings = limits

    def is_recorded(self, entry: Entry) -> bool:
        """Whether its recording is whole, of such a board, and of today's sources."""
        from kerngen.templates.kernel import fields_of
        from kerngen.tuning.recorded import read_head

        if self.folder is None or not self._resume:
            return False
        path = self.folder / f"{entry.kernel.name}-{entry.name}.csv"
        if not path.is_file():
            return False
        now = {"problem": fields_of(entry.problem), "grid": entry.gridded(self.target).parts, "complete": True,
               "device": asdict(self.target.device), "folder_digest": entry.kernel.folder_digest}  # fmt: skip
        head = read_head(path)
        return {name: head.get(name) for name in now} == json.loads(json.dumps(now))

    def alone(self, entries: Sequence[Entry], again: int, seed: int, late: Any) -> None:
        from kerngen.tuning.ab import Alone, Compared

        shown: Entry | None = None
        for found in Alone(self.gpu, self.compiler, self.target, self.rows, again=again, seed=seed, late=late).run(
            entries
        ):
            if not isinstance(found, Compared):
                if found.entry is not shown:
                    shown = found.entry
                    self.say(shown.about)
                self.say(self._line(found))
                continue
            self._compared(found)
        left = len(entries) - sum(c.complete for c in self.done)
        if left:
            self.complete = False
            self.say(f"the time is over: {left} of {len(entries)} problems are left; the same command with --resume "
                     "goes on there")  # fmt: skip

    def _compared(self, found: Compared) -> None:
        from kerngen.tuning.ab_rows import recording
        from kerngen.tuning.recorded import write

        self.done.append(found)
        self.failed += sum(t.failed for t in found.trials)
        for line in _conclusion(found):
            self.say(line)
        self.told["entries"].append({
            "kernel": found.entry.kernel.name, "problem": asdict(found.entry.problem), "name": found.entry.name,
            "complete": found.complete, "trials": [self._as_json(found, t) for t in found.trials],
        })  # fmt: skip
        if self.folder is not None and found.complete:
            made = recording(found, self.target, self.rows, self._commit)
            write(self.folder / made.head.file_name, made)

    def _as_json(self, found: Compared, t: Trial) -> dict[str, Any]:
        seen, c = t.best, t.candidate
        return {
            "config": asdict(c.config), "name": c.name, "patched": bool(c.replace), "wrong": c.wrong,
            "same_code": t.same_code, "outcome": seen.outcome, "reason": seen.reason, "us": seen.p50_us,
            "p10_us": seen.p10_us, "p90_us": seen.p90_us, "ratio": found.ratio(t), "again": t.again is not None,
        }  # fmt: skip

    def _line(self, t: Trial) -> str:
        from kerngen.tuning.plan import rank

        problem = t.entry.problem
        expected = rank(t.entry.kernel, problem, self.target, [t.candidate.config])[0][0]
        told = f"expected {expected:9.1f} us  {t.candidate.label}"
        if (us := t.seen.p50_us) is None:
            return f"  {t.seen.in_a_line}  {told}"
        cost = t.entry.kernel.cost(problem)
        gbps, tflops = cost.bytes / us / 1e3, cost.flops / us / 1e6
        return (f"  {us:9.2f} us {gbps:6.0f} GB/s {gbps / self._limits.read_gbps:5.3f} {tflops:7.1f} TFLOP/s "
                f"{tflops / self._limits.matmul_tflops:5.3f}  {told}")  # fmt: skip

    def in_step(self, step: InStep, where: Where, rounds: int, end: float | None) -> None:
        from kerngen.tuning.worker import Observed

        step.begin()
        looks: list[Look] = []
        for left in range(rounds, 0, -1):
            began = monotonic()
            for look in step.round(None if end is None else began + (end - began) / left):
                if not looks or look.place is not looks[-1].place:
                    self.say(look.place.about)
                self.say(_look_line(look))
                looks.append(look)
        self.failed += sum(isinstance(look.seen, Observed) for look in looks)
        whole = step.against_defaults()
        if isinstance(whole, Observed):
            raise LaunchError(f"the step does not run with all that was kept: {whole.reason}")
        for trial in step.kept.values():
            self.say(f"kept: {trial.entry.about}: {trial.candidate.label}")
        if not step.complete:
            self.complete = False
            self.say("the time is over: of each problem those were timed in the step that are fastest alone")
        self.say(f"{where.step.name}: {whole.base_us / 1e3:.3f} ms by default, with what was kept {whole.median:.4f} "
                 f"+- {whole.spread:.4f} of it")  # fmt: skip
        self.told["step"] = {
            "model": where.model.name, "step": where.step.name, "base_us": whole.base_us, "ratio": whole.median,
            "spread": whole.spread, "looks": [_look_as_json(look) for look in looks],
            "kept": [{"kernel": t.entry.kernel.name, "problem": asdict(t.entry.problem),
                      "config": asdict(t.candidate.config), "name": t.candidate.name} for t in step.kept.values()],
        }  # fmt: skip

    def conclude(self) -> None:
        if self.as_json:
            click.echo(json.dumps(self.told))
        if self.failed:
            click.echo(f"{self.failed} candidates are wrong or failed", err=True)
        if self.failed or not self.complete:
            raise click.exceptions.Exit(1)


def _conclusion(found: Compared) -> list[str]:
    """The second look, the fastest first, beside the default; where there was none, the best of the first."""
    if not found.trials or (base := found.trials[0]).us is None:
        return []
    if base.again is None:
        best = min((t for t in found.trials if t.us is not None), key=lambda t: t.us or 0.0)
        return [f"  best: {found.ratio(best):.3f} of the default, {best.candidate.label}"]
    lines = []
    for t in sorted((t for t in found.trials if t.again is not None), key=lambda t: t.us or 0.0):
        assert t.again is not None
        if (us := t.again.p50_us) is None:
            lines.append(f"    {t.again.in_a_line}  {t.candidate.label}")
            continue
        known = "  (its results are known to be wrong)" if t.candidate.wrong else ""
        same = "  (the same machine code as without the patch)" if t.same_code else ""
        what = "the default" if t is base else t.candidate.label
        lines.append(f"    {us:9.3f} us {100 * ((found.ratio(t) or 1.0) - 1):+6.2f} %  {t.again.p10_us:.3f}-"
                     f"{t.again.p90_us:.3f}  {what}{known}{same}")  # fmt: skip
    return ["  together, by replays in turn:", *lines]


def _look_line(look: Look) -> str:
    from kerngen.tuning.worker import Observed

    label = look.trial.candidate.label
    if isinstance(look.seen, Observed):
        return f"  {look.seen.in_a_line}  {label}"
    if look.kept:
        return f"  kept: {look.seen.median:.4f} +- {look.seen.spread:.4f}  {label}"
    return f"  {look.seen.median:.4f}  {label}"


def _look_as_json(look: Look) -> dict[str, Any]:
    c = look.trial.candidate
    return {"kernel": look.place.entry.kernel.name, "problem": asdict(look.place.entry.problem),
            "config": asdict(c.config), "name": c.name, "kept": look.kept, "seen": asdict(look.seen)}  # fmt: skip


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
