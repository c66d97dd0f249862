"""Which configuration wins: the policy, as a function of what was observed. The same rows give the same answer.

1. What never wins: a trial that did not end well, or of a patched source (`kerngen bench ab`); a build or measurement
   that was revoked; a build whose source ever gave a wrong result for these compiled-in fields, on any device; a build
   whose latest launch here failed.
2. What holds beats what is stale. A build holds where the kernel renders its source today. It also holds where the
   kernel did so when the body had the revision that it has today (Body.revision); but if the configuration was tried
   from today's source, only that result counts. What is of an older revision, or compiled with options that nobody
   compiles with any more, wins only alone.
3. Measured beats carried, and carried beats predicted. What is carried was chosen on this board before, by steps and
   sweeps of which no time is left. Among predictions only the newest cost model's count.
4. Finalists, timed again together, beat single trials of the same run or search. Where configurations were exchanged in
   steps of a model, the step decides: what is slower there than the best, or was not tried there, wins only where
   nothing else may (step_trials.py).
5. Builds of one configuration with the same machine code are one: what was measured of one holds for all, and what
   keeps one from winning keeps all. So a comment in a source costs nothing once it is built (`kerngen db rebuild`).
6. Its time is the median of its medians. Those within the noise of the fastest are equal, and the first of them in
   canonical order wins: the default configuration, of predictions then the fewest spills (a clock has seen those, and
   another compiler has others), then its JSON under the names that are filed. So two tunes agree, and so does whoever
   compiles the sources anew, and a renamed field changes no winner. What is carried has no time, so all of it is equal.
7. A prediction puts another in the default's place only where that would take PREDICTED_MARGIN longer: by less the
   model does not know better than whoever wrote the default.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

from kerngen.templates.kernel import untrimmed
from kerngen.tuning_db.read.canonical_fields import canonical_fields_of
from kerngen.tuning_db.read.ids import canonical
from kerngen.tuning_db.read.values import PROVENANCES, TIMED, Build, Measurement, Observation
from kerngen.tuning_db.store.step_trials import judged

NOISE_LEAST = 0.01  # two runs of one cubin on one device differ by this much
NOISE_MOST = 0.05
PREDICTED_NOISE = 0.005  # a prediction repeats exactly, but its last digits order nothing
# On the recordings of an H200 what is predicted to be fastest takes 5.6 % longer than the best (the median of what is
# held out), the default 1.3 %, what is chosen with this margin 0.0 % (`python -m tools.fit`).
PREDICTED_MARGIN = 0.12
_SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner of one tuned point, and why. times: us, of each configuration that might win, by canonical JSON."""

    build_id: str
    measurement_id: str
    provenance: str
    latency_us: float | None
    margin: float | None
    reason: str
    why: dict[str, Any]
    times: dict[str, float]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One machine code of one configuration, which may win at one tuned point.

    builds: all that gave it, measured or not; the one that stands for it first. p50_us: None of what is carried. noise:
    relative, see `noise_of`. rows: what was observed of any of them.
    """

    builds: tuple[Build, ...]
    p50_us: float | None
    noise: float
    rows: tuple[Observation, ...]
    step: float | None = None  # its steps' time over their time with what was chosen there; None if it was in none
    has_lost: bool = False  # in the step
    earlier: bool = False  # the build is of an earlier source, and holds

    @property
    def build(self) -> Build:
        return self.builds[0]

    @property
    def adopted(self) -> bool:
        """True if only others of its builds were measured."""
        return all(o.measurement.build_id != self.build.id for o in self.rows)

    @property
    def typical(self) -> Observation:
        """The row that stands for the others: of its own build, if there is one."""
        own = [o for o in self.rows if o.measurement.build_id == self.build.id] or self.rows
        return min(own, key=lambda o: (abs((o.measurement.p50_us or 0.0) - (self.p50_us or 0.0)), o.id))

    @property
    def provenance(self) -> str:
        return self.typical.measurement.provenance

    def longer_than(self, other: Candidate) -> float | None:
        """By which part of the other's time it takes longer; None where either has none."""
        if self.p50_us is None or other.p50_us is None:
            return None
        return (self.p50_us - other.p50_us) / other.p50_us

    def is_within(self, margin: float, first: Candidate) -> bool:
        """Whether it takes at most that part longer than `first`; what has no time does."""
        return self.p50_us is None or first.p50_us is None or self.p50_us <= first.p50_us * (1 + margin)

    def holding(self, is_current: Callable[[Build], bool], holds: Callable[[Build], bool]) -> Candidate | None:
        """Itself, with its first build that is current to stand for it, else the first that holds; None for neither."""
        for earlier, counts in enumerate((is_current, holds)):
            for build in filter(counts, self.builds):
                builds = (build, *(b for b in self.builds if b is not build))
                return replace(self, builds=builds, earlier=bool(earlier))
        return None


def choose(
    observations: Sequence[Observation],
    builds: dict[str, Build],
    *,
    wrong_sources: Set[str] = frozenset(),
    revoked: Set[str] = frozenset(),
    default: dict[str, Any] | None = None,
    is_current: Callable[[Build], bool] = lambda _: True,
    holds: Callable[[Build], bool] = lambda _: False,
    weights: Mapping[str, float] | None = None,
) -> Choice | None:
    """The winner among `observations`, all of one tuned point on one device; None if nothing there may win.

    builds: by id, of every observation that has one. wrong_sources: source_sha of builds found wrong anywhere.
    revoked: ids of builds and measurements. default: the default configuration's fields.
    is_current, holds: of a build that today's templates render, and of one that counts although they do not; both are
    asked for the fastest builds only, since they may render. weights: of steps by id.
    """
    refused = Counter(o.measurement.outcome for o in observations if o.measurement.outcome != "ok")
    ranked = rank(observations, builds, wrong_sources=wrong_sources, revoked=revoked, weights=weights)
    if not ranked:
        return None
    current = _holding(ranked, is_current, holds)
    first = next(current, None)
    for lower in PROVENANCES[PROVENANCES.index(ranked[0].provenance) + 1 :]:
        if first is None:
            rows = [o for o in observations if o.measurement.provenance == lower]
            others = rank([*rows, *_failures(observations)], builds, wrong_sources=wrong_sources, revoked=revoked)
            if (found := next(held := _holding(others, is_current, holds), None)) is not None:
                ranked, first, current = others, found, held
    stale = first is None
    if first is None:
        first, current = ranked[0], iter(ranked[1:])
    provenance = first.provenance
    near, after = [first], None
    for c in current:
        if not c.is_within(first.noise, first) or c.has_lost != first.has_lost:
            after = c
            break
        near.append(c)
    winner = min(near, key=lambda c: _canonical_order(c, default))
    is_kept = False
    if provenance == "predicted" and not stale and winner.build.config != default:
        kept = _unbeaten(ranked, first, default, is_current, holds)
        winner, is_kept = kept or winner, kept is not None
    rivals = [c for c in chain(near, [after] if after else []) if c is not winner]
    following = min(rivals, key=lambda c: c.p50_us or 0.0, default=None)
    margin = None if following is None else following.longer_than(winner)
    why = {
        "candidates": len(ranked),
        "stale": stale,
        "earlier": winner.earlier or TIMED in winner.typical.measurement.tags,
        "stage": winner.typical.measurement.stage,
        "noise": first.noise,
        "within_noise": len(near),
        "is_default": None if default is None and provenance == "carried" else winner.build.config == default,
        "default_us": next((c.p50_us for c in ranked if c.build.config == default), None),
        "fastest": _brief(first),
        "next": None if following is None else _brief(following),
        "refused": dict(sorted(refused.items())),
    }
    if is_kept:
        why["predicted_margin"] = PREDICTED_MARGIN
    if winner.adopted:
        why["adopted"] = winner.typical.measurement.build_id
    if winner.step is not None:
        in_step = [c for c in ranked if c.step is not None]
        why["step"] = {"judged": len(in_step), "lost": sum(c.has_lost for c in in_step), "ratio": winner.step}
    reason = _words(winner, first, following, provenance, why)
    times = {canonical(c.build.config): c.p50_us for c in (*reversed(ranked), winner) if c.p50_us is not None}
    return Choice(winner.build.id, winner.typical.id, provenance, winner.p50_us, margin, reason, why, times)


def _holding(
    ranked: list[Candidate], is_current: Callable[[Build], bool], holds: Callable[[Build], bool]
) -> Iterator[Candidate]:
    return (c for c in (candidate.holding(is_current, holds) for candidate in ranked) if c is not None)


def _unbeaten(
    ranked: Sequence[Candidate],
    first: Candidate,
    default: dict[str, Any] | None,
    is_current: Callable[[Build], bool],
    holds: Callable[[Build], bool],
) -> Candidate | None:
    """The default, where it is predicted to take less than PREDICTED_MARGIN longer than `first`."""
    found = next((c for c in ranked if c.build.config == default), None)
    if found is None or not found.is_within(PREDICTED_MARGIN, first):
        return None
    return found.holding(is_current, holds)


def _failures(observations: Sequence[Observation]) -> list[Observation]:
    return [o for o in observations if o.measurement.provenance == "measured" and o.measurement.outcome != "ok"]


def rank(
    observations: Sequence[Observation],
    builds: dict[str, Build],
    *,
    wrong_sources: Set[str] = frozenset(),
    revoked: Set[str] = frozenset(),
    weights: Mapping[str, float] | None = None,
) -> list[Candidate]:
    """Every machine code that may win, stale ones included, the fastest first, after which those that lost in a step of
    a model. Arguments as `choose`.
    """
    codes = _codes(builds)
    eligible = _eligible(observations, builds, codes, wrong_sources, revoked)
    measured, carried = ([o for o in eligible if o.measurement.provenance == p] for p in ("measured", "carried"))
    verdict = judged(measured, weights or {}, codes)
    pool = _finalists(measured or carried or _newest_model(eligible), codes, each=bool(verdict.ratios))
    found = (
        replace(c, step=verdict.ratios.get(codes[c.build.id]), has_lost=verdict.has_lost(codes[c.build.id]))
        for c in _candidates(pool, builds, codes)
    )
    return sorted(found, key=lambda c: (c.has_lost, c.p50_us or 0.0, _filed_config(c.build), c.build.id))


def may_win(
    observations: Sequence[Observation],
    builds: dict[str, Build],
    *,
    wrong_sources: Set[str] = frozenset(),
    revoked: Set[str] = frozenset(),
) -> set[str]:
    """The ids of the builds that nothing keeps from winning, however slow. Arguments as `choose`."""
    codes = _codes(builds)
    eligible = {
        codes[o.measurement.build_id or ""] for o in _eligible(observations, builds, codes, wrong_sources, revoked)
    }
    return {id for id, code in codes.items() if code in eligible}


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


_Code = tuple[str, str, str]  # what makes builds one: the configuration, the target, the digest of the image


def _codes(builds: dict[str, Build]) -> dict[str, _Code]:
    """By id, of every build that was made, or is yet to be."""
    made = ((id, b) for id, b in builds.items() if b.status != "compile_failed")
    return {id: (canonical(b.config), b.target, b.image_sha or id) for id, b in made}


def _eligible(
    observations: Sequence[Observation],
    builds: dict[str, Build],
    codes: dict[str, _Code],
    wrong_sources: Set[str],
    revoked: Set[str],
) -> list[Observation]:
    counted = [o for o in observations if o.id not in revoked and "patch" not in o.measurement.tags]
    refused = {code for id, code in codes.items() if id in revoked or builds[id].source_sha in wrong_sources}
    latest: dict[_Code, Observation] = {}  # of measured trials: a launch that fails now outweighs an older success
    for o in counted:
        code = codes.get(o.measurement.build_id or "")
        if code is not None and o.measurement.provenance == "measured":
            best = latest.get(code)
            if best is None or (o.measurement.at, o.id) > (best.measurement.at, best.id):
                latest[code] = o

    def counts(o: Observation) -> bool:
        code = codes.get(o.measurement.build_id or "")
        return (
            o.measurement.outcome == "ok"
            and code is not None
            and code not in refused
            and (code not in latest or latest[code].measurement.outcome == "ok")
        )

    return [o for o in counted if counts(o)]


def _finalists(observations: list[Observation], codes: dict[str, _Code], *, each: bool) -> list[Observation]:
    """Rows of finals, where there are any, and of what these were not compared with: a final outranks the trials of its
    own code, and of its own run or search. each: of its own code alone, since more than finals decide.
    """
    finals = [o for o in observations if o.measurement.stage == "final"]
    retimed = {codes[o.measurement.build_id or ""] for o in finals}
    compared = set[tuple[str, Any]]() if each else {of for o in finals for of in _compared_in(o.measurement)}
    return finals + [
        o
        for o in observations
        if codes[o.measurement.build_id or ""] not in retimed and compared.isdisjoint(_compared_in(o.measurement))
    ]


def _compared_in(m: Measurement) -> set[tuple[str, Any]]:
    """Its run, and its search: a tune that goes on later draws its finalists from the trials of both."""
    return {("run", m.run), *([("search", m.tags["search"])] if "search" in m.tags else [])}


def _newest_model(observations: list[Observation]) -> list[Observation]:
    newest = max((_natural(o.measurement.model) for o in observations), default=None)
    return [o for o in observations if _natural(o.measurement.model) == newest]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """roofline-10 after roofline-9."""
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in re.split(r"(\d+)", name)]


def _candidates(
    observations: list[Observation], builds: dict[str, Build], codes: dict[str, _Code]
) -> Iterator[Candidate]:
    rows_of: dict[_Code, list[Observation]] = {}
    for o in observations:
        rows_of.setdefault(codes[o.measurement.build_id or ""], []).append(o)
    same: dict[_Code, list[Build]] = {}
    for id, code in codes.items():
        same.setdefault(code, []).append(builds[id])
    for code, rows in rows_of.items():
        times = [r.measurement.p50_us for r in rows if r.measurement.p50_us is not None]
        p50 = median(times) if times else None
        typical = min(
            rows, key=lambda r: (abs((r.measurement.p50_us or 0.0) - (p50 or 0.0)), r.id)
        ).measurement.build_id
        measured = {r.measurement.build_id for r in rows}
        made = sorted(same[code], key=lambda b: (b.id != typical, b.id not in measured, b.id))
        yield Candidate(tuple(made), p50, max(noise_of(r.measurement) for r in rows), tuple(rows))


def _canonical_order(c: Candidate, default: dict[str, Any] | None) -> tuple[bool, int, str, str]:
    spills = c.build.spill_bytes if c.provenance == "predicted" else 0
    return (c.build.config != default, spills, _filed_config(c.build), c.build.id)


def _filed_config(build: Build) -> str:
    """JSON of all fields of its configuration by the names that they are filed under: renaming one changes no order."""
    return canonical(untrimmed(build.config, canonical_fields_of(build.kernel).config))


def _brief(c: Candidate) -> dict[str, Any]:
    return {"build_id": c.build.id, "config": c.build.config, "us": c.p50_us}


def _words(
    winner: Candidate, first: Candidate, following: Candidate | None, provenance: str, why: dict[str, Any]
) -> str:
    how = "timed again together" if why["stage"] == "final" else provenance
    count = f"{why['candidates']} {how}"
    which = "the default configuration" if why["is_default"] else "the first in canonical order"
    if winner.p50_us is None or first.p50_us is None:
        text = f"carried: {winner.typical.measurement.reason}"
        if following is not None:
            text += f"; {which} of {count}, none of which has a time"
    elif following is None or following.p50_us is None:
        text = f"the only one of {count} that may win" if why["candidates"] > 1 else f"the only one {how}"
    elif "predicted_margin" in why:
        text = (
            f"the default configuration, {winner.p50_us:.2f} us: the fastest of {count}, {first.p50_us:.2f} us, is not "
            f"{why['predicted_margin']:.0%} ahead, and by less a prediction puts nothing in its place"
        )
    elif winner is first and why["within_noise"] == 1:
        ahead = following.p50_us / winner.p50_us - 1
        text = f"fastest of {count}: {winner.p50_us:.2f} us, the next takes {ahead:.1%} longer"
    else:
        text = (
            f"{which} of {why['within_noise']} that differ by less than {why['noise']:.1%}: "
            f"{winner.p50_us:.2f} us, the fastest {first.p50_us:.2f} us, of {count}"
        )
    if winner.step is not None and not winner.has_lost:
        text = f"of {why['step']['judged']} that were tried in the step, {why['step']['lost']} no faster there: {text}"
    if why["default_us"] and not why["is_default"]:
        text += f"; the default takes {why['default_us']:.2f} us"
    if winner.adopted:
        text += f"; {how.split()[0]} on a build of another source with the same machine code"
    if why["stale"]:
        return f"{text}; tuned on an older source of this kernel"
    return text + ("; tuned on an earlier source, of the revision that its body has today" if why["earlier"] else "")
