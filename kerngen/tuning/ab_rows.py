"""What an A/B saw, as rows of the tuning database, and as recordings (recorded.py).

Every look is a measurement whose tag `ab` says how it was made: "alone", "step" or "patch"; `board` says on which very
board. What was seen alone counts like any trial when winners are chosen next. A look in a step has the kernel's time
alone too, and names the step, its time with the candidate and without, and what else the step had; its ratio decides
nothing, for an A/B looks at a few places, where a tune decides between all. A patched source is a build of its own, and
rows with the tag `patch` never make a winner (tuning_db/store/winners.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from kerngen import __version__
from kerngen.arch import Target
from kerngen.compiler.compile import Cubin, nvrtc_version
from kerngen.compiler.source_digest import source_digest_of
from kerngen.templates.kernel import describe, fields_of, static_fields
from kerngen.tuning.ab import SAMPLES, SAMPLES_AGAIN, TARGET_MS, Compared, Gpu, Trial
from kerngen.tuning.recorded import Head, Recorded, Row, completed
from kerngen.tuning.worker import Observed
from kerngen.tuning_db import Store, problem_key
from kerngen.tuning_db.read.freshness import notes_of
from kerngen.tuning_db.read.ids import digest
from kerngen.tuning_db.read.values import Measurement, StepKey
from kerngen.workload.steps import Ratio, Step, fused_as, launch_counts
from kerngen.workload.workload import Model

FLUSH_S = 1.0
ALONE, STEP, PATCH = "alone", "step", "patch"


class Rows:
    """Writes to `store`, in batches at most a second apart. resume: what earlier runs saw of a build on this very board
    is taken in place of looking again.
    """

    def __init__(self, store: Store, target: Target, gpu: Gpu, *, resume: bool = False) -> None:
        self._store, self._target, self._resume = store, target, resume
        self.environment, self.board = gpu.environment(), gpu.uuid()
        self._run = f"ab-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid4().hex[:6]}"
        self._builds: dict[Trial, str] = {}
        self._digests: dict[str, str] = {}
        self._pending: list[Measurement] = []
        self._flushed = time.monotonic()

    def known(self, trial: Trial) -> Observed | None:
        """What an earlier run saw of this build alone, on this board; None where it is to be looked at."""
        if not self._resume:
            return None
        build, problem = self._build(trial), problem_key(trial.entry.kernel, trial.entry.problem)
        for found in reversed(self._store.measurements(problem=problem, build_id=build, provenance="measured")):
            m = found.measurement
            if m.stage == "trial" and m.tags.get("ab") in (ALONE, PATCH) and m.tags.get("board") == self.board:
                return Observed(m.outcome, m.reason, m.p50_us, m.p10_us, m.p90_us, m.min_us, m.samples, m.error_abs,
                                m.error_rel, m.tags.get("gpu", {}))  # fmt: skip
        return None

    def add(self, trial: Trial, seen: Observed, *, stage: str = "trial", **more: Any) -> None:
        """A look at a candidate. What only seems to be patched is its configuration's, which has rows. No look at the
        kernel alone tells whether steps should ask it: of a candidate that differs from the default in that it is none.
        """
        if trial.same_code or (stage != "step" and self._fuses_otherwise(trial)):
            return
        c = trial.candidate
        tags: dict[str, Any] = {"ab": PATCH if c.replace else ALONE, "board": self.board} | more.pop("tags", {})
        if c.replace:
            tags["patch"] = {"name": c.name, "replace": [list(part) for part in c.replace]}
        if seen.gpu:
            tags["gpu"] = dict(seen.gpu)
        self._pending.append(Measurement(
            problem=problem_key(trial.entry.kernel, trial.entry.problem), arch=self._target.arch.name,
            device=self._target.device, config=fields_of(c.config), build_id=self._build(trial), outcome=seen.outcome,
            reason=seen.reason, provenance="measured", stage=stage, p50_us=seen.p50_us, environment=self.environment,
            run=self._run, tags=tags, **seen.figures(), **more,
        ))  # fmt: skip
        if time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def add_step(
        self, trial: Trial, now: Trial, seen: Ratio, model: Model, step: Step, base: Mapping[tuple[str, Any], Trial],
        fused: Mapping[tuple[str, Any], bool],
    ) -> None:  # fmt: skip
        """A look at a candidate in a step that had `base` in place of its defaults, at its place `now`. fused: as in
        ab.places_of. Where the two differ in whether the step asks the kernel at all, the look decides that.
        """
        others = sorted((k, describe(p), t.candidate.label) for (k, p), t in base.items())
        config, was = trial.candidate.config, now.candidate.config
        decides = trial.entry.kernel.is_fused and config.fused != was.fused and not trial.candidate.replace
        looks = [(trial, seen.median)] + ([(now, 1.0)] if decides else [])
        for of, ratio in looks:
            self.add(of, of.best, stage="step" if decides else "trial",
                     tags={"ab": PATCH if of.candidate.replace else STEP, "ratio": ratio, "spread": seen.spread},
                     step_id=self._store.add_step(_key(model, step, self._target, fused)),
                     step_us=ratio * seen.base_us, base_step_us=seen.base_us,
                     base_id=digest(["ab", others]))  # fmt: skip

    def _fuses_otherwise(self, trial: Trial) -> bool:
        kernel, problem = trial.entry.kernel, trial.entry.problem
        return kernel.is_fused and trial.candidate.config.fused != kernel.default_config(problem, self._target).fused

    def flush(self) -> None:
        """Write what is pending, in one transaction."""
        if self._pending:
            self._store.add_measurements(self._pending)
            self._pending = []
        self._flushed = time.monotonic()

    def _build(self, trial: Trial) -> str:
        if trial not in self._builds:
            kernel, config = trial.entry.kernel, fields_of(trial.candidate.config)
            static = static_fields(trial.entry.problem)
            if kernel.name not in self._digests:
                self._digests[kernel.name] = source_digest_of(kernel)
            notes = (
                ()
                if trial.candidate.replace
                else notes_of(self._digests[kernel.name], kernel, config, self._target.arch.name)
            )
            if isinstance(trial.made, Cubin):
                self._builds[trial] = self._store.add_build(trial.made, kernel.name, trial.source, config, static,
                                                            keep_image=False, notes=notes)  # fmt: skip
            else:
                self._builds[trial] = self._store.add_build(None, kernel.name, trial.source, config, static,
                                                            arch=self._target.arch, status="compile_failed",
                                                            log=trial.made)  # fmt: skip
        return self._builds[trial]


def _key(model: Model, step: Step, target: Target, fused: Mapping[tuple[str, Any], bool]) -> StepKey:
    counts = launch_counts(model, step, target.arch, fused_as(fused, target))
    launches = sorted((k, describe(p), n) for (k, p), n in counts.items())
    layers = len(model.target.layers)
    return StepKey(model.name, target.arch.name, step.phase, step.batch, step.q_len, step.context, step.chunk, layers,
                   digest(launches), 1.0, {"of_layers": layers})  # fmt: skip


# -- recordings


def recording(compared: Compared, target: Target, rows: Rows, commit: str) -> Recorded:
    """All that was seen of a problem, as a file of recordings has it."""
    entry = compared.entry
    kernel, default = entry.kernel, compared.trials[0].candidate.config
    grid = entry.gridded(target)
    environment = rows.environment | {
        "kerngen": __version__, "nvrtc": ".".join(map(str, nvrtc_version())), "samples": SAMPLES,
        "target_ms": TARGET_MS, "samples_again": SAMPLES_AGAIN,
    }  # fmt: skip
    head = Head(
        kernel=kernel.name, name=entry.name, problem=fields_of(entry.problem), arch=target.arch.name,
        device=asdict(target.device), grid=grid.parts, default=fields_of(default),
        num_configs=len(compared.trials),
        entries=tuple(dict.fromkeys(e for b in kernel.bodies(target.arch) for e in b.args)),
        exhaustive=not entry.sample, held_out=entry.held_out, environment=environment, clocks=compared.clocks,
        folder_digest=kernel.folder_digest, commit=commit,
    )  # fmt: skip
    return completed(head, map(_row, compared.trials))


def _row(trial: Trial) -> Row:
    config, takes = trial.candidate.config, trial.made.entries if isinstance(trial.made, Cubin) else None
    if not isinstance(trial.made, Cubin):
        return Row(config, trial.seen.outcome, reason=trial.made)
    seen, again = trial.seen, trial.again
    if seen.outcome == "ok" and again is not None and again.outcome != "ok":  # it ran once: not to be called the best
        return Row(config, again.outcome, takes=takes, reason=f"at the second look: {again.reason}")
    if seen.outcome != "ok":
        return Row(config, seen.outcome, takes=takes, reason=seen.reason)
    return Row(config, "ok", seen.p50_us, seen.p10_us, seen.p90_us, None if again is None else again.p50_us,
               seen.gpu.get("sm_mhz"), takes)  # fmt: skip
