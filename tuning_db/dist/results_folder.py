"""Writes a database as a folder of results files (results_file.py), and reads such a folder into a database.

Text has no machine code: it is rendered and compiled anew, with the NVRTC that is here. A trial is taken over if
today's kernel renders the source that was timed, or the body has the revision today that it had then. Its figures are rounded, so it is an observation of its own beside the
one that it was written from; winners are chosen from these, and have to be those that the text says won.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kerngen.arch import Arch, Device, Target, find_arch
from kerngen.compiler.compile import Cubin
from kerngen.compiler.render import source_of
from kerngen.compiler.source_digest import source_digest_of
from kerngen.errors import DatabaseError, KerngenError
from kerngen.system.files import file_name, read_regular
from kerngen.system.interrupts import heed, result_of
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import Kernel, fields_of, filled, static_fields, trimmed
from kerngen.tuning_db.dist import results_file
from kerngen.tuning_db.dist.export import Selection, trials_of
from kerngen.tuning_db.dist.fields_text import PREDICTED_DIGITS, SOURCE_DIGITS, STEP_DIGITS, rounded, stated
from kerngen.tuning_db.dist.former_results import parse_any
from kerngen.tuning_db.dist.results_file import Config, Model, Point, Problem, ResultsFile, Run, StepTrial, Trial
from kerngen.tuning_db.read.canonical_fields import (
    canonical_fields_of,
    device_from,
    filed_device,
    filed_kernel,
    finer,
    named_kernel,
    round_up,
)
from kerngen.tuning_db.read.freshness import is_filed_by, notes_of, revision_noted
from kerngen.tuning_db.read.ids import ProblemKey, canonical, digest, problem_key
from kerngen.tuning_db.read.values import PROVENANCES, TIMED, Build, Measurement, Observation, StepKey, Winner
from kerngen.tuning_db.store.rows import version_of
from kerngen.tuning_db.store.store import Store

if TYPE_CHECKING:
    from kerngen.compiler.cache import CachedCompiler

log = logging.getLogger(__name__)
_T = TypeVar("_T")

SUFFIX = ".txt"
NONE_COMPILED = (0, 0)  # an NVRTC's version, of what is carried: its text says of none
MAX_BYTES = 64 * 1024 * 1024  # the largest file that is shipped has less than 1 MB


def dump(sources: Sequence[Store], selection: Selection) -> dict[str, str]:
    """The selected winners and their rivals as text, by path: BOARD/KERNEL.txt. The first source of a point counts."""
    files: dict[str, str] = {}
    for file in results_of(sources, selection):
        path = f"{file_name(file.board)}/{file_name(file.kernel)}{SUFFIX}"
        if path in files:  # a profile and a probe of a board; or names that make one file name
            told_apart = digest([file.kernel, file.device])[:8]
            path = f"{file_name(file.board)}/{file_name(file.kernel)}-{told_apart}{SUFFIX}"
        files[path] = results_file.dump(file)
    return files


def results_of(sources: Sequence[Store], selection: Selection, *, rivals: bool = True) -> list[ResultsFile]:
    """The selected winners as results files, one for each kernel and board. The same rows give the same files.

    rivals: with what they won against, and what else was tried. False is for predictions, of which the model would say
    the same again: winners alone, and none that are stale. The first source of a point counts.
    """
    chosen: dict[tuple[str, Device], dict[str, tuple[Store, Winner]]] = {}
    for source in sources:
        for w in source.winners():
            if selection.has(w) and (rivals or not w.stale):
                chosen.setdefault((w.kernel, w.device), {}).setdefault(w.problem.id, (source, w))
    ordered = sorted(chosen, key=lambda key: (key[0], canonical(filed_device(key[1]))))
    files = [_results(kernel, device, list(chosen[kernel, device].values()), rivals) for kernel, device in ordered]
    return [file for file in files if file.problems]


class _Row(NamedTuple):
    """A winner with the trials that are told of it, each with its build and the configuration as a file has it. key: the
    problem as it is filed.
    """

    winner: Winner
    key: ProblemKey
    trials: list[tuple[Measurement, Build, Config]]


def _results(kernel: str, device: Device, found: Sequence[tuple[Store, Winner]], rivals: bool) -> ResultsFile:
    groups: dict[tuple[int, str], list[tuple[Store, Winner]]] = {}
    for source, w in found:
        groups.setdefault((id(source), w.problem.static_key), []).append((source, w))
    steps: dict[str, StepKey] = {}
    for source in {id(source): source for source, _ in found}.values():
        steps |= source.steps()
    rows = [row for members in groups.values() for row in _rows(members, steps, rivals)]
    head = _Head(rows, steps)
    problems: dict[str, list[_Row]] = {}
    for row in rows:
        problems.setdefault(canonical(row.key.static), []).append(row)
    dynamic = canonical_fields_of(kernel).dynamic if kernel in kernel_names() else "dynamic"
    is_dynamic = any(row.key.dynamic is not None for row in rows)
    return ResultsFile(
        filed_kernel(kernel), device.arch, device.name, filed_device(device), dynamic if is_dynamic else "",
        head.runs, head.models, head.carried, head.steps, head.bases,
        tuple(_problem(problems[static], head, dynamic, rivals) for static in sorted(problems)),
    )  # fmt: skip


def _rows(
    members: Sequence[tuple[Store, Winner]], known_steps: Container[str | None], rivals: bool
) -> Iterator[_Row]:
    """Of one source's winners with the same compiled-in fields, on one board."""
    source, first = members[0]
    winners = [w for _, w in members]
    static_key = first.problem.static_key
    builds, notes = source.builds(static_key), source.digests(static_key)  # those that can be read
    defaults = canonical_fields_of(first.kernel).config
    kept = trials_of(source, first.kernel, static_key, winners, brief=True) if rivals else set()
    observed: dict[str, list[Observation]] = {}
    for o in source.measurements(first.kernel, static_key=static_key, arch=first.device.arch, device=first.device):
        observed.setdefault(o.measurement.problem.id, []).append(o)
    for w in winners:
        if w.build_id not in builds:
            log.warning("%s: winner %s rests on a build that cannot be read; skipped", source.where, w.id)
            continue
        trials = []
        for o in observed.get(w.problem.id, ()):
            m = o.measurement
            is_kept = o.id in kept if rivals else (m.build_id, m.p50_us) == (w.build_id, w.latency_us)
            if not is_kept or m.outcome not in ("ok", "wrong_result") or (m.build_id or "") not in builds:
                continue
            # Where something was measured, predictions decide nothing, and would only be read as if they did. Nor does
            # a trial in a step that the database does not know (any more).
            if m.provenance == w.provenance and (m.stage != "step" or m.outcome != "ok" or m.step_id in known_steps):
                build = builds[m.build_id or ""]
                timed = m.tags.get(TIMED, build.source_sha)[:SOURCE_DIGITS]
                config = Config(trimmed(build.config, defaults), timed, revision_noted(notes.get(build.id, ())))
                trials.append((m, build, config))
        yield _Row(w, w.problem.filed(), trials)


class _Head:
    """What the head of a file names, each with its index: runs, models, what was carried, steps, bases.

    Runs and bases are in the order of their first trial, the others in that of what they are.
    """

    def __init__(self, rows: Sequence[_Row], steps: Mapping[str, StepKey]) -> None:
        runs: dict[tuple[str, tuple[int, int], str], Run] = {}
        bases: dict[str, str] = {}  # when each was first tried
        models, carried, named = set[Model](), set[str](), set[str]()
        for m, build, _ in (trial for row in rows for trial in row.trials):
            if m.provenance == "predicted":
                models.add(Model(m.model, build.nvrtc))
                continue
            if m.provenance == "carried":
                carried.add(m.reason)
                continue
            key = _run_key(m, build)
            if key not in runs or m.at < runs[key].at:
                runs[key] = Run(m.run, m.at, key[1], m.environment)
            if m.stage == "step" and m.step_id is not None and m.step_id in steps:
                named.add(m.step_id)
                if m.base_id is not None:
                    bases[m.base_id] = min(bases.get(m.base_id, m.at), m.at)
        self._run = _indices(runs, lambda key: (runs[key].at, key))
        self._model = _indices(models, lambda model: (model.name, model.nvrtc))
        self._carried = _indices(carried, str)
        self._step = _indices(named, lambda id: (steps[id].name, id))
        self._base = _indices(bases, lambda id: (bases[id], id))
        self.runs, self.models = tuple(runs[key] for key in self._run), tuple(self._model)
        self.carried = tuple(self._carried)
        self.steps, self.bases = tuple(steps[id] for id in self._step), tuple(self._base)

    def who(self, m: Measurement, build: Build) -> dict[str, Any]:
        """The fields of a Trial that say who observed it, and when."""
        if m.provenance == "predicted":
            return {"model": self._model[Model(m.model, build.nvrtc)]}
        if m.provenance == "carried":
            return {"carried": self._carried[m.reason]}
        run = self._run[_run_key(m, build)]
        try:
            after = (datetime.fromisoformat(m.at) - datetime.fromisoformat(self.runs[run].at)).total_seconds()
        except (ValueError, TypeError) as e:
            raise DatabaseError(
                f"a trial of run {m.run!r:.40} says when it was as {m.at!r:.40}, which is no time"
            ) from e
        return {"run": run, "after": round(after, 2)}

    def in_step(self, m: Measurement) -> StepTrial | None:
        if m.stage != "step" or m.step_us is None or m.base_step_us is None:
            return None
        step, base = self._step[m.step_id or ""], self._base[m.base_id or ""]
        return StepTrial(step, rounded(m.step_us, STEP_DIGITS), rounded(m.base_step_us, STEP_DIGITS), base)


def _run_key(m: Measurement, build: Build) -> tuple[str, tuple[int, int], str]:
    told = m.tags.get("nvrtc")  # where it came out of text itself, and was compiled anew
    return m.run, version_of(told) if isinstance(told, str) else build.nvrtc, canonical(m.environment)


def _indices(named: Iterable[_T], order: Callable[[_T], Any]) -> dict[_T, int]:
    return {name: i for i, name in enumerate(sorted(named, key=order))}


def _problem(rows: Sequence[_Row], head: _Head, dynamic: str, rivals: bool) -> Problem:
    """All rows with the same compiled-in fields, which are of one kernel."""
    of = canonical_fields_of(rows[0].winner.kernel)
    configs = {_config_key(config): config for row in rows for *_, config in row.trials}
    index = {key: i for i, key in enumerate(sorted(configs))}
    points = []
    for w, key, observed in rows:
        trials = dict.fromkeys(_trial(w, m, build, index[_config_key(config)], head, rivals)
                               for m, build, config in observed)  # fmt: skip
        fields = stated(key.static, key.runtime, dynamic, key.dynamic)
        is_said = filled(fields, of.fields) == filled(key.fields, of.fields)
        refused = {o: n for o, n in w.why.get("refused", {}).items() if rivals and o != "wrong_result"}
        points.append(Point(key.runtime, key.dynamic, tuple(sorted(trials, key=_order)),
                            None if is_said else key.fields, refused))  # fmt: skip
    points.sort(key=lambda p: ([(n, str(type(v)), v) for n, v in sorted(p.runtime.items())], p.dynamic or 0))
    return Problem(rows[0].key.static, tuple(configs[key] for key in index), tuple(points))


def _config_key(config: Config) -> tuple[str, str, int]:
    return canonical(config.fields), config.source, config.revision


def _order(t: Trial) -> tuple[Any, ...]:
    step = (-1, 0.0) if t.in_step is None else (t.in_step.step, t.in_step.step_us)
    return (not t.won, t.us is None, t.us or 0.0, t.config, *step, t.run or 0, t.model or 0, t.after)


def _trial(w: Winner, m: Measurement, build: Build, config: int, head: _Head, rivals: bool) -> Trial:
    known = head.who(m, build)
    if m.outcome != "ok":
        return Trial(config, None, reason=m.reason, **known)
    if m.provenance == "measured":
        for name in ("p10_us", "p90_us", "min_us", "error_abs", "error_rel"):
            value: float | None = getattr(m, name)
            known[name] = None if value is None else rounded(value)
        known |= {"stage": m.stage, "samples": m.samples, "in_step": head.in_step(m)}
    us = None if m.p50_us is None else rounded(m.p50_us) if rivals else rounded(m.p50_us, PREDICTED_DIGITS)
    return Trial(config, us, m.build_id == w.build_id, **known)


# ---- and back


@dataclass(slots=True)
class Rebuilt:
    """What became of text. stale: trials left out, as their body has another revision today. faults: in words."""

    trials: int = 0
    winners: int = 0
    stale: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, other: Rebuilt) -> None:
        self.trials += other.trials
        self.winners += other.winners
        self.stale += other.stale
        self.faults += other.faults


@dataclass(frozen=True, slots=True)
class _Case:
    """A trial of a results file, as today's kernels understand it."""

    file: ResultsFile
    trial: Trial
    key: ProblemKey
    kernel: Kernel
    device: Device
    config: Any
    source: str
    timed: str  # the first digits of the source that was timed, "" where that is `source`
    static: Mapping[str, Any]
    closure: str  # of the kernel

    @property
    def observer(self) -> Run | Model | str:
        """Who observed it; of what is carried, what it was chosen by."""
        if self.trial.carried is not None:
            return self.file.carried[self.trial.carried]
        return self.file.models[self.trial.model or 0] if self.trial.run is None else self.file.runs[self.trial.run]

    @property
    def provenance(self) -> str:
        return {Run: "measured", Model: "predicted"}.get(type(self.observer), "carried")

    @property
    def nvrtc(self) -> tuple[int, int] | None:
        """What compiled what was observed; None where a text does not tell."""
        return NONE_COMPILED if isinstance(self.observer, str) else self.observer.nvrtc

    def __str__(self) -> str:
        at = "" if self.key.dynamic is None else f" {self.file.dynamic}={self.key.dynamic}"
        return f"{self.kernel.name} on {self.file.board}{at}: {fields_of(self.config)}"


def build(
    files: Sequence[ResultsFile],
    into: Store,
    compiler: CachedCompiler | None,
    say: Callable[[int, int, str], None] = lambda done, total, what: None,
    wanted: Callable[[ProblemKey], bool] = lambda key: True,
) -> Rebuilt:
    """Fill `into` with what `files` state, compiled by `compiler`. say: is told (done, of how many, what).

    compiler: None compiles nothing. Builds are then known by their sources alone, and whoever runs one compiles it.
    wanted: which problems.
    Raises UnknownName for a kernel that is not installed, CompileError, DatabaseError.
    """
    done = Rebuilt()
    cases = [case for file in files for case in _cases(file, done, wanted)]
    images: dict[tuple[str, str], Future[Cubin]] = {}
    for case in cases:
        what = case.source, case.file.arch
        if compiler is not None and what not in images:
            images[what] = compiler.submit(case.source, find_arch(case.file.arch))
    built: dict[tuple[Any, ...], str] = {}
    observed: list[Measurement] = []
    with into.transaction():
        for i, case in enumerate(cases):
            say(i, len(cases), case.kernel.name)
            image = images.get((case.source, case.file.arch))
            heed()
            observed.append(_record(case, into, None if image is None else result_of(image), built))
        into.add_measurements(observed)
        done.trials = len(observed)
        _choose(cases, into, done)
    return done


def _cases(file: ResultsFile, done: Rebuilt, wanted: Callable[[ProblemKey], bool]) -> Iterator[_Case]:
    kernel, arch, device = find_kernel(named_kernel(file.kernel)), find_arch(file.arch), _device(file)
    of, closure = canonical_fields_of(file.kernel), source_digest_of(kernel)
    last, rendered = None, dict[int, _Rendered | None]()  # of a problem, by index
    for problem, point in file.points():
        fields = file.fields(problem, point)
        if problem is not last:
            last, rendered = problem, {}
        try:
            asked: Any = kernel.problem_type(**filled(fields, of.fields))
        except (KerngenError, TypeError) as e:
            done.faults.append(f"{file.kernel} on {file.board}: {fields} is no problem of it: {e}")
            continue
        key = problem_key(kernel, asked)
        if not _is_filed_as(key, asked, problem.static, point):
            done.faults.append(f"{file.kernel} on {file.board}: {fields} is filed otherwise today")
            continue
        if not wanted(key):
            continue
        for trial in point.trials:
            told = problem.configs[trial.config]
            if trial.config not in rendered:
                try:
                    config = kernel.config_type(**filled(told.fields, of.config))
                    rendered[trial.config] = _rendered(kernel, asked, config, arch, told)
                except (KerngenError, TypeError):
                    rendered[trial.config] = None
            if (made := rendered[trial.config]) is None:
                done.stale.append(f"{file.kernel} on {file.board}: {fields}: {dict(told.fields)}")
            elif not trial.is_wrong or not made.timed:  # a wrong result of another source says nothing of today's
                yield _Case(file, trial, key, kernel, device, *made, static_fields(asked), closure)


def _is_filed_as(key: ProblemKey, asked: Any, static: Mapping[str, Any], point: Point) -> bool:
    """Whether this is the problem's place, or was before it had finer buckets (Problem.FINER)."""
    filed = key.filed()
    if (filed.static, filed.dynamic) != (static, point.dynamic):
        return False
    coarse = {n: round_up(v) if n in finer(asked) else v for n, v in key.runtime.items()}
    return point.runtime in (filed.runtime, replace(key, runtime=coarse).filed().runtime)


class _Rendered(NamedTuple):
    config: Any
    source: str
    timed: str  # as _Case has it


def _rendered(kernel: Kernel, problem: Any, config: Any, arch: Arch, told: Config) -> _Rendered | None:
    """None where what was timed does not hold any more. Raises KerngenError where nothing can be rendered."""
    source = source_of(kernel, problem, config, arch)
    if is_filed_by(source, told.source):
        return _Rendered(config, source, "")
    return _Rendered(config, source, told.source) if kernel.body(config, arch).revision == told.revision else None


def _device(file: ResultsFile) -> Device:
    try:
        return device_from(file.device)
    except TypeError as e:
        raise DatabaseError(f"the board {file.board} of {file.kernel} lacks figures: {e}") from e


def _record(case: _Case, into: Store, image: Cubin | None, known_builds: dict[tuple[Any, ...], str]) -> Measurement:
    """The trial, with its build recorded. known_builds: those that are already."""
    trial, file, observer = case.trial, case.file, case.observer
    what = (case.source, case.config, *case.static.values(), file.arch, case.nvrtc if image is None else None,
            trial.won)  # fmt: skip
    if (built := known_builds.get(what)) is None:
        beside: dict[str, Any] = {"keep_image": trial.won}
        if image is None:
            beside = {"arch": find_arch(file.arch), "nvrtc": case.nvrtc, "status": "uncompiled"}
        built = known_builds[what] = into.add_build(
            image, case.kernel.name, case.source, fields_of(case.config), dict(case.static),
            notes=notes_of(case.closure, case.kernel, fields_of(case.config), file.arch), **beside,
        )  # fmt: skip
    known: dict[str, Any] = {"tags": {TIMED: case.timed} if case.timed else {}, "reason": trial.reason}
    if (tried := trial.in_step) is not None:
        known |= {"step_id": into.add_step(file.steps[tried.step]), "step_us": tried.step_us,
                  "base_step_us": tried.base_step_us, "base_id": file.bases[tried.base]}  # fmt: skip
    if isinstance(observer, Model):
        known["model"] = observer.name
    elif isinstance(observer, str):
        known["reason"] = observer
    else:
        at = datetime.fromisoformat(observer.at) + timedelta(seconds=trial.after)
        known |= {"environment": dict(observer.environment), "run": observer.id,
                  "at": at.isoformat(timespec="microseconds")}  # fmt: skip
        if image is not None and observer.nvrtc != image.nvrtc:  # the same source was timed, compiled by another NVRTC
            known["tags"]["nvrtc"] = "{}.{}".format(*observer.nvrtc)
    return Measurement(
        case.key, file.arch, case.device, fields_of(case.config), built,
        "wrong_result" if trial.is_wrong else "ok", case.provenance, stage=trial.stage, p50_us=trial.us, p10_us=trial.p10_us, p90_us=trial.p90_us,
        min_us=trial.min_us, samples=trial.samples, error_abs=trial.error_abs, error_rel=trial.error_rel, **known,
    )  # fmt: skip


def _choose(cases: Sequence[_Case], into: Store, done: Rebuilt) -> None:
    """Winners, by the policy. What a text says won has to win, but where another is known better: by a measurement."""
    chosen: dict[tuple[str, str, Device], dict[str, Winner]] = {}
    for case in cases:
        key = (case.kernel.name, case.key.static_key, case.device)
        if key not in chosen:
            target = Target(find_arch(case.file.arch), key[2])
            chosen[key] = {w.problem.id: w for w in into.recompute_winners(case.kernel, key[1], target)}
            done.winners += len(chosen[key])
    said: Counter[tuple[str, str]] = Counter()
    for case in cases:
        winner = chosen[case.kernel.name, case.key.static_key, case.device].get(case.key.id)
        is_won = winner is not None and winner.config == fields_of(case.config)
        outranked = winner is not None and _is_better(winner.provenance, case.provenance)
        if case.trial.won and not is_won and not outranked:
            said[case.key.id, case.file.board] += 1
            if said[case.key.id, case.file.board] == 1:
                what = "nothing" if winner is None else winner.config
                done.faults.append(f"{case} is said to win, and {what} does")


def _is_better(provenance: str, other: str) -> bool:
    return PROVENANCES.index(provenance) < PROVENANCES.index(other)


def read(paths: Sequence[Path]) -> list[ResultsFile]:
    """The results files among `paths`, and in folders all that ends in .txt. Raises DatabaseError, OSError."""
    names = [f for path in paths for f in (sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path])]
    files = []
    for name in names:
        try:
            files.append(parse_any(read_regular(name, MAX_BYTES).decode(), os.fspath(name)))
        except UnicodeDecodeError as e:
            raise DatabaseError(f"{name} is no text: {e}") from e
    if not files:
        raise DatabaseError(
            f"there is no {SUFFIX} file in {', '.join(map(str, paths))}", hint="kerngen db dump -o FOLDER"
        )
    return files
