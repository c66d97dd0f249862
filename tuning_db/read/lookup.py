"""One answer to one problem, and on a miss what came closest. winner_table.py has the order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kerngen.arch import Target
from kerngen.errors import DatabaseError, TuningMiss
from kerngen.templates.kernel import Kernel, describe
from kerngen.tuning_db.read.boards import PerBoard, at_hand
from kerngen.tuning_db.read.ids import ProblemKey, problem_key
from kerngen.tuning_db.read.source import Source
from kerngen.tuning_db.read.values import Winner
from kerngen.tuning_db.read.winner_table import WinnerTable

NEAREST = 3  # entries that a miss tells of


def lookup(
    sources: Sequence[Source | PerBoard],
    kernel: Kernel,
    problem: Any,
    target: Target,
    *,
    strict: bool = False,
) -> Winner | None:
    """The configuration to run `problem` with on `target`, with its cubin if that was kept and is current.

    None, or with `strict` TuningMiss with the nearest entries, where nothing serves it.
    """
    table = WinnerTable(sources, kernel, problem, target)
    if (answer := table.answer(problem)) is not None:
        return answer
    if strict and (passed := table.passed_over(problem)) is not None:
        raise TuningMiss(
            f"the default configuration serves {kernel.name}{describe(problem)} on {target}: between two tuned points "
            f"it was judged to be faster than their winners, {passed.id[:16]} among them"
        )
    if strict:
        raise TuningMiss(miss_report(sources, kernel, problem, target), hint=_fill(kernel, target))
    return None


def _fill(kernel: Kernel, target: Target) -> str:
    return f"fill it: kerngen tune --arch {target.arch} --model NAME --kernel {kernel.name}"


def miss_report(sources: Sequence[Source | PerBoard], kernel: Kernel, problem: Any, target: Target) -> str:
    """Why nothing serves `problem`: where it was looked for, and the nearest entries with the fields that differ."""
    key = problem_key(kernel, problem)
    wanted = _flat(key, kernel) | {"arch": target.arch.name, "device": target.device.name}
    counts, near = [], []
    for source in at_hand(sources, target):
        try:
            winners = source.winners(kernel.name)
        except DatabaseError as e:
            counts.append(f"{source.name} (unreadable: {e.message})")
            continue
        counts.append(f"{source.name} ({len(winners)} of {kernel.name})")
        for w in winners:
            has = _flat(w.problem, kernel) | {"arch": w.arch.name, "device": w.device.name}
            differing = [n for n in sorted(wanted.keys() | has.keys()) if wanted.get(n) != has.get(n)]
            near.append((_distance(differing, wanted, has), w.id, source.name, differing, has))
    near.sort(key=lambda n: n[:2])
    lines = [f"no record for {kernel.name}{describe(problem)} on {target}",
             f"  looked in: {', '.join(counts) or 'no database'}"]  # fmt: skip
    for _, id, name, differing, has in near[:NEAREST]:
        pairs = ", ".join(f"{n} {has.get(n)} there, {wanted.get(n)} asked" for n in differing)
        lines.append(f"  near: {id[:12]} in {name}: {pairs or 'the same, but it could not be served'}")
    return "\n".join(lines)


def _flat(key: ProblemKey, kernel: Kernel) -> dict[str, Any]:
    flat = {**key.static, **key.runtime}
    return flat if key.dynamic is None else flat | {kernel.problem_type.DYNAMIC: key.dynamic}


def _distance(differing: list[str], wanted: dict[str, Any], has: dict[str, Any]) -> tuple[int, float]:
    """How many fields differ, then how far apart their numbers are, in octaves."""
    octaves = 0.0
    for name in differing:
        a, b = wanted.get(name), has.get(name)
        if isinstance(a, int) and isinstance(b, int) and a > 0 and b > 0:
            octaves += abs(a.bit_length() - b.bit_length()) + 0.01
        else:
            octaves += 8.0
    return len(differing), octaves
