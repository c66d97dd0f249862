"""One HTML file with everything in it. It asks for nothing over a network, and its own policy forbids it to."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from kerngen import __version__
from kerngen.files import publish, require_place, unwritable
from kerngen.report.facts import Facts, Wanted, gather
from kerngen.report.figure import Section, device_name
from kerngen.report.figures import sections
from kerngen.report.steps import shown_steps

if TYPE_CHECKING:
    from kerngen.tuning_db import Store

HERE = Path(__file__).parent


def page(facts: Facts, made: Sequence[Section], *, title: str, at: datetime | None = None) -> str:
    """The whole file. at: when it was made; None for now."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    return _template().render(
        title=title, facts=facts, sections=made, style=style, script=script,
        policy=policy, version=__version__, at=(at or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        devices=[device_name(d) for d in facts.devices], kernels=facts.kernels,
    )  # fmt: skip


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
            "winners": len(self.facts.points), "rows": len(self.facts.trials), "searches": len(self.facts.searches),
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

    Raises DatabaseError where a database cannot be read, KerngenError where the page cannot lie there.
    """
    require_place(path)
    facts = gather(stores, wanted)
    made = tuple(sections(facts, shown_steps(facts, models)))
    content = page(facts, made, title=title).encode()
    try:
        publish(content, path)
    except OSError as e:
        raise unwritable(path, e) from e
    return Made(path, len(content), facts, made)


@cache
def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("page.html.jinja")
