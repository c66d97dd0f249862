"""Exchanges configurations in a step of a model, one at a time: what is fastest where it runs.

    python -m kerngen.tuning.exchange gemma-4-31b --phase verify --tokens 4 --kernel w4a16_gemm --most 60
    python -m kerngen.tuning.exchange gemma-4-31b --phase verify --plan data/exchanges/h100/gemma-4-31b--verify-4.txt

Alone, a kernel is not what it is in the step. Where `kerngen tune --objective step` has steps choose between the few
that are fastest alone, this looks at nothing but the step: of each problem that it launches, those of most bytes
first, some valid configurations of every body are drawn, or those are taken that are written out, and the step is
replayed with each, in turn with the step as it is so far. What gains is looked at once more, since the best of many
looks is partly the luckiest, and compared with the fp32 reference; then it stays for all problems after it. --rounds
goes through the problems again, with the best of each: what gains at one may lose beside another's.

Nothing is written to a database; defaults are chosen by such looks (docs/experiments.md).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import click

from kerngen.arch import Target
from kerngen.cli.draft_options import draft_weights_option
from kerngen.cli.step_options import step_of, step_options
from kerngen.compiler.cache import CachedCompiler
from kerngen.compiler.compile import Cubin
from kerngen.compiler.render import render
from kerngen.errors import CompileError, LaunchError, UsageError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, describe
from kerngen.tuning.space import valid_of
from kerngen.tuning.step_worker import Exchanged
from kerngen.tuning.sweep import read_plan, written_out
from kerngen.tuning.worker import GpuWorker, Observed
from kerngen.workload.steps import Ratio, Step, launch_counts
from kerngen.workload.workload import Model, find_model, require_among

PAIRS = 6  # replays of a look, with and without in turn
SURE_PAIRS = 18  # of the look that decides
SURE_LOOKS = 2  # of the best of a place's, how many get one where the one before did not stand it
KEPT = 12  # of a place's configurations, those that come into the next round


@dataclass(slots=True, eq=False)
class Place:
    """A problem of the step, its default configuration, and those that are to be tried. launches: in the step."""

    kernel: Kernel
    problem: Any
    launches: int
    default: Any
    configs: list[Any] = field(default_factory=list)

    @property
    def called(self) -> tuple[str, Any]:
        return self.kernel.name, self.problem


@dataclass(frozen=True, slots=True)
class Look:
    """One exchange: the step's time with it over the time without, or what came in the way."""

    place: Place
    config: Any
    seen: Ratio | Observed


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays in the step, by the look that decided."""

    place: Place
    config: Any
    seen: Ratio


def places_of(model: Model, step: Step, target: Target, kernels: Sequence[str] = ()) -> list[Place]:
    """The problems of `step` that `kernels` serve (none named: all), those of most bytes first.

    Raises UsageError for a kernel that the step does not launch, and as `sequence` does.
    """
    launches = launch_counts(model, step, target.arch)
    have = sorted({name for name, _ in launches})
    require_among(kernels, have, f"{step.name} of {model.name}", "launches")
    found = [
        Place(kernel := find_kernel(name), problem, count, kernel.default_config(problem, target))
        for (name, problem), count in launches.items()
        if not kernels or name in kernels
    ]
    return sorted(found, key=lambda p: -p.launches * p.kernel.cost(p.problem).bytes)


def drawn(place: Place, target: Target, most: int, seed: int) -> list[Any]:
    """`most` valid configurations, of each body that serves as many as of the others, where it has them."""
    rng = Random(f"{seed} {place.kernel.name} {describe(place.problem)}")
    hands = []
    for body in place.kernel.bodies(target.arch):
        if body.proven:
            valid = [c for c in valid_of(place.kernel, body, place.problem, target) if c != place.default]
            hands.append(rng.sample(valid, min(most, len(valid))))
    found: list[Any] = []
    for turn in range(most):
        found += [hand[turn] for hand in hands if turn < len(hand)]
    return list(dict.fromkeys(found))[:most]


def planned(places: Sequence[Place], path: Path, target: Target) -> list[Place]:
    """The places that the file names (sweep.read_plan has its form), with its configurations.

    Raises UsageError where it names one that the step does not have.
    """
    by_call = {p.called: p for p in places}
    found = []
    for one in read_plan(path):
        called = one.kernel.name, one.case.problem
        if (place := by_call.get(called)) is None:
            raise UsageError(f"{path}: the step does not launch {one.kernel.name} {describe(one.case.problem)}",
                             hint="the same command with --most 0 and no --plan lists its problems")  # fmt: skip
        place.configs = written_out(place.kernel, place.problem, target, one.texts)
        found.append(place)
    return found


class Exchange:
    """A step, and what has been kept in it so far. least: of the step's time, what must be gained at least."""

    def __init__(
        self, model: Model, step: Step, places: Sequence[Place], target: Target, gpu: GpuWorker,
        compiler: CachedCompiler, least: float,
    ) -> None:  # fmt: skip
        self._model, self._step, self._places, self._target = model, step, places, target
        self._gpu, self._compiler, self._least = gpu, compiler, least
        self._by_call = {p.called: p for p in places}
        self._images: dict[tuple[Any, ...], Future[Cubin]] = {}
        self.kept: dict[tuple[str, Any], Any] = {}  # where it is not the default
        for place in places:
            for config in (place.default, *place.configs):
                self._image(place, config)

    def begin(self) -> None:
        """Make the model and look at the step as it is. Raises LaunchError where it does not run."""
        seen = self._gpu.compare(self._model, self._step, (), (), pairs=PAIRS)
        if isinstance(seen, Observed):
            raise LaunchError(f"{self._step.name} of {self._model.name} does not run by default: {seen.reason}",
                              hint="give the first look more time with --timeout")  # fmt: skip

    def round(self) -> Iterator[Look | Kept]:
        """All places once, each with what was kept so far. Leaves each with the best of those that work."""
        for place in self._places:
            now = self.kept.get(place.called, place.default)
            looks = []
            for config in dict.fromkeys((*place.configs, place.default)):
                if config != now:
                    look = Look(place, config, self._look(place, config, PAIRS))
                    yield look
                    if isinstance(look.seen, Ratio):
                        looks.append((look.seen.median, config))
            looks.sort(key=lambda seen: seen[0])
            broken = set()
            sure_looks = 0
            for ratio, config in looks:
                if ratio >= 1 - self._least or sure_looks == SURE_LOOKS:
                    break
                found = self._decided(place, config)
                if isinstance(found, Look):
                    broken.add(config)
                    yield found
                    continue
                sure_looks += 1
                if isinstance(found, Kept):
                    yield found
                    break
            best = [config for _, config in looks if config not in broken][:KEPT]
            place.configs = [c for c in dict.fromkeys((now, *best)) if c != place.default]

    def _decided(self, place: Place, config: Any) -> Kept | Look | None:
        """Keeps it where a longer look confirms the gain, and the reference the results. A Look says what is broken."""
        sure = self._look(place, config, SURE_PAIRS)
        if isinstance(sure, Observed):
            return Look(place, config, sure)
        if sure.median >= 1 - self._least or sure.median + 2 * sure.spread >= 1:
            return None
        checked = self._gpu.check(place.kernel, place.problem, config, self._image(place, config).result().image)
        if checked.outcome != "ok":
            return Look(place, config, checked)
        self.kept[place.called] = config
        if config == place.default:
            del self.kept[place.called]
        return Kept(place, config, sure)

    def against_defaults(self) -> Ratio | Observed:
        """The step with all that was kept, over the step by default."""
        return self._gpu.compare(self._model, self._step, (), self._chosen(self.kept), pairs=2 * SURE_PAIRS)

    def _look(self, place: Place, config: Any, pairs: int) -> Ratio | Observed:
        try:
            other = self._chosen({**self.kept, place.called: config})
        except CompileError as e:
            return Observed("compile_failed", e.message)
        return self._gpu.compare(self._model, self._step, self._chosen(self.kept), other, pairs=pairs)

    def _chosen(self, configs: Mapping[tuple[str, Any], Any]) -> list[Exchanged]:
        return [
            Exchanged(name, (problem,), config, self._image(self._by_call[name, problem], config).result().image)
            for (name, problem), config in configs.items()
        ]

    def _image(self, place: Place, config: Any) -> Future[Cubin]:
        key = *place.called, config
        if key not in self._images:
            source = render(place.kernel, place.problem, config, self._target)
            self._images[key] = self._compiler.submit(source, self._target.arch)
        return self._images[key]


def _line(found: Look | Kept) -> str:
    config = describe(found.config)
    if isinstance(found, Kept):
        return f"  kept: {found.seen.median:.4f} +- {found.seen.spread:.4f}  {config}"
    if isinstance(found.seen, Ratio):
        return f"  {found.seen.median:.4f}  {config}"
    return f"  {found.seen.in_a_line}  {config}"


def _of_place(place: Place) -> str:
    return f"{place.kernel.name} {describe(place.problem)}, {place.launches} launches: {describe(place.default)}"


@click.command()
@click.argument("name", metavar="MODEL")
@step_options
@draft_weights_option
@click.option("--kernel", "kernels", multiple=True, help="Of this kernel alone; repeatable.")
@click.option("--most", type=click.IntRange(0), default=40, show_default=True,
              help="Configurations of a problem; 0 lists the problems.")  # fmt: skip
@click.option("--plan", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=None,
              help="What to try, in place of what is drawn: see kerngen.tuning.sweep.read_plan.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="Times through all problems.")
@click.option("--least", type=click.FloatRange(0, 0.5), default=0.001, show_default=True,
              help="Of the step's time, what must be gained.")  # fmt: skip
@click.option("--seed", default=0, show_default=True)
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True,
              help="Seconds a look; those that begin a process make the model.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
def main(
    name: str, phase: str, batch: int, context: int, tokens: int | None, draft_weights: str, kernels: tuple[str, ...],
    most: int, plan: Path | None, rounds: int, least: float, seed: int, timeout_s: float, jobs: int | None,
) -> None:  # fmt: skip
    """Exchange configurations in a step of MODEL on this GPU. Exit code 1 if one is wrong or fails."""
    model, step = find_model(name, draft_weights=draft_weights), step_of(phase, batch, context, tokens)
    with GpuWorker(timeout_s) as gpu, CachedCompiler(jobs or os.cpu_count() or 1) as compiler:
        target = Target.of(gpu.device())
        places = places_of(model, step, target, kernels)
        if plan is not None:
            places = planned(places, plan, target)
        else:
            for place in places:
                place.configs = drawn(place, target, most, seed)
        if not any(place.configs for place in places):
            for place in places:
                click.echo(_of_place(place))
            return
        click.echo(f"{target.device}: reads {gpu.ceilings().read_gbps:.0f} GB/s; {model.name}, {step.name}")
        run = Exchange(model, step, places, target, gpu, compiler, least)
        run.begin()
        failed, last = 0, None
        for _ in range(rounds):
            for found in run.round():
                if found.place is not last:
                    click.echo(_of_place(found.place))
                    last = found.place
                click.echo(_line(found))
                failed += isinstance(found.seen, Observed)
        whole = run.against_defaults()
    for place in places:
        if (config := run.kept.get(place.called)) is not None:
            click.echo(f"kept: {place.kernel.name} {describe(place.problem)}: {describe(config)}")
    if isinstance(whole, Observed):
        raise LaunchError(f"the step does not run with all that was kept: {whole.reason}")
    part = f"{whole.median:.4f} +- {whole.spread:.4f}"
    click.echo(f"{step.name}: {whole.base_us / 1e3:.3f} ms by default, with what was kept {part} of it")
    if failed:
        click.echo(f"{failed} configurations are wrong or failed", err=True)
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m kerngen.tuning.exchange"))
