"""The ledger of a tuning run: answers trials from the tuning database, and writes new ones to it.

Rows are written in batches, at most a second apart, so that a run that is killed loses nothing but that second, and
the compile cache has its cubins.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kerngen import __version__
from kerngen.compiler.compile import DEFAULT_OPTIONS, Cubin, nvrtc_version
from kerngen.compiler.source_digest import source_digest_of
from kerngen.cost.crossover import judge_of
from kerngen.cost.predict import MODEL
from kerngen.errors import CompileError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, fields_of, static_fields
from kerngen.tuning_db.read.freshness import notes_of
from kerngen.tuning_db.read.ids import ProblemKey, canonical, digest, problem_key
from kerngen.tuning_db.read.values import Build, Measurement, StepKey, Winner
from kerngen.tuning_db.store.rows import compile_id, describe_build

if TYPE_CHECKING:
    from kerngen.tuning.objective import Objective, Outcome
    from kerngen.tuning_db import Store

FLUSH_S = 1.0


@dataclass(slots=True)
class Entry:
    """One problem as the ledger knows it. closed: the summary of an identical search that was finished, or None."""

    kernel: Kernel
    problem: Any
    key: ProblemKey
    fingerprint: str
    known: dict[str, list[Measurement]] = field(default_factory=dict)  # canonical config -> rows of earlier runs
    closed: dict[str, Any] | None = None


class Ledger:
    """Reads and writes one store for one objective, on its target."""

    def __init__(self, store: Store, objective: Objective, run: str, settings: list[Any]) -> None:
        self.store, self.objective, self.run = store, objective, run
        self.target = objective.target
        self._settings = settings
        self._rows: list[Measurement] = []
        self._flushed = time.monotonic()
        self._builds: dict[tuple[str, str], Build] = {}
        self._stored: dict[str, dict[str, Build]] = {}  # by static key, then id: those that were there
        self._unwritten: list[tuple[Build, tuple[str, ...]]] = []  # with what gives its source
        self._observed: dict[str, dict[str, list[Measurement]]] = {}
        self._closed: dict[str, dict[str, dict[str, Any]]] = {}  # fingerprint -> problem id -> summary
        self._digests: dict[str, str] = {}  # of each kernel, before anything of it was rendered
        self._rendered: dict[str, dict[str, None]] = {}  # digest -> builds that were there, found by source
        self._steps: list[tuple[StepKey, str]] = []
        self._closing: dict[tuple[str, str], tuple[ProblemKey, dict[str, Any]]] = {}
        self._winners: dict[str, list[Winner]] = {}  # by static key, derived of all that was written

    def entry(self, kernel: Kernel, problem: Any) -> Entry:
        """What is known of `problem`; `closed` if a search with the same settings and sources was finished before."""
        key = problem_key(kernel, problem)
        if kernel.name not in self._digests:
            self._digests[kernel.name] = source_digest_of(kernel)
        entry = Entry(kernel, problem, key, self._fingerprint(kernel))
        for m in self._known(kernel).get(key.id, []):
            entry.known.setdefault(canonical(m.config), []).append(m)
        if entry.fingerprint not in self._closed:
            self._closed[entry.fingerprint] = self.store.closed_searches(entry.fingerprint)
        entry.closed = self._closed[entry.fingerprint].get(key.id)
        return entry

    def _known(self, kernel: Kernel) -> dict[str, list[Measurement]]:
        """Problem id -> what earlier runs saw of it, oldest first."""
        if kernel.name not in self._observed:
            rows = self.store.measurements(
                kernel.name,
                arch=self.target.arch.name,
                device=self.target.device,
                provenance=self.objective.provenance,
            )
            found = self._observed[kernel.name] = {}
            for o in rows:
                found.setdefault(o.measurement.problem.id, []).append(o.measurement)
        return self._observed[kernel.name]

    def _fingerprint(self, kernel: Kernel) -> str:
        """Of everything that decides how a search goes: the same fingerprint, the same search."""
        settings = [self.objective.name, self.objective.sampler, MODEL, __version__, *self._settings]
        settings += [self.objective.margin, *self.objective.settings]
        where = [self.target.arch.name, fields_of(self.target.device)]
        return digest([kernel.folder_digest, nvrtc_version(), *where, *settings])

    # -- builds

    def build_of(self, kernel: Kernel, problem: Any, config: Any, source: str) -> Build | None:
        """The build of `source` with `config`, if it was compiled before (or failed to)."""
        fields, static = fields_of(config), static_fields(problem)
        key = (source, canonical(fields))
        if key not in self._builds:
            line = problem_key(kernel, problem).static_key
            if line not in self._stored:  # read once: a question for each configuration would take as long as a trial
                self._stored[line] = self.store.builds(line)
            found = self._stored[line].get(compile_id(kernel.name, source, fields, static, self.target.arch))
            if found is None or found.status == "uncompiled":
                return None
            self._builds[key] = found
            for note in self._notes(kernel, found.config):
                self._rendered.setdefault(note, {})[found.id] = None
        return self._builds[key]

    def _notes(self, kernel: Kernel, config: dict[str, Any]) -> tuple[str, ...]:
        """What gives the sources of this run; nothing where the kernel's files changed under it."""
        now = source_digest_of(kernel)
        return notes_of(now, kernel, config, self.target.arch.name) if self._digests.get(kernel.name) == now else ()

    def add_build(self, kernel: Kernel, problem: Any, config: Any, source: str, made: Cubin | CompileError) -> Build:
        """Record what compiling `source` gave, at the next `flush`: a transaction for each would take longer than a
        trial does. Blobs are kept of winners only; the compile cache has the others.
        """
        fields, static = fields_of(config), static_fields(problem)
        image, status, log = (
            (made, "ok", "")
            if isinstance(made, Cubin)
            else (None, "compile_failed", f"{made.message}\n{made.log}".strip())
        )
        build = describe_build(image, kernel.name, source, fields, static, self.target.arch, DEFAULT_OPTIONS, None,
                               status, log)  # fmt: skip
        self._unwritten.append((build, self._notes(kernel, fields) if image is not None else ()))
        self._builds[source, canonical(fields)] = build
        if time.monotonic() - self._flushed > FLUSH_S:
            self.flush()
        return build

    # -- observations

    def rows(self, entry: Entry, config: Any, build: Build) -> list[Measurement]:
        """What earlier runs wrote of `config` with this very build, the newest first."""
        return [m for m in reversed(entry.known.get(canonical(fields_of(config)), [])) if m.build_id == build.id]

    def add(
        self,
        entry: Entry,
        config: Any,
        outcome: Outcome,
        *,
        build_id: str | None,
        stage: str = "trial",
        tags: dict[str, Any] | None = None,
    ) -> None:
        """One row. build_id: None where nothing was compiled. The tag `closed` holds a summary: the search is over."""
        self._winners.pop(entry.key.static_key, None)
        tags = {"search": entry.fingerprint, **outcome.tags, **(tags or {})}
        if "closed" in tags:
            self._closing[entry.fingerprint, entry.key.id] = entry.key, tags.pop("closed")
        row = Measurement(
            problem=entry.key, arch=self.target.arch.name, device=self.target.device, config=fields_of(config),
            build_id=build_id, outcome=outcome.kind, reason=outcome.reason, p50_us=outcome.latency_us,
            stage=outcome.stage or stage, step_id=self._step_id(outcome.step),
            provenance=self.objective.provenance, run=self.run, tags=tags,
            **self.objective.row, **outcome.figures,
        )  # fmt: skip
        self._rows.append(row)
        if time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def _step_id(self, step: StepKey | None) -> str | None:
        if step is None:
            return None
        if not any(known == step for known, _ in self._steps):
            self._steps.append((step, self.store.add_step(step)))
        return next(id for known, id in self._steps if known == step)

    def flush(self) -> None:
        """Write what is pending, in one transaction."""
        if self._rows or self._rendered or self._unwritten:
            with self.store.transaction():
                for build, notes in self._unwritten:
                    self.store.file_build(build, notes=notes)
                for source_digest, build_ids in self._rendered.items():
                    self.store.note_rendered(build_ids, source_digest)
                self.store.add_measurements(self._rows)
                for (search, _), (key, summary) in self._closing.items():
                    self.store.close_search(search, key, summary)
            self._rows, self._closing, self._rendered, self._unwritten = [], {}, {}, []
        self._flushed = time.monotonic()

    def winners(self, entries: list[Entry]) -> dict[str, Winner]:
        """Derive the winners anew for the problems of `entries`. Problem id -> Winner.

        A transaction for each static problem: others that write to this database wait for none of the choosing.
        """
        self.flush()
        found: dict[str, Winner] = {}
        for kernel, static in dict.fromkeys((e.kernel.name, e.key.static_key) for e in entries):
            if static not in self._winners:
                judge = judge_of(find_kernel(kernel), self.target)
                self._winners[static] = self.store.recompute_winners(kernel, static, self.target, judge=judge)
            found |= {w.problem.id: w for w in self._winners[static]}
        return found
