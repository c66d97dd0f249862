"""Writes the results files that kerngen is shipped with: from the cost model, or of what a GPU measured.

    python -m tools.prebuilt --device V100                     tuning_db/prebuilt/V100/*.predicted.txt
    python -m tools.prebuilt --device A100,T4 --trials 4
    python -m tools.prebuilt --device A100,T4 --renew          the same, where only device code has changed
    python -m tools.prebuilt --measured h200.db                tuning_db/prebuilt/H200/*.txt

A board's problems are those of all released models, each once, searched together as `kerngen tune` does, in a database
of its own that is gone afterwards (--db keeps it, and a run that was killed goes on there). The same kernels, cost
model and NVRTC give the same text, byte for byte: nothing in it says when, where or by whom it was made.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from kerngen.arch import Target, find_device
from kerngen.compiler.cache import CachedCompiler
from kerngen.compiler.compile import require_target
from kerngen.errors import DatabaseError, UsageError
from kerngen.system.files import publish_texts
from kerngen.system.progress import Reporter
from kerngen.templates import find_kernel
from kerngen.tuning.objective import Predicted
from kerngen.tuning.report import Report
from kerngen.tuning.tuner import Tuner
from kerngen.tuning_db import Store
from kerngen.tuning_db.dist import results_file
from kerngen.tuning_db.dist.export import Selection
from kerngen.tuning_db.dist.results_folder import dump, results_of
from kerngen.tuning_db.read.canonical_fields import named_kernel
from kerngen.tuning_db.read.places import PREBUILT
from kerngen.workload.workload import MODELS, Item, find_model, workload
from tools.renew import renewed

PREDICTED = ".predicted.txt"
TRIALS = 4  # configurations a problem; docs/tuning-database.md says what twelve would gain
# (board, kernel): its defaults were chosen on the board, and are better than what is predicted (docs/prediction.md).
LEFT_TO_DEFAULTS = {
    ("H200", k)
    for k in ("attn_decode", "greedy_head", "w4a16_gemm", "w4a16_norm", "moe_w4a16", "decode_layers", "ple_block")
}


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
    target: Target, models: Sequence[str], store: Store, *, kernels: Collection[str] = (), trials: int = TRIALS,
    jobs: int = 1, quiet: bool = False,
) -> Report:  # fmt: skip
    """Search the winners of all problems of `models` (of `kernels`, or all) on `target` by the model, into `store`."""
    with CachedCompiler(jobs) as compiler, Reporter(f"predict {target.device}", quiet=quiet) as progress:
        tuner = Tuner(Predicted(target), store, compiler, trials=trials, progress=progress)
        return tuner.run(problems_of(models, target, kernels))


def write_predicted(store: Store, target: Target, folder: Path, kernels: Collection[str] = ()) -> dict[Path, int]:
    """The results files of what `store` predicts for the target's board, in place of those in `folder` (of `kernels`,
    or all): their sizes in bytes.

    Raises DatabaseError where not all of a file is by one cost model and one NVRTC, UsageError where there is nothing.
    """
    place, texts = folder / target.device.name, dict[Path, str]()
    chosen = Selection(arches=[target.arch.name], devices=[target.device.name], provenances=["predicted"])
    for file in results_of([store], chosen, rivals=False):
        if len(file.models) != 1:
            told = ", ".join(f"{m.name} with NVRTC {'.'.join(map(str, m.nvrtc or ()))}" for m in file.models)
            raise DatabaseError(f"{file.kernel} for {target.device} is predicted by more than one maker ({told})",
                                hint="predict it anew, in an empty database")  # fmt: skip
        if (target.device.name, named_kernel(file.kernel)) not in LEFT_TO_DEFAULTS:
            texts[place / f"{file.kernel}{PREDICTED}"] = results_file.dump(file)
    if not texts:
        raise UsageError(f"{store.where} predicts nothing for {target.device}")
    for old in place.glob(f"*{PREDICTED}"):
        if old not in texts and not kernels:
            old.unlink()
    return publish_texts(texts)


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
@click.option("--renew", "renewing", is_flag=True, help="Keep the winners of what is there, build and time them anew.")
@click.option("--model", "models", multiple=True, help="Only these. Default: all released models.")
@click.option("--kernel", "kernels", multiple=True, help="Predict these alone, and leave other kernels' files.")
@click.option("--trials", type=click.IntRange(1), default=TRIALS, show_default=True, help="Configurations a problem.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@click.option("--db", "db", default=None, metavar="FILE", help="Keep what was tried here. One file a board.")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), default=PREBUILT, show_default=True)
def main(
    devices: tuple[str, ...], measured: str | None, renewing: bool, models: tuple[str, ...],
    kernels: tuple[str, ...], trials: int, jobs: int | None, db: str | None, output: Path,
) -> None:  # fmt: skip
    """Write the results files that kerngen is shipped with: predicted for boards, or of a database that was measured.

    \b
    Examples:
      python -m tools.prebuilt --device V100
      python -m tools.prebuilt --measured h200.db
    """
    boards = [find_device(name) for named in devices for name in named.split(",")]
    kernels = tuple(find_kernel(name).name for name in kernels)
    if bool(boards) == bool(measured):
        raise UsageError("name boards to predict for, or a database that was measured",
                         hint="--device V100, or --measured FILE")  # fmt: skip
    if renewing and (measured or models or kernels or db):
        raise UsageError("--renew keeps what is predicted for boards: with --device alone, and --jobs and --output")
    if db is not None and len(boards) != 1:
        raise UsageError("--db is of one board")
    if measured is not None:
        with Store.open(measured, read_only=True) as store:
            _tell(write_measured(store, output))
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
                             jobs=jobs or os.cpu_count() or 1)  # fmt: skip
            if report.interrupted:
                raise KeyboardInterrupt
            sizes = write_predicted(store, target, output, kernels)
        for kernel, config, reason in report.failures:
            click.echo(f"failed: {kernel} {config}: {reason}", err=True)
        click.echo(f"{board}: {len(report.results) - report.num_of('')} of {len(report.results)} problems, "
                   f"{report.num_trials:,} configurations tried in {report.seconds:.0f} s "
                   f"({report.num_compiled:,} compiles)")  # fmt: skip
        _tell(sizes)


def _tell(sizes: dict[Path, int]) -> None:
    for path, size in sizes.items():
        click.echo(f"{path}  {size / 1e3:.1f} kB")
    click.echo(f"{len(sizes)} files, {sum(sizes.values()) / 1e3:.1f} kB")


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m tools.prebuilt"))
