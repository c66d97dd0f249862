"""Writes the results files that kerngen is shipped with: of what a GPU measured, of what was chosen on a board before,
or from the cost model.

    python -m tools.prebuilt --device V100                     tuning_db/prebuilt/V100/*.predicted.txt
    python -m tools.prebuilt --device A100,T4 --trials 4
    python -m tools.prebuilt --device A100,T4 --renew          the same, where only device code has changed
    python -m tools.prebuilt --measured h200.db                tuning_db/prebuilt/H200/*.txt
    python -m tools.prebuilt --carried rows.json --device H200 --source TEXT    tuning_db/prebuilt/H200/*.carried.txt
    python -m tools.prebuilt --carried rows.json --device H200 --source TEXT --keep    these rows of them

A board's problems are those of all released models, each once, but for what was measured there or is carried of it.
They are searched together as `kerngen tune` does, in a database of its own that is gone afterwards (--db keeps it, and
a run that was killed goes on there). The same kernels, cost model and NVRTC give the same text, byte for byte: nothing
in it says when, where or by whom it was made.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from kerngen.arch import Target, find_device
from kerngen.compiler.cache import CachedCompiler
from kerngen.compiler.compile import require_target
from kerngen.compiler.render import source_of
from kerngen.compiler.source_digest import source_digest_of
from kerngen.errors import DatabaseError, KerngenError, UsageError
from kerngen.system.files import publish_texts
from kerngen.system.progress import Reporter
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, fields_of, static_fields
from kerngen.tuning.objective import Predicted
from kerngen.tuning.report import Report
from kerngen.tuning.tuner import Tuner
from kerngen.tuning_db import Measurement, Store, problem_key
from kerngen.tuning_db.dist import results_file
from kerngen.tuning_db.dist.export import Selection
from kerngen.tuning_db.dist.results_folder import NONE_COMPILED, build, dump, read, results_of
from kerngen.tuning_db.read.freshness import notes_of
from kerngen.tuning_db.read.ids import ProblemKey, ids_as_filed
from kerngen.tuning_db.read.places import PREBUILT
from kerngen.workload.workload import MODELS, Item, find_model, workload
from tools.renew import renewed

CARRIED, PREDICTED = ".carried.txt", ".predicted.txt"
TRIALS = 4  # configurations a problem; docs/tuning-database.md says what twelve would gain


def problems_of(models: Iterable[str], target: Target, kernels: Collection[str] = ()) -> list[Item]:
    """What these models need (of `kernels`, or all), each problem once, with its uses in all of them."""
    found: dict[tuple[str, object], Item] = {}
    for model in models:
        for item in workload(find_model(model), target.arch).items:
            if kernels and item.kernel not in kernels:
                continue
            known = found.get((item.kernel, item.problem))
            uses = (*(known.uses if known is not None else ()), *item.uses)
            found[item.kernel, item.problem] = Item(item.kernel, item.problem, uses)
    return list(found.values())


def predict(
    target: Target, models: Sequence[str], store: Store, *, kernels: Collection[str] = (), known: Collection[str] = (),
    trials: int = TRIALS, jobs: int = 1, quiet: bool = False,
) -> Report:  # fmt: skip
    """Search the winners of all problems of `models` (of `kernels`, or all) on `target` by the model, into `store`.

    known: ProblemKey.id of those that have a better row than a prediction. Raises UsageError where all have.
    """
    items = [item for item in problems_of(models, target, kernels)
             if problem_key(find_kernel(item.kernel), item.problem).id not in known]  # fmt: skip
    if not items:
        raise UsageError(f"nothing is left to predict for {target.device}: all was measured there or is carried")
    with CachedCompiler(jobs) as compiler, Reporter(f"predict {target.device}", quiet=quiet) as progress:
        return Tuner(Predicted(target), store, compiler, trials=trials, progress=progress).run(items)


def known_points(place: Path) -> set[str]:
    """ProblemKey.id of what the folder's results files have measured or carried."""
    return _points_of(path for path in place.glob("*.txt") if not path.name.endswith(PREDICTED))


def _points_of(files: Iterable[Path]) -> set[str]:
    paths = sorted(files)
    return {
        ids_as_filed(ProblemKey(file.kernel, dict(problem.static), dict(point.runtime), point.dynamic)).problem
        for file in (read(paths) if paths else ())
        for problem, point in file.points()
    }


def write_predicted(store: Store, target: Target, folder: Path, kernels: Collection[str] = ()) -> dict[Path, int]:
    """The results files of what `store` predicts for the target's board, in place of those in `folder` (of `kernels`,
    or all): their sizes in bytes. What is measured or carried there is no part of them.

    Raises DatabaseError where not all of a file is by one cost model and one NVRTC, UsageError where there is nothing.
    """
    place, texts = folder / target.device.name, dict[Path, str]()
    chosen = Selection(arches=[target.arch.name], devices=[target.device.name], provenances=["predicted"])
    for file in results_of([store], chosen, rivals=False):
        if len(file.models) != 1:
            told = ", ".join(f"{m.name} with NVRTC {'.'.join(map(str, m.nvrtc or ()))}" for m in file.models)
            raise DatabaseError(f"{file.kernel} for {target.device} is predicted by more than one maker ({told})",
                                hint="predict it anew, in an empty database")  # fmt: skip
        texts[place / f"{file.kernel}{PREDICTED}"] = results_file.dump(file)
    if not texts:
        raise UsageError(f"{store.where} predicts nothing for {target.device}")
    return _publish(texts, place, PREDICTED, kernels)


def _publish(texts: Mapping[Path, str], place: Path, suffix: str, kernels: Collection[str] = ()) -> dict[Path, int]:
    """Write `texts` in place of the files in `place` that end in `suffix` (of `kernels`, or all): their sizes."""
    for old in place.glob(f"*{suffix}"):
        if old not in texts and not kernels:
            old.unlink()
    return publish_texts(texts)


def write_carried(
    rows: Sequence[Mapping[str, Any]], source: str, target: Target, folder: Path, kernels: Collection[str] = (), *,
    keeps: bool = False,
) -> dict[Path, int]:  # fmt: skip
    """The results files of `rows` (of `kernels`, or all), which were chosen on the target's board, in place of those in
    `folder`: their sizes. A problem that was measured there is left out. Nothing is compiled.

    rows: {"kernel", "problem", "config"} of each, with all fields or without those that have their default. source:
    what they were chosen by, in words. keeps: what else is carried stays, of these kernels and of others. Raises
    UsageError, naming the row, for what is none or cannot run; DatabaseError where two rows of one tuned point differ.
    """
    place, texts = folder / target.device.name, dict[Path, str]()
    measured = _points_of(path for path in place.glob("*.txt") if not path.name.endswith((CARRIED, PREDICTED)))
    with (
        tempfile.TemporaryDirectory(prefix="kerngen-prebuilt-") as scratch,
        Store.open(f"{scratch}/board.sqlite") as store,
    ):
        keys: dict[str, Kernel] = {}
        chosen: dict[str, Measurement] = {}
        with store.transaction():
            for row in (r for r in rows if not kernels or r.get("kernel") in kernels):
                kernel, m = _carried(row, source, target, store)
                if m.problem.id in measured:
                    continue
                keys[m.problem.static_key] = kernel
                if (other := chosen.setdefault(m.problem.id, m)).config != m.config:
                    raise DatabaseError(f"{kernel.name}: {m.config} and {other.config} are of one tuned point, "
                                        f"{m.problem.flat}")  # fmt: skip
            store.add_measurements(list(chosen.values()))
        names = sorted({kernel.name for kernel in keys.values()}) if keeps else []
        if old := [path for name in names if (path := place / f"{name}{CARRIED}").exists()]:
            build(read(old), store, None, wanted=lambda key: key.id not in chosen)
        with store.transaction():
            for static_key, kernel in keys.items():
                store.recompute_winners(kernel, static_key, target)
        for file in results_of([store], Selection(provenances=["carried"]), rivals=False):
            texts[place / f"{file.kernel}{CARRIED}"] = results_file.dump(file)
    if not texts:
        raise UsageError(f"nothing of that is carried: it was measured on {target.device}, or is of other kernels")
    return publish_texts(texts) if keeps else _publish(texts, place, CARRIED, kernels)


def _carried(row: Mapping[str, Any], source: str, target: Target, store: Store) -> tuple[Kernel, Measurement]:
    """The row as an observation, its build recorded in `store`."""
    try:
        kernel = find_kernel(row["kernel"])
        problem, config = kernel.problem_type(**row["problem"]), kernel.config_type(**row["config"])
        kernel.require_valid(problem, config, target)
        text = source_of(kernel, problem, config, target.arch)
    except (KerngenError, KeyError, TypeError) as e:
        raise UsageError(f"{dict(row)} cannot be carried: {e}") from e
    arch, fields = target.arch.name, fields_of(config)
    made = store.add_build(
        None, kernel.name, text, fields, static_fields(problem), arch=target.arch, nvrtc=NONE_COMPILED,
        status="uncompiled", notes=notes_of(source_digest_of(kernel), kernel, fields, arch),
    )  # fmt: skip
    key = problem_key(kernel, problem)
    return kernel, Measurement(key, arch, target.device, fields, made, "ok", "carried", source)


def write_measured(store: Store, folder: Path) -> dict[Path, int]:
    """The results files of what `store` measured, in place of those in `folder` of the same kernels and boards: their
    sizes.

    Raises UsageError where it measured nothing.
    """
    texts = {folder / name: text for name, text in dump([store], Selection(provenances=["measured"])).items()}
    if not texts:
        raise UsageError(f"{store.where} has no measured winners")
    return publish_texts(texts)


def renew(target: Target, folder: Path, *, jobs: int = 1) -> dict[Path, int]:
    """The predicted files of the target's board that name other sources than today's, renewed: their builds.

    Raises DatabaseError where that takes a new search (renew.py), UsageError where there are none.
    """
    if not (paths := sorted((folder / target.device.name).glob(f"*{PREDICTED}"))):
        raise UsageError(f"{folder} has no predicted files of {target.device}", hint="without --renew they are made")
    with CachedCompiler(jobs) as compiler:
        found = {path: renewed(path, target, compiler) for path in paths}
    publish_texts({path: text for path, (text, builds) in found.items() if builds})
    return {path: builds for path, (_, builds) in found.items() if builds}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", "devices", multiple=True, help="Boards to predict for (kerngen arch ls).")
@click.option(
    "--measured", "measured", default=None, metavar="FILE|URL", help="A database whose measurements to write."
)
@click.option(
    "--carried", "carried", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=None, metavar="FILE",
    help="JSON: a list of {kernel, problem, config} that were chosen on the board before.",
)  # fmt: skip
@click.option("--source", default=None, metavar="TEXT", help="What those of --carried were chosen by, in words.")
@click.option("--keep", "keeps", is_flag=True, help="What else is carried stays beside --carried.")
@click.option("--renew", "renewing", is_flag=True, help="Keep the winners of what is there, build and time them anew.")
@click.option("--model", "models", multiple=True, help="Only these. Default: all released models.")
@click.option("--kernel", "kernels", multiple=True, help="These alone; other kernels' files stay.")
@click.option("--trials", type=click.IntRange(1), default=TRIALS, show_default=True, help="Configurations a problem.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@click.option("--db", "db", default=None, metavar="FILE", help="Keep what was tried here. One file a board.")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), default=PREBUILT, show_default=True)
def main(
    devices: tuple[str, ...], measured: str | None, carried: Path | None, source: str | None, keeps: bool,
    renewing: bool, models: tuple[str, ...], kernels: tuple[str, ...], trials: int, jobs: int | None, db: str | None,
    output: Path,
) -> None:  # fmt: skip
    """Write the results files that kerngen is shipped with: predicted for boards, carried of one, or of a database that
    was measured.

    \b
    Examples:
      python -m tools.prebuilt --device V100
      python -m tools.prebuilt --measured h200.db
      python -m tools.prebuilt --carried rows.json --device H200 --source "steps on an H200: docs/experiments.md"
    """
    boards = [find_device(name) for named in devices for name in named.split(",")]
    kernels = tuple(find_kernel(name).name for name in kernels)
    if bool(boards) == bool(measured):
        raise UsageError("name boards to predict for, or a database that was measured",
                         hint="--device V100, or --measured FILE")  # fmt: skip
    if renewing and (measured or models or kernels or db):
        raise UsageError("--renew keeps what is predicted for boards: with --device alone, and --jobs and --output")
    if bool(carried) != bool(source):
        raise UsageError("--carried and --source go together: a carried row says what it was chosen by")
    if keeps and carried is None:
        raise UsageError("--keep is of what is carried: with --carried and --source")
    if carried is not None and (len(boards) != 1 or renewing or models or db):
        raise UsageError("--carried is of one board: with --device and --source alone, and --kernel and --output")
    if db is not None and len(boards) != 1:
        raise UsageError("--db is of one board")
    if measured is not None:
        with Store.open(measured, read_only=True) as store:
            _tell(write_measured(store, output))
        return
    if carried is not None and source is not None:
        _tell(write_carried(_rows_in(carried), source, Target.of(boards[0]), output, kernels, keeps=keeps))
        return
    for board in boards:
        target = Target.of(board)
        require_target(target.arch)
        if renewing:
            found = renew(target, output, jobs=jobs or os.cpu_count() or 1)
            for path, builds in found.items():
                click.echo(f"{path}  {builds} builds")
            click.echo(f"{board}: {len(found)} files renewed")
            continue
        with ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="kerngen-prebuilt-"))
            store = stack.enter_context(Store.open(db or Path(scratch) / "board.sqlite"))
            report = predict(target, models or MODELS, store, kernels=kernels, trials=trials,
                             known=known_points(output / board.name), jobs=jobs or os.cpu_count() or 1)  # fmt: skip
            if report.interrupted:
                raise KeyboardInterrupt
            sizes = write_predicted(store, target, output, kernels)
        for kernel, config, reason in report.failures:
            click.echo(f"failed: {kernel} {config}: {reason}", err=True)
        click.echo(f"{board}: {len(report.results) - report.num_of('')} of {len(report.results)} problems, "
                   f"{report.num_trials:,} configurations tried in {report.seconds:.0f} s "
                   f"({report.num_compiled:,} compiles)")  # fmt: skip
        _tell(sizes)


def _rows_in(path: Path) -> list[Mapping[str, Any]]:
    """Raises UsageError."""
    try:
        rows = json.loads(path.read_text())
    except ValueError as e:
        raise UsageError(f"{path} is no JSON: {e}") from e
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path} is no list of rows", hint='[{"kernel": "embed", "problem": {...}, "config": {...}}]')
    return rows


def _tell(sizes: dict[Path, int]) -> None:
    for path, size in sizes.items():
        click.echo(f"{path}  {size / 1e3:.1f} kB")
    click.echo(f"{len(sizes)} files, {sum(sizes.values()) / 1e3:.1f} kB")


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m tools.prebuilt"))
