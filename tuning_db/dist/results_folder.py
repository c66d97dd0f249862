"""Writes a database as a folder of results files (results_file.py), and reads such a folder into a database.

Text has no machine code: it is rendered and compiled anew, with the NVRTC that is here. A trial is taken over if
today's kernel renders the source that was timed. Its figures are rounded, so it is an observation of its own beside the
one that it was written from; winners are chosen from these, and have to be those that the text says won.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerngen.arch import Device, Target, find_arch
from kerngen.compiler.source_digest import source_digest_of
from kerngen.compiler.compile import Cubin
from kerngen.errors import DatabaseError, KerngenError
from kerngen.system.files import read_regular
from kerngen.system.interrupts import heed, result_of
from kerngen.compiler.render import source_of
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import Kernel, fields_of, filled, static_fields, trimmed
from kerngen.tuning_db.store.rows import version_of
from kerngen.tuning_db.store.store import Store
from kerngen.tuning_db.read.ids import ProblemKey, canonical, digest, problem_key
from kerngen.tuning_db.read.canonical_fields import device_from, filed_device, filed_kernel, canonical_fields_of, named_kernel
from kerngen.tuning_db.read.freshness import is_filed_by, notes_of
from kerngen.tuning_db.read.values import Build, Measurement, Observation, StepKey, Winner
from kerngen.tuning_db.dist import prediction_file
from kerngen.tuning_db.dist import results_file
from kerngen.tuning_db.dist.export import Selection, trials_of
from kerngen.tuning_db.dist.results_file import Cell, StepTrial, Point, Run, ResultsFile, Step, Trial
from kerngen.tuning_db.dist.fields_text import SOURCE_DIGITS, rounded, stated

if TYPE_CHECKING:
    from kerngen.compiler.cache import CachedCompiler

log = logging.getLogger(__name__)

SUFFIX = ".txt"
MAX_SHEET_BYTES = 64 * 1024 * 1024  # the largest that is shipped has less than 1 MB
Told = ResultsFile | prediction_file.PredictionFile


def dump(sources: Sequence[Store], selection: Selection) -> dict[str, str]:
    """The selected winners and their rivals as text, by path: BOARD/KERNEL.txt. The first source of a point counts."""
    chosen: dict[tuple[str, Device], dict[str, tuple[Store, Winner]]] = {}
    for source in sources:
        for w in source.winners():
            if selection.has(w):
                chosen.setdefault((w.kernel, w.device), {}).setdefault(w.problem.id, (source, w))
    files: dict[str, str] = {}
    ordered = sorted(chosen.items(), key=lambda item: (item[0][0], canonical(filed_device(item[0][1]))))
    for (kernel, device), found in ordered:
        filed = filed_kernel(kernel)
        path = f"{_file_name(device.name)}/{filed}{SUFFIX}"
        if path in files:  # a profile and a probe of one board are two sheets
            path = f"{_file_name(device.name)}/{filed}-{digest(filed_device(device))[:8]}{SUFFIX}"
        if (sheet := _sheet(kernel, device, list(found.values()))).cells:
            files[path] = results_file.dump(sheet)
    return files


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


def _sheet(kernel: str, device: Device, found: Sequence[tuple[Store, Winner]]) -> ResultsFile:
    dynamic = canonical_fields_of(kernel).dynamic if kernel in kernel_names() else "dynamic"
    rows: dict[str, tuple[Winner, list[Observation], dict[str, Build]]] = {}
    groups: dict[tuple[int, str], list[tuple[Store, Winner]]] = {}
    for source, w in found:
        groups.setdefault((id(source), w.problem.static_key), []).append((source, w))
    for (_, static_key), members in groups.items():
        source, winners = members[0][0], [w for _, w in members]
        kept, builds = trials_of(source, kernel, static_key, winners, brief=True), source.builds(static_key)
        everything = source.measurements(kernel, static_key=static_key, arch=device.arch, device=device)
        for w in winners:
            here = [o for o in everything if o.measurement.problem.id == w.problem.id]
            here = [o for o in here if o.measurement.build_id in builds]  # the others' cannot be read
            told = [o for o in here if o.id in kept and o.measurement.outcome in ("ok", "wrong_result")]
            if w.build_id in builds:
                rows[w.problem.id] = w, _of_one_kind(told, w), builds
            else:
                log.warning("%s: winner %s rests on a build that cannot be read; skipped", source.where, w.id)
    runs, looks = (
        _Runs(rows.values()),
        _StepTrials(rows.values(), {id: s for source, _ in found for id, s in _steps(source)}),
    )
    cells: dict[str, tuple[ProblemKey, list[Point]]] = {}
    for w, observations, builds in rows.values():
        key = w.problem.filed()
        cells.setdefault(w.problem.cell, (key, []))[1].append(_point(w, observations, builds, runs, looks, dynamic))
    ordered = sorted(cells.values(), key=lambda c: (canonical(c[0].static), canonical(c[0].runtime)))
    return ResultsFile(
        filed_kernel(kernel), device.arch, device.name, filed_device(device),
        dynamic if _is_dynamic(ordered) else "", runs.sheets,
        tuple(Cell(key.static, key.runtime, tuple(sorted(points, key=lambda p: p.dynamic or 0)))
              for key, points in ordered),
        looks.steps, looks.bases,
    )  # fmt: skip


def _is_dynamic(cells: Sequence[tuple[ProblemKey, list[Point]]]) -> bool:
    return any(p.dynamic is not None for _, points in cells for p in points)


def _of_one_kind(observations: Sequence[Observation], w: Winner) -> list[Observation]:
    """Where something was measured, predictions decide nothing, and would only be read as if they did."""
    return [o for o in observations if o.measurement.provenance == w.provenance]


class _Runs:
    """The runs that a sheet names, in order of their first trial in it."""

    def __init__(self, rows: Any) -> None:
        first: dict[tuple[str, tuple[int, int], str], tuple[str, Mapping[str, Any]]] = {}
        for _, observations, builds in rows:
            for o in observations:
                m = o.measurement
                if m.provenance == "measured":
                    key = self._key(m, builds)
                    first[key] = min(first.get(key, (m.at, m.environment)), (m.at, m.environment), key=lambda v: v[0])
        ordered = sorted(first, key=lambda key: (first[key][0], key))
        self._index = {key: i for i, key in enumerate(ordered)}
        self.sheets = tuple(Run(key[0], first[key][0], key[1], first[key][1]) for key in ordered)

    @staticmethod
    def _key(m: Measurement, builds: Mapping[str, Build]) -> tuple[str, tuple[int, int], str]:
        told = m.tags.get("nvrtc")  # where it came out of text itself, and was compiled anew
        version = version_of(told) if isinstance(told, str) else builds[m.build_id or ""].nvrtc
        return m.run, version, canonical(m.environment)

    def of(self, m: Measurement, builds: Mapping[str, Build]) -> tuple[int, float]:
        index = self._index[self._key(m, builds)]
        try:
            after = (datetime.fromisoformat(m.at) - datetime.fromisoformat(self.sheets[index].at)).total_seconds()
        except (ValueError, TypeError) as e:
            raise DatabaseError(
                f"a trial of run {m.run!r:.40} says when it was as {m.at!r:.40}, which is no time"
            ) from e
        return index, round(after, 2)


class _StepTrials:
    """The steps and bases that a sheet names: the steps in order of what they are, the bases of their first look."""

    def __init__(self, rows: Any, known: Mapping[str, StepKey]) -> None:
        told = [o.measurement for _, observations, _ in rows for o in observations if o.measurement.stage == "step"]
        keys = {m.step_id: known[m.step_id] for m in told if m.step_id in known}
        ordered = sorted(keys, key=lambda id: (keys[id].name, id))
        self._step = {id: i for i, id in enumerate(ordered)}
        self.steps = tuple(_told_step(keys[id]) for id in ordered)
        first: dict[str, str] = {}
        for m in told:
            if m.base_id is not None and m.step_id in keys:
                first[m.base_id] = min(first.get(m.base_id, m.at), m.at)
        self.bases = tuple(sorted(first, key=lambda id: (first[id], id)))
        self._base = {id: i for i, id in enumerate(self.bases)}

    def has(self, m: Measurement) -> bool:
        """False for what was tried in a step that the database does not know (any more): it decides nothing."""
        return m.stage != "step" or m.outcome != "ok" or m.step_id in self._step

    def of(self, m: Measurement) -> StepTrial | None:
        if m.stage != "step" or m.step_us is None or m.base_step_us is None:
            return None
        step, base = self._step[m.step_id or ""], self._base[m.base_id or ""]
        return StepTrial(step, finely(m.step_us), finely(m.base_step_us), base)


def _steps(source: Store) -> Iterable[tuple[str, StepKey]]:
    return source.steps().items()


def _told_step(k: StepKey) -> Step:
    return Step(k.model, k.phase, k.batch, k.q_len, k.context, k.chunk, k.layers, k.weight, k.sequence, k.props)


def finely(us: float) -> float:
    """As sheets have a step's time: seven digits, since a ratio of two that differ by 0.2 % decides."""
    return float(f"{us:.7g}")


def _point(
    w: Winner,
    observations: Sequence[Observation],
    builds: Mapping[str, Build],
    runs: _Runs,
    looks: _StepTrials,
    dynamic: str,
) -> Point:
    trials = []
    key = w.problem.filed()
    for o in observations:
        if (build := builds.get(o.measurement.build_id or "")) is not None and looks.has(o.measurement):
            trials.append(_trial(w, o, build, runs, looks, builds))
    trials.sort(key=_order)
    fields = stated(key.static, key.runtime, dynamic, key.dynamic)
    refused = {outcome: count for outcome, count in w.why.get("refused", {}).items() if outcome != "wrong_result"}
    defaults = canonical_fields_of(w.kernel).fields
    is_said = filled(fields, defaults) == filled(key.fields, defaults)
    return Point(key.dynamic, tuple(trials), None if is_said else key.fields, refused)


def _order(t: Trial) -> tuple[Any, ...]:
    look = (-1, 0.0) if t.look is None else (t.look.step, t.look.step_us)
    return (not t.won, t.p50_us is None, t.p50_us or 0.0, canonical(t.config), *look, t.run or 0, t.after)


def _trial(w: Winner, o: Observation, build: Build, runs: _Runs, looks: _StepTrials, builds: Mapping[str, Build]) -> Trial:
    m = o.measurement
    config = trimmed(build.config, canonical_fields_of(build.kernel).config)
    known: dict[str, Any] = {"model": m.model}
    if m.provenance == "measured":
        run, after = runs.of(m, builds)
        known = {"run": run, "after": after}
    if m.outcome != "ok":
        return Trial(False, None, config, build.source_sha[:SOURCE_DIGITS], reason=m.reason, **known)
    if m.provenance == "measured":
        known |= {
            "stage": m.stage, "samples": m.samples, "p10_us": rounded(m.p10_us), "p90_us": rounded(m.p90_us),
            "min_us": rounded(m.min_us), "error_abs": rounded(m.error_abs), "error_rel": rounded(m.error_rel),
            "look": looks.of(m),
        }  # fmt: skip
    return Trial(m.build_id == w.build_id, rounded(m.p50_us), config, build.source_sha[:SOURCE_DIGITS], **known)


# ---- and back


@dataclass(slots=True)
class Rebuilt:
    """What became of text. stale: trials left out, as their kernel renders another source today. faults: in words."""

    trials: int = 0
    winners: int = 0
    stale: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Case:
    """A trial of a sheet, as today's kernels understand it."""

    sheet: ResultsFile
    trial: Trial
    key: ProblemKey
    kernel: Kernel
    device: Device
    config: Any
    source: str
    static: Mapping[str, Any]
    closure: str  # of the kernel
    nvrtc: tuple[int, int] | None  # that compiled it where this was observed, None where the text does not say

    def __str__(self) -> str:
        at = "" if self.key.dynamic is None else f" {self.sheet.dynamic}={self.key.dynamic}"
        return f"{self.kernel.name} on {self.sheet.board}{at}: {fields_of(self.config)}"


def build(
    texts: Sequence[Told],
    into: Store,
    compiler: CachedCompiler | None,
    say: Callable[[int, int, str], None] = lambda done, total, what: None,
    cells: Collection[str] | None = None,
) -> Rebuilt:
    """Fill `into` with what `texts` state, compiled by `compiler`. say: is told (done, of how many, what).

    compiler: None compiles nothing. Builds are then known by their sources alone, and whoever runs one compiles it.
    cells: ProblemKey.cell of what is wanted, None for all.
    Raises UnknownName for a kernel that is not installed, CompileError, DatabaseError.
    """
    done = Rebuilt()
    cases = [case for told in texts for case in _cases(told, done, cells)]
    images: dict[tuple[str, str], Future[Cubin]] = {}
    for case in cases:
        what = case.source, case.sheet.arch
        if compiler is not None and what not in images:
            images[what] = compiler.submit(case.source, find_arch(case.sheet.arch))
    built: dict[tuple[Any, ...], str] = {}
    observed: list[Measurement] = []
    with into.transaction():
        for i, case in enumerate(cases):
            say(i, len(cases), case.kernel.name)
            image = images.get((case.source, case.sheet.arch))
            heed()
            observed.append(_record(case, into, None if image is None else result_of(image), built))
        into.add_measurements(observed)
        done.trials = len(observed)
        _choose(cases, into, done)
    return done


def as_sheet(told: Told) -> ResultsFile:
    """An outlook as a sheet of predictions, each the only one of its point; a sheet as it is."""
    if isinstance(told, ResultsFile):
        return told
    cells = []
    for family in told.families:
        for cell in family.cells:
            points = []
            for p in cell.points:
                plan = family.plans[p.plan]
                trial = Trial(True, p.us, plan.config, plan.source, model=told.model)
                points.append(Point(p.dynamic, (trial,), p.fields))
            cells.append(Cell(family.static, cell.runtime, tuple(points)))
    return ResultsFile(told.kernel, told.arch, told.board, told.device, told.dynamic, (), tuple(cells))


def _cases(told: Told, done: Rebuilt, cells: Collection[str] | None) -> list[_Case]:
    sheet, predicted_by = as_sheet(told), None if isinstance(told, ResultsFile) else told.nvrtc
    kernel, arch, device = find_kernel(named_kernel(sheet.kernel)), find_arch(sheet.arch), _device(sheet)
    of, found, closure = canonical_fields_of(sheet.kernel), [], source_digest_of(kernel)
    sources: dict[str, str | None] = {}
    for cell in sheet.cells:
        for point in cell.points:
            fields = stated(cell.static, cell.runtime, sheet.dynamic, point.dynamic)
            try:
                problem: Any = kernel.problem_type(**filled(point.fields or fields, of.fields))
            except (KerngenError, TypeError) as e:
                done.faults.append(f"{sheet.kernel} on {sheet.board}: {fields} is no problem of it: {e}")
                continue
            key = problem_key(kernel, problem)
            if (key.filed().static, key.filed().runtime, key.dynamic) != (cell.static, cell.runtime, point.dynamic):
                done.faults.append(f"{sheet.kernel} on {sheet.board}: {fields} is filed otherwise today")
                continue
            if cells is not None and key.cell not in cells:
                continue
            for trial in point.trials:
                what = canonical([cell.static, trial.config])
                try:
                    config = kernel.config_type(**filled(trial.config, of.config))
                    if what not in sources:
                        sources[what] = source_of(kernel, problem, config, arch)
                except (KerngenError, TypeError):
                    sources[what] = None
                source = sources[what]
                if source is None or not is_filed_by(source, trial.source):
                    done.stale.append(f"{sheet.kernel} on {sheet.board}: {fields}: {dict(trial.config)}")
                else:
                    nvrtc = predicted_by if trial.run is None else sheet.runs[trial.run].nvrtc
                    found.append(
                        _Case(sheet, trial, key, kernel, device, config, source, static_fields(problem), closure, nvrtc)
                    )
    return found


def _device(sheet: ResultsFile) -> Device:
    try:
        return device_from(sheet.device)
    except TypeError as e:
        raise DatabaseError(f"the board {sheet.board} of {sheet.kernel} lacks figures: {e}") from e


def _record(case: _Case, into: Store, image: Cubin | None, known_builds: dict[tuple[Any, ...], str]) -> Measurement:
    """The trial, with its build recorded. known_builds: those that are already."""
    trial, sheet = case.trial, case.sheet
    what = (case.source, case.config, *case.static.values(), sheet.arch, case.nvrtc if image is None else None,
            trial.won)  # fmt: skip
    if (built := known_builds.get(what)) is None:
        beside: dict[str, Any] = {"keep_image": trial.won}
        if image is None:
            beside = {"arch": find_arch(sheet.arch), "nvrtc": case.nvrtc, "status": "uncompiled"}
        built = known_builds[what] = into.add_build(
            image, case.kernel.name, case.source, fields_of(case.config), dict(case.static),
            notes=notes_of(case.closure, case.kernel, fields_of(case.config), sheet.arch), **beside,
        )  # fmt: skip
    run = None if trial.run is None else sheet.runs[trial.run]
    known: dict[str, Any] = {}
    if (look := trial.look) is not None:
        step = sheet.steps[look.step]
        key = StepKey(step.model, sheet.arch, step.phase, step.batch, step.q_len, step.context, step.chunk, step.layers,
                      step.sequence, step.weight, dict(step.props))  # fmt: skip
        known |= {"step_id": into.add_step(key), "step_us": look.step_us, "base_step_us": look.base_step_us,
                  "base_id": sheet.bases[look.base]}  # fmt: skip
    if run is not None:
        known |= {"environment": dict(run.environment), "run": run.id, "at": results_file.moment(run, trial.after)}
        if image is not None and run.nvrtc != image.nvrtc:  # what was timed is the same source, compiled by another
            known["tags"] = {"nvrtc": f"{run.nvrtc[0]}.{run.nvrtc[1]}"}
    return Measurement(
        case.key, sheet.arch, case.device, fields_of(case.config), built,
        "ok" if trial.p50_us is not None else "wrong_result", "predicted" if run is None else "measured",
        reason=trial.reason, stage=trial.stage, model=trial.model, p50_us=trial.p50_us, p10_us=trial.p10_us,
        p90_us=trial.p90_us, min_us=trial.min_us, samples=trial.samples, error_abs=trial.error_abs,
        error_rel=trial.error_rel, **known,
    )  # fmt: skip


def _choose(cases: Sequence[_Case], into: Store, done: Rebuilt) -> None:
    """Winners, by the policy. What a text says won has to win; another's measurement may outrank a prediction."""
    chosen: dict[tuple[str, str, Device], dict[str, Winner]] = {}
    for case in cases:
        key = (case.kernel.name, case.key.static_key, case.device)
        if key not in chosen:
            target = Target(find_arch(case.sheet.arch), key[2])
            chosen[key] = {w.problem.id: w for w in into.recompute_winners(case.kernel, key[1], target)}
            done.winners += len(chosen[key])
    said: Counter[tuple[str, str]] = Counter()
    for case in cases:
        winner = chosen[case.kernel.name, case.key.static_key, case.device].get(case.key.id)
        is_won = winner is not None and winner.config == fields_of(case.config)
        outranked = winner is not None and winner.provenance == "measured" and case.trial.run is None
        if case.trial.won and not is_won and not outranked:
            said[case.key.id, case.sheet.board] += 1
            if said[case.key.id, case.sheet.board] == 1:
                what = "nothing" if winner is None else winner.config
                done.faults.append(f"{case} is said to win, and {what} does")


def parse(told: str, where: str) -> Told:
    """A sheet or an outlook, as its first word says. Raises DatabaseError."""
    return prediction_file.parse(told, where) if told.startswith(prediction_file.HEAD) else results_file.parse(told, where)


def read(paths: Sequence[Path]) -> list[Told]:
    """What is said in files, and in folders, in all that ends in .txt. Raises DatabaseError, OSError."""
    files = [f for path in paths for f in (sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path])]
    sheets = list[Told]()
    for file in files:
        try:
            sheets.append(parse(read_regular(file, MAX_SHEET_BYTES).decode(), os.fspath(file)))
        except UnicodeDecodeError as e:
            raise DatabaseError(f"{file} is no text: {e}") from e
    if not sheets:
        raise DatabaseError(
            f"there is no {SUFFIX} file in {', '.join(map(str, paths))}", hint="kerngen db dump -o FOLDER"
        )
    return sheets
