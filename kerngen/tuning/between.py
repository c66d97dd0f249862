"""What serves the sizes between two tuned points, against what else could: python -m kerngen.tuning.between DB

At a size that nobody tuned, three configurations come into question: the upper point's winner, the lower point's, and
the default, which looks at the real size. The database says which serves (tuning_db/store/crossovers.py), by the cost
model. Here the GPU says what each of them takes, and so what that choice costs against the best of the three.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import click

from kerngen.arch import Target
from kerngen.compiler.cache import CompileCache
from kerngen.errors import KerngenError, UsageError
from kerngen.runtime.selection import Bindings, Choice
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, describe
from kerngen.tuning_db import Source, open_source

SIZES = 2  # between two points, in even ratios
ROUNDS = 3
NOISE = 0.03  # what is slower than the best by no more than this is as good
ABOVE, BELOW, DEFAULT = "above", "below", "default"


@dataclass(frozen=True, slots=True)
class Gap:
    """A size between two tuned points. problem: of that size. choices: who would serve it -> the Choice of that, those
    of one configuration once. served: whose configuration the database serves.
    """

    kernel: Kernel
    problem: Any
    choices: dict[str, Choice]
    served: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What a gap's choices take, in microseconds, by who chose. regret: of what is served to the best, 0 if it is."""

    kernel: str
    problem: str
    served: str
    us: dict[str, float]

    @property
    def regret(self) -> float:
        return self.us[self.served] / min(self.us.values()) - 1


class Gpu(Protocol):
    """What is asked of a GPU: `worker.GpuWorker`, or a test's own."""

    def finals(self, kernel: Kernel, problem: Any, configs: list[tuple[Any, bytes]], *, rounds: int) -> Sequence[Any]:
        """As GpuWorker.finals."""


def gaps(source: Source, target: Target, sizes: int = SIZES) -> Iterator[Gap]:
    """Of every line that `source` has for the very board of `target`, in its order."""
    served, defaults = Bindings([source], target), Bindings([], target)
    lines: dict[tuple[str, str], list[Any]] = {}
    for w in source.winners():
        kernel = find_kernel(w.kernel)
        if w.device == target.device and kernel.problem_type.DYNAMIC:
            problem = kernel.problem_type(**w.problem.fields)
            lines.setdefault((w.kernel, w.problem.cell), []).append(problem)
    for (name, _), points in lines.items():
        kernel = find_kernel(name)
        axis = kernel.problem_type.DYNAMIC
        points.sort(key=lambda p: getattr(p, axis))
        for below, above in pairwise(points):
            for size in _between(getattr(below, axis), getattr(above, axis), sizes):
                try:
                    problem = replace(above, **{axis: size})
                    found = {
                        ABOVE: served.choice(kernel, above),
                        BELOW: served.choice(kernel, below),
                        DEFAULT: defaults.choice(kernel, problem),
                    }
                    now = served.choice(kernel, problem)
                except KerngenError:  # a size that the kernel, or its default, does not take
                    continue
                choices = dict[str, Choice]()
                for who, choice in found.items():
                    known = {c.config for c in choices.values()}
                    if choice.config not in known and kernel.why_invalid(problem, choice.config, target) is None:
                        choices[who] = choice
                serves = next((n for n, c in choices.items() if c.config == now.config), None)
                if serves is not None:
                    yield Gap(kernel, problem, choices, serves)


def _between(below: int, above: int, count: int) -> Iterator[int]:
    """At most `count` whole numbers between the two, in even ratios."""
    sizes = (round(below * (above / below) ** ((i + 1) / (count + 1))) for i in range(count))
    yield from dict.fromkeys(s for s in sizes if below < s < above)


def look(gpu: Gpu, gap: Gap, cache: CompileCache, target: Target) -> Seen | None:
    """What each choice takes; None where the one that is served gave no time."""
    images = [(c.config, (c.cubin or cache.get_or_compile(c.text, target.arch)).image) for c in gap.choices.values()]
    timed = gpu.finals(gap.kernel, gap.problem, images, rounds=ROUNDS)
    us = {who: seen.p50_us for who, seen in zip(gap.choices, timed, strict=True) if seen.p50_us is not None}
    return Seen(gap.kernel.name, describe(gap.problem), gap.served, us) if gap.served in us else None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", metavar="DB", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--kernel", "kernels", multiple=True, help="Only of this one; may be given several times.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=3.0, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the order in which sizes are taken.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def main(path: Path, kernels: tuple[str, ...], minutes: float, seed: int, as_json: bool) -> None:
    """Time what DB serves between its tuned points of this GPU, and what else it could serve.

    Sizes where only one configuration comes into question are counted, and not timed.

    \b
    Example:
      python -m kerngen.tuning.between tuned.sqlite --kernel w4a16_gemm
    """
    from kerngen.tuning.worker import GpuWorker, present_arch

    if present_arch() is None:
        raise UsageError("this times kernels, and there is no GPU here", hint="run it where DB was measured")
    end, found, agreed = time.monotonic() + 60 * minutes, list[Seen](), 0
    with GpuWorker() as gpu:
        target = Target.of(gpu.device())
        here = [g for g in gaps(open_source(path), target) if not kernels or g.kernel.name in kernels]
        if not here:
            raise UsageError(f"{path} has no line of tuned points for {target}", hint="kerngen db ls --db FILE")
        random.Random(seed).shuffle(here)
        cache = CompileCache()
        for gap in here:
            if len(gap.choices) == 1:
                agreed += 1
            elif time.monotonic() < end and (seen := look(gpu, gap, cache, target)) is not None:
                found.append(seen)
    if as_json:
        rows = [asdict(s) | {"regret": s.regret} for s in found]
        click.echo(json.dumps({"sizes": len(here), "one_choice": agreed, "timed": rows}))
        return
    click.echo(f"{len(here)} sizes between tuned points of {target}: {agreed} have one choice, {len(found)} were timed")
    for s in sorted(found, key=lambda s: -s.regret)[:20]:
        times = ", ".join(f"{who} {us:.2f}" for who, us in s.us.items())
        click.echo(f"  {s.regret:6.1%} {s.kernel}{s.problem}: {s.served} serves; us: {times}")
    if found:
        regrets = [s.regret for s in found]
        good = sum(r <= NOISE for r in regrets)
        click.echo(f"within {NOISE:.0%} of the best: {good} of {len(found)}; median {statistics.median(regrets):.1%}, "
                   f"worst {max(regrets):.0%}")  # fmt: skip


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m kerngen.tuning.between"))
