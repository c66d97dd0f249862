"""Which configuration wins: the policy, as a function of what was observed. The same rows give the same answer.

1. What never wins: a trial that did not end well; a build or measurement that was revoked; a build whose source
   ever gave a wrong result for these compiled-in fields, on any device; a build whose latest launch here failed.
2. What is current beats what is stale: a build of a source that the kernel no longer renders, or with options that
   nobody compiles with any more, wins only alone.
3. Measured beats predicted. Among predictions only the newest cost model's count.
4. Finalists, timed again together, beat single trials. Where configurations were exchanged in steps of a model, the
   step decides: what is slower there than the best, or was not tried there, wins only where nothing else may
   (stepped.py).
5. A build's time is the median of its medians. Builds within the noise of the fastest are equal, and the first of
   them in canonical order wins (the default configuration, then fewest spills, then its JSON): two tunes agree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

from kerngen.tuning_db.keep.stepped import judged
from kerngen.tuning_db.serve.canonical import canonical
from kerngen.tuning_db.serve.values import Build, Measurement, Observation

NOISE_LEAST = 0.01  # two runs of one cubin on one device differ by this much
NOISE_MOST = 0.05
PREDICTED_NOISE = 0.005  # a prediction repeats exactly, but its last digits order nothing
_SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner of one tuned point, and why."""

    build_id: str
    measurement_id: str
    provenance: str
    latency_us: float
    margin: float | None
    reason: str
    why: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A build that may win at one tuned point. noise: relative, see `noise_of`."""

    build: Build
    p50_us: float
    noise: float
    typical: Observation  # the one that stands for the others
    step: float | None = None  # its steps' time over their time with what was chosen there; None if it was in none
    has_lost: bool = False  # in the step


def choose(
    observations: Sequence[Observation],
    builds: dict[str, Build],
    *,
    wrong_sources: Set[str] = frozenset(),
    revoked: Set[str] = frozenset(),
    default: dict[str, Any] | None = None,
    is_current: Callable[[Build], bool] = lambda _: True,
    weights: Mapping[str, float] | None = None,
) -> Choice | None:
    """The winner among `observations`, all of one tuned point on one device; None if nothing there may win.

    builds: by id, of every observation that has one. wrong_sources: source_sha of builds found wrong anywhere.
    revoked: ids of builds and measurements. default: the default configuration's fields.
    is_current: asked for the fastest builds only, since it may render. weights: of steps by id.
    """
    refused = Counter(o.measurement.outcome for o in observations if o.measurement.outcome != "ok")
    ranked = rank(observations, builds, wrong_sources=wrong_sources, revoked=revoked, weights=weights)
    if not ranked:
        return None
    current: Iterator[Candidate] = (c for c in ranked if is_current(c.build))
    first = next(current, None)
    stale = first is None
    if first is None:
        first, current = ranked[0], iter(ranked[1:])
    provenance = first.typical.measurement.provenance
    limit = first.p50_us * (1 + first.noise)
    near, after = [first], None
    for c in current:
        if c.p50_us > limit or c.has_lost != first.has_lost:
            after = c
            break
        near.append(c)
    winner = min(near, key=lambda c: _canonical_order(c, default))
    others = [c for c in chain(near, [after] if after else []) if c is not winner]
    following = min(others, key=lambda c: c.p50_us, default=None)
    margin = None if following is None else (following.p50_us - winner.p50_us) / winner.p50_us
    why = {
        "candidates": len(ranked),
        "stale": stale,
        "stage": winner.typical.measurement.stage,
        "noise": first.noise,
        "within_noise": len(near),
        "is_default": winner.build.config == default,
        "default_us": next((c.p50_us for c in ranked if c.build.config == default), None),
        "fastest": _brief(first),
        "next": None if following is None else _brief(following),
        "refused": dict(sorted(refused.items())),
    }
    if winner.step is not None:
        in_step = [c for c in ranked if c.step is not None]
        why["step"] = {"judged": len(in_step), "lost": sum(c.has_lost for c in in_step), "ratio": winner.step}
    reason = _words(winner, first, following, provenance, why)
    return Choice(winner.build.id, winner.typical.id, provenance, winner.p50_us, margin, reason, why)


def rank(
    observations: Sequence[Observation],
    builds: dict[str, Build],
    *,
    wrong_sources: Set[str] = frozenset(),
    revoked: Set[str] = frozenset(),
    weights: Mapping[str, float] | None = None,
) -> list[Candidate]:
    """Every build that may win, stale ones included, the fastest first, after which those that lost in a step of a
    model. Arguments as `choose`.
    """
    eligible = _eligible(observations, builds, wrong_sources, revoked)
    measured = [o for o in eligible if o.measurement.provenance == "measured"]
    verdict = judged(measured, weights or {})
    pool = _finalists(measured or _newest_model(eligible), each=bool(verdict.ratios))
    found = (
        replace(c, step=verdict.ratios.get(c.build.id), has_lost=verdict.has_lost(c.build.id))
        for c in _candidates(pool, builds)
    )
    return sorted(found, key=lambda c: (c.has_lost, c.p50_us, canonical(c.build.config), c.build.id))


def noise_of(m: Measurement) -> float:
    """The relative difference below which a p50 like `m`'s decides nothing.

    For a measurement, three standard errors of its median (1.253 sigma / sqrt(n), sigma from the 10th and 90th
    percentiles of a normal distribution, 2.563 sigma apart), within 1% to 5%.
    """
    if m.provenance == "predicted":
        return PREDICTED_NOISE
    if m.p10_us is None or m.p90_us is None or m.p50_us is None or m.samples < 1:
        return NOISE_LEAST
    error = 1.253 * (m.p90_us - m.p10_us) / 2.563 / m.samples**0.5
    return min(max(_SIGMAS * error / m.p50_us, NOISE_LEAST), NOISE_MOST)


def _eligible(
    observations: Sequence[Observation],
    builds: dict[str, Build],
    wrong_sources: Set[str],
    revoked: Set[str],
) -> list[Observation]:
    counted = [o for o in observations if o.id not in revoked]
    latest: dict[str, Observation] = {}  # of measured trials: a launch that fails now outweighs an older success
    for o in counted:
        build_id = o.measurement.build_id
        if build_id is not None and o.measurement.provenance == "measured":
            best = latest.get(build_id)
            if best is None or (o.measurement.at, o.id) > (best.measurement.at, best.id):
                latest[build_id] = o

    def may_win(o: Observation) -> bool:
        build = builds.get(o.measurement.build_id or "")
        return (
            o.measurement.outcome == "ok"
            and build is not None
            and build.status == "ok"
            and build.id not in revoked
            and build.source_sha not in wrong_sources
            and (build.id not in latest or latest[build.id].measurement.outcome == "ok")
        )

    return [o for o in counted if may_win(o)]


def _finalists(observations: list[Observation], *, each: bool) -> list[Observation]:
    """Rows of finals, where there are any. each: those of each build that has some, since more than finals decide."""
    finals = [o for o in observations if o.measurement.stage == "final"]
    if not each:
        return finals or observations
    retimed = {o.measurement.build_id for o in finals}
    return finals + [o for o in observations if o.measurement.build_id not in retimed]


def _newest_model(observations: list[Observation]) -> list[Observation]:
    newest = max((_natural(o.measurement.model) for o in observations), default=None)
    return [o for o in observations if _natural(o.measurement.model) == newest]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """roofline-10 after roofline-9."""
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in re.split(r"(\d+)", name)]


def _candidates(observations: list[Observation], builds: dict[str, Build]) -> Iterator[Candidate]:
    by_build: dict[str, list[Observation]] = {}
    for o in observations:
        by_build.setdefault(o.measurement.build_id or "", []).append(o)
    for build_id, rows in by_build.items():
        p50 = median(r.measurement.p50_us or 0.0 for r in rows)
        typical = min(rows, key=lambda r: (abs((r.measurement.p50_us or 0.0) - p50), r.id))
        yield Candidate(builds[build_id], p50, max(noise_of(r.measurement) for r in rows), typical)


def _canonical_order(c: Candidate, default: dict[str, Any] | None) -> tuple[bool, int, str, str]:
    return (c.build.config != default, c.build.spill_bytes, canonical(c.build.config), c.build.id)


def _brief(c: Candidate) -> dict[str, Any]:
    return {"build_id": c.build.id, "config": c.build.config, "us": c.p50_us}


def _words(
    winner: Candidate, first: Candidate, following: Candidate | None, provenance: str, why: dict[str, Any]
) -> str:
    how = (
        "predicted" if provenance == "predicted" else "timed again together" if why["stage"] == "final" else "measured"
    )
    count = f"{why['candidates']} {how}"
    if following is None:
        text = f"the only one of {count} that may win" if why["candidates"] > 1 else f"the only one {how}"
    elif winner is first and why["within_noise"] == 1:
        ahead = following.p50_us / winner.p50_us - 1
        text = f"fastest of {count}: {winner.p50_us:.2f} us, the next takes {ahead:.1%} longer"
    else:
        which = "the default configuration" if why["is_default"] else "the first in canonical order"
        text = (
            f"{which} of {why['within_noise']} that differ by less than {why['noise']:.1%}: "
            f"{winner.p50_us:.2f} us, the fastest {first.p50_us:.2f} us, of {count}"
        )
    if winner.step is not None and not winner.has_lost:
        text = f"of {why['step']['judged']} that were tried in the step, {why['step']['lost']} slower there: {text}"
    if why["default_us"] and not why["is_default"]:
        text += f"; the default takes {why['default_us']:.2f} us"
    return text + ("; tuned on an older source of this kernel" if why["stale"] else "")
