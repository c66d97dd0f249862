"""Values that are written to the tuning database and read from it.

Builds are facts, measurements are observations, winners are derived from both. Values here hold all fields of a problem
or configuration; rows and ids hold them as filed (see canonical_fields.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kerngen.errors import DatabaseError

if TYPE_CHECKING:
    from kerngen.arch import Arch, Device
    from kerngen.compiler.compile import Cubin, Resources
    from kerngen.tuning_db.read.ids import ProblemKey

OUTCOMES = ("ok", "invalid", "compile_failed", "wrong_result", "launch_failed", "timed_out")
PROVENANCES = ("measured", "carried", "predicted")  # the best first
BUILD_STATUSES = ("ok", "compile_failed", "uncompiled")
STAGES = ("trial", "final", "step")
TIMED = "source"  # a tag: the first digits of the source that was timed, where it is an earlier one than the build's


@dataclass(frozen=True, slots=True)
class StepKey:
    """A step of a model as the database files it: what measurements of stage `step` were made in.

    phase, batch, q_len, context, chunk: as workload.steps.Step has them. layers: how many were run. sequence: digest of
    the launches in order. weight: what it counts in the mean by which a tuned model is judged.
    """

    model: str
    arch: str
    phase: str
    batch: int
    q_len: int
    context: int
    chunk: int
    layers: int
    sequence: str
    weight: float = 1.0
    props: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.model}: {self.phase} batch={self.batch} q_len={self.q_len} context={self.context}" + (
            f" chunk={self.chunk}" if self.chunk else ""
        )


@dataclass(frozen=True, slots=True)
class Build:
    """One compile, whatever became of it: a fact.

    target: what NVRTC was asked for ("sm_90a"; "compute_70" for PTX). key: of the compile cache.
    image_sha: sha256 of the cubin or PTX, None if it failed; then `log` says why. `uncompiled`: the source is known (to
    win, by what the text of another database says), and neither its machine code nor its resources are. nvrtc: (0, 0)
    of such a one where that text names none.
    """

    id: str
    kernel: str
    arch: str
    target: str
    nvrtc: tuple[int, int]
    options: tuple[str, ...]
    config: dict[str, Any]
    static: dict[str, Any]
    source_sha: str
    status: str  # one of BUILD_STATUSES
    key: str
    image_sha: str | None
    entries: dict[str, Resources]
    log: str

    @property
    def registers(self) -> int:
        return max((r.registers for r in self.entries.values()), default=0)

    @property
    def spill_bytes(self) -> int:
        return max((r.spill_store_bytes + r.spill_load_bytes for r in self.entries.values()), default=0)

    @property
    def static_smem_bytes(self) -> int:
        return max((r.static_smem_bytes for r in self.entries.values()), default=0)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One trial of one configuration, whatever came of it: an observation, never changed once written.

    problem: from `problem_key`. config: the Config's fields.
    build_id: None only where nothing was compiled (`invalid`).
    outcome: one of OUTCOMES, with `reason` in words unless it is `ok`.
    provenance: `measured` on `device`, or `predicted` for it by the cost model that `model` names and versions, or
    `carried`: a configuration that was chosen on `device` before, by steps and sweeps that `reason` names, of which no
    figure is left. Neither the reason nor the tags, which are words about a trial, are part of its identity. What is
    predicted or carried is the same fact whoever asks: its time and run are no part of it either, and repeating it adds
    no row.
    stage: `final` for finalists that were timed again together: they outrank the trials of their run. `step` for
    those whose step was timed: with this configuration, step_us, and without, base_step_us, both in microseconds.
    step_id: of a StepKey (Store.add_step). base_id: digest of what all places of the step had without. p50_us is the
    kernel's time alone all the same.
    Times in microseconds for all launches of the kernel together; a prediction sets p50_us alone, what is carried none.
    error_abs, error_rel: largest difference from the fp32 reference; required of a measured `ok`.
    environment: driver, clocks, timer, cold or warm L2, graph or stream, host: what may change the figures.
    run: names the tuning run. at: ISO 8601 UTC; "" lets the store fill in the time of writing.
    tags: anything else worth keeping as JSON (workload, rank, trial number).
    """

    problem: ProblemKey
    arch: str
    device: Device
    config: dict[str, Any]
    build_id: str | None
    outcome: str
    provenance: str
    reason: str = ""
    stage: str = "trial"
    model: str = ""
    p50_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    min_us: float | None = None
    samples: int = 0
    error_abs: float | None = None
    error_rel: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    run: str = ""
    at: str = ""
    tags: dict[str, Any] = field(default_factory=dict)
    step_id: str | None = None
    step_us: float | None = None
    base_step_us: float | None = None
    base_id: str | None = None

    def __post_init__(self) -> None:
        _one_of("outcome", self.outcome, OUTCOMES)
        _one_of("provenance", self.provenance, PROVENANCES)
        _one_of("stage", self.stage, STAGES)
        if self.outcome != "ok":
            _require(bool(self.reason), f"outcome {self.outcome} needs its reason")
            _require(self.provenance != "carried", "what is carried was chosen: its outcome is ok")
            return
        _require(self.build_id is not None, "outcome ok needs a build_id")
        if self.provenance == "carried":
            _require(bool(self.reason), "what is carried needs its source, in `reason`")
            bare = (self.p50_us, self.model, self.stage) == (None, "", "trial")
            _require(bare, "what is carried has no time, no model and no stage")
            return
        in_step = (self.step_id, self.base_id, self.step_us or None, self.base_step_us or None)
        if self.stage == "step":
            _require(None not in in_step, "stage step needs step_id, step_us, base_step_us and base_id")
        _require(self.p50_us is not None and 0 < self.p50_us < float("inf"),
                 f"outcome ok needs a positive p50_us, not {self.p50_us}")  # fmt: skip
        if self.provenance == "measured":
            _require(self.error_abs is not None, "a measured ok needs error_abs, from the check")
        else:
            _require(bool(self.model), "a prediction needs the name of its model")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, f"{name} {value!r} is not one of {', '.join(allowed)}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise DatabaseError(f"this measurement cannot be recorded: {message}")


@dataclass(frozen=True, slots=True)
class Observation:
    """A Measurement as read back: with its id."""

    id: str
    measurement: Measurement


@dataclass(frozen=True, slots=True)
class Winner:
    """What a lookup answers: the configuration to use for `problem`, and why.

    problem: the tuned point; its dynamic value may be above that of the problem that was asked for.
    arch, device: the device it was measured on, or predicted for. latency_us: at that tuned point; None of what is
    carried, which has no time.
    margin: (next best - this) / this; below zero if it was chosen canonically within the noise; None if alone.
    reason: in words. source: which store spoke and how ("user: exact device"). why: the figures behind `reason`;
    none where a run looked it up in a file, which asks for none.
    stale: tuned on a source of an older revision of its body; `cubin` is of today's source all the same, where
    `kerngen db rebuild` made that. cubin: None where it was not kept, and has to be compiled. closure: of the kernel
    code that it was chosen for (kerngen/compiler/source_digest.py), "" where none is known.
    """

    id: str
    kernel: str
    problem: ProblemKey
    config: dict[str, Any]
    arch: Arch
    device: Device
    provenance: str
    latency_us: float | None
    build_id: str
    cubin: Cubin | None
    reason: str
    source: str
    margin: float | None = None
    stale: bool = False
    why: dict[str, Any] = field(default_factory=dict)
    closure: str = ""
