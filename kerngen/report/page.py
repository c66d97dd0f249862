"""The page of `kerngen db report`: what databases hold, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerngen.report.data import Facts, Wanted, gather
from kerngen.report.document import document, require_page_place, write_document
from kerngen.report.figure import Section, device_name
from kerngen.report.figures import sections
from kerngen.report.steps import shown_steps

if TYPE_CHECKING:
    from kerngen.tuning_db import Store


@dataclass(frozen=True, slots=True)
class Made:
    """A page that was written."""

    path: Path
    num_bytes: int
    facts: Facts
    sections: tuple[Section, ...]

    def sentence(self) -> str:
        figures = sum(len(s.figures) for s in self.sections)
        return (
            f"{self.path}: {figures} figures of {len(self.facts.points)} winners and {len(self.facts.trials)} rows, "
            f"{self.num_bytes / 1e6:.1f} MB"
        )

    def summary(self) -> dict[str, Any]:
        return {
            "file": str(self.path), "bytes": self.num_bytes, "stores": list(self.facts.stores),
            "winners": len(self.facts.points), "carried": self.facts.num_carried, "rows": len(self.facts.trials),
            "searches": len(self.facts.searches),
            "devices": [device_name(d) for d in self.facts.devices], "kernels": self.facts.kernels,
            "figures": {s.id: len(s.figures) for s in self.sections},
        }  # fmt: skip


def write_report(
    path: Path,
    stores: Sequence[Store],
    wanted: Wanted | None = None,
    *,
    models: Sequence[str] = (),
    title: str = "kerngen tuning report",
) -> Made:
    """The page of what `stores` hold, at `path`, whole or not at all. models: see `shown_steps`.

    Raises DatabaseError where a database cannot be read, KerngenError where the page cannot lie there, UsageError where
    that would be over a file that is no page of kerngen's.
    """
    require_page_place(path)
    facts = gather(stores, wanted)
    made = tuple(sections(facts, shown_steps(facts, models)))
    devices = [device_name(d) for d in facts.devices]
    lead = (f"{len(facts.points)} winners and {len(facts.trials)} rows of {len(facts.kernels)} kernels on "
            f"{', '.join(devices) or 'no device'}."
            + (f" {facts.num_carried} carried winners have no time, and no mark." if facts.num_carried else "")
            )  # fmt: skip
    content = document(made, title=title, lead=lead, source=f"From {', '.join(facts.stores) or 'no database'}.",
                       kernels=facts.kernels, devices=devices)  # fmt: skip
    return Made(path, write_document(path, content), facts, made)
