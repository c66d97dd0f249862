"""Ranks the builds at the tuned points of one static problem by a database's observations, on every board."""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.tuning_db.read.values import Observation, Winner
from kerngen.tuning_db.store.store import Store
from kerngen.tuning_db.store.winners import Candidate, rank

_Point = tuple[str, str, str, int]  # problem id, arch, device name, SM count


@dataclass(frozen=True, slots=True)
class Ranking:
    """Of one tuned point on one board. candidates: as `winners.rank` has them."""

    observations: list[Observation]
    candidates: list[Candidate]

    def candidate(self, build_id: str) -> Candidate | None:
        """The machine code that this build gave, whichever of its builds stands for it."""
        return next((c for c in self.candidates if any(b.id == build_id for b in c.builds)), None)


class Rankings:
    """Reads the database once, here. observations: all that there are of these compiled-in fields."""

    def __init__(self, store: Store, kernel: str, static_key: str) -> None:
        self._builds, self._wrong = store.builds(static_key), store.wrong_sources(static_key)
        self._revoked = store.revoked().keys()
        self._weights = {id: step.weight for id, step in store.steps().items()}
        self.observations = store.measurements(kernel, static_key=static_key)
        self._points: dict[_Point, list[Observation]] = {}
        for o in self.observations:
            m = o.measurement
            self._points.setdefault((m.problem.id, m.arch, m.device.name, m.device.num_sms), []).append(o)

    def of(self, winner: Winner) -> Ranking:
        """Of the point and the board that `winner` is of."""
        at = winner.problem.id, winner.arch.name, winner.device.name, winner.device.num_sms
        here = self._points.get(at, [])
        ranked = rank(here, self._builds, wrong_sources=self._wrong, revoked=self._revoked, weights=self._weights)
        return Ranking(here, ranked)
