"""`kerngen db rebuild`: what a database's winners are made of, compiled anew after a change of a kernel's source."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from kerngen.cli.db.common import changing, echo_json
from kerngen.cli.tables import echo
from kerngen.system.cores import usable_cores

if TYPE_CHECKING:
    from kerngen.bundles.rebuild import Rebuilt


@click.command()
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be given several times.")
@click.option("--arch", "arch_names", default=None, help="Only these arches: sm70,sm90.")
@click.option("--db", "url", default=None, metavar="FILE|URL", help="The database to bring up. Default: the user's.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@click.option("--json", "as_json", is_flag=True, help="Print what became of each winner as JSON.")
def rebuild(kernels: tuple[str, ...], arch_names: str | None, url: str | None, jobs: int | None, as_json: bool) -> None:
    """Compile the winners anew after a change of their kernels' source. No GPU is needed.

    Where the machine code is the same, what was measured holds for the new build, and the winner says so: a comment
    costs no tuning. What changed is named, to be tuned again. Exit code 1 if a build fails.

    Example: kerngen db rebuild --kernel rmsnorm --arch sm90
    """
    from kerngen.arch import parse_arches
    from kerngen.bundles.rebuild import FAILED
    from kerngen.bundles.rebuild import rebuild as rebuild_all
    from kerngen.compiler.cache import CachedCompiler
    from kerngen.system.progress import Reporter
    from kerngen.templates import find_kernel

    names = {find_kernel(n).name for k in kernels for n in k.split(",")}
    arches = None if arch_names is None else {a.name for a in parse_arches(arch_names)}
    with changing(url) as store, CachedCompiler(jobs or usable_cores()) as compiler:
        winners = [
            w for w in store.winners() if (not names or w.kernel in names) and (arches is None or w.arch.name in arches)
        ]
        with Reporter("rebuild", quiet=as_json) as bar:
            found = rebuild_all(store, winners, compiler, bar)
        if as_json:
            echo_json([_row(r) for r in found])
        else:
            _print(found, store.where)
    if any(r.outcome == FAILED for r in found):
        raise click.exceptions.Exit(1)


def _row(r: Rebuilt) -> dict[str, Any]:
    w = r.winner
    return {
        "winner": w.id, "kernel": w.kernel, "arch": w.arch.name, "device": w.device.name, "problem": w.problem.fields,
        "config": w.config, "outcome": r.outcome, "reason": r.reason,
        "now": None if r.now is None else {"winner": r.now.id, "config": r.now.config, "stale": r.now.stale,
                                           "reason": r.now.reason},
    }  # fmt: skip


def _print(found: list[Rebuilt], where: str) -> None:
    from kerngen.bundles.rebuild import ADOPTED, CHANGED, CURRENT, FAILED, REFUSED

    what = {
        CURRENT: "have a build of today's source",
        ADOPTED: "were built anew to the same machine code: what was measured holds",
        CHANGED: "were built anew to other machine code: their configurations stay, tuned on an older source",
        REFUSED: "are no longer taken by their kernels",
        FAILED: "do not compile",
    }
    counts = Counter(r.outcome for r in found)
    echo(f"{len(found)} winners in {where}")
    for outcome, words in what.items():
        if counts[outcome]:
            echo(f"{counts[outcome]:6} {words}")
    reasons = Counter((r.outcome, r.winner.kernel, r.winner.arch.name, r.reason) for r in found if r.reason)
    for (outcome, kernel, arch, reason), count in reasons.items():
        echo(f"{outcome}: {kernel} on {arch} ({count}): {reason}")
    changed = sorted({(r.winner.arch.name, r.winner.kernel) for r in found if r.now is not None and r.now.stale})
    for arch in dict.fromkeys(a for a, _ in changed):
        echo(f"tune again: kerngen tune --arch {arch} --model NAME --kernel "
                   + ",".join(k for a, k in changed if a == arch))  # fmt: skip
