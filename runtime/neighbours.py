"""Problems near in shape, and what won there: candidates for a problem that no database has tuned.

Two problems are of one kind if all agrees that is no size: dtypes, flags, `head_dim`, `group_size`, whether there is a
window. Sizes (n, k, heads, experts, tokens, keys) are as far apart as their ratio. The tuner's neighbours are by the
same distance (kerngen/tuning/neighbours.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING, Any

from kerngen.arch import Target
from kerngen.errors import DatabaseError, KerngenError
from kerngen.templates.kernel import Kernel, fields_of
from kerngen.tuning_db.read.boards import PerBoard, at_hand
from kerngen.tuning_db.read.ranks import BEYOND, rank_of
from kerngen.tuning_db.read.winner_table import why_unfit

if TYPE_CHECKING:
    from kerngen.tuning_db import Winner
    from kerngen.tuning_db.read.source import Source

log = logging.getLogger(__name__)

# Whole numbers that are no sizes: another value is another kind of problem.
NO_SIZES = frozenset({
    "head_dim", "full_head_dim", "group_size", "page_size", "bits", "top_k", "num_rotated_pairs",
    "num_full_rotated_pairs", "page_heads",
})  # fmt: skip
FAR = 2.0  # octaves in one size: what is further is no neighbour. A quarter of a matrix is near
CLOSE = 1.0  # octaves in one size: half of a matrix is close
# What a close neighbour's winner may be predicted to take more than the kernel's own choice, as a part of that: it was
# measured, and the model is off by more in the median of what is held out (docs/prediction.md).
NEARLY_EQUAL = 0.05


@dataclass(frozen=True, slots=True)
class Shape:
    """kind: names and values that must agree. sizes: logarithms (base 2), in the order of the names."""

    kind: tuple[tuple[str, Any], ...]
    sizes: tuple[float, ...]

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Shape:
        kind: list[tuple[str, Any]] = []
        sizes: list[float] = []
        for name, value in sorted(fields.items()):
            if isinstance(value, bool) or not isinstance(value, int) or name in NO_SIZES:
                kind.append((name, value))
            else:
                kind.append((name, value > 0))
                sizes.append(log2(max(value, 1)))
        return Shape(tuple(kind), tuple(sizes))

    def is_near(self, other: Shape) -> bool:
        """Whether no size is further apart than FAR; both are of one kind. all() takes twice as long."""
        for a, b in zip(self.sizes, other.sizes, strict=True):  # noqa: SIM110
            if not -FAR <= a - b <= FAR:
                return False
        return True

    def octaves(self, other: Shape) -> tuple[float, ...]:
        """How far apart each size is; both are of one kind."""
        return tuple(abs(a - b) for a, b in zip(self.sizes, other.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What won elsewhere. octaves: how far that is in each size."""

    winner: Winner
    config: Any
    octaves: tuple[float, ...]

    @property
    def is_close(self) -> bool:
        return max(self.octaves, default=0.0) <= CLOSE


class Neighbourhood:
    """What `sources` have measured of a kernel for `target`, read once. Predictions are left out: the model makes them
    anew.
    """

    def __init__(self, sources: Sequence[Source | PerBoard], kernel: Kernel, target: Target) -> None:
        self.kernel, self.target = kernel, target
        self._of_kind: dict[tuple[tuple[str, Any], ...], list[tuple[Shape, Any, Winner]]] = {}
        for source in at_hand(sources, target):
            try:
                revoked = source.revoked().keys()
                winners = [w for w in source.winners(kernel.name) if w.build_id not in revoked]
            except DatabaseError as e:
                log.warning("%s; looking on without it", e)
                continue
            for w in winners:
                if w.provenance != "predicted" and rank_of(w, target.device) != BEYOND:
                    self._add(w)

    def _add(self, winner: Winner) -> None:
        try:
            shape = Shape.of(fields_of(self.kernel.problem_type(**winner.problem.flat)))
            config = self.kernel.config_type(**winner.config)
        except (TypeError, KerngenError):  # of an older kernel, which had other fields
            return
        self._of_kind.setdefault(shape.kind, []).append((shape, config, winner))

    def of(self, problem: Any) -> list[Neighbour]:
        """The neighbours of `problem` whose winners can run it, the nearest first; of those that agree the nearest.

        Which of them serves depends on none of the others, so that whoever has it alone chooses as whoever has all.
        """
        shape = Shape.of(fields_of(problem))
        found = [
            Neighbour(winner, config, shape.octaves(other))
            for other, config, winner in self._of_kind.get(shape.kind, ())
            if shape.is_near(other)
        ]
        found.sort(key=lambda n: (sum(n.octaves), n.winner.id))
        nearest: dict[Any, Neighbour] = {}
        for n in found:
            nearest.setdefault(n.config, n)
        return [n for n in nearest.values() if why_unfit(self.kernel, problem, n.config, self.target) is None]


def preferred(
    kernel: Kernel, problem: Any, target: Target, default: Any, near: Sequence[Neighbour]
) -> Neighbour | None:
    """Of `near` what should run `problem` in place of `default`; None where that should.

    Where the model chose the default among candidates: the nearest that is close and predicted to take hardly longer,
    else the fastest by the model. A default that the spec chose by itself gives way where a prediction would replace
    it: to what is so far ahead.
    """
    from kerngen.cost.choose import ranked  # the cost model knows kernels, as Kernel.default_config does it
    from kerngen.tuning_db.store.winners import PREDICTED_MARGIN

    if not near:
        return None
    (default_us, _), *timed = ranked(kernel, problem, target, [default, *(n.config for n in near)])
    ranks_candidates = hasattr(kernel.spec, "candidates")
    for (us, _), n in zip(timed, near, strict=True):
        if ranks_candidates and n.is_close and us <= default_us * (1 + NEARLY_EQUAL):
            return n
    us, at = min((us, i) for i, (us, _) in enumerate(timed))
    return near[at] if us * (1 if ranks_candidates else 1 + PREDICTED_MARGIN) < default_us else None


def is_slower(kernel: Kernel, problem: Any, target: Target, config: Any, default: Any) -> bool:
    """Whether a prediction puts `default` in the place of `config`, which was measured at another size."""
    from kerngen.cost.choose import ranked  # see above
    from kerngen.tuning_db.store.winners import PREDICTED_MARGIN

    if why_unfit(kernel, problem, default, target) is not None:
        return False
    (default_us, _), (us, _) = ranked(kernel, problem, target, [default, config])
    return us > default_us * (1 + PREDICTED_MARGIN)
