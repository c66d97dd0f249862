"""One step of a model: the launches that it makes, in order, and the steps by which a tuned model is judged.

A step is written down as a workload is (workload.py, which is the union of many): the model's own code runs on
tensors without storage, with the recording executor. Needs no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from kerngen.arch import Arch, Target
from kerngen.errors import UsageError
from kerngen.runtime.config import MAX_MTP_DRAFTS, NO_DRAFTER, DrafterConfig, LayerConfig, ModelConfig
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.selection import default_selector
from kerngen.templates import find_kernel

if TYPE_CHECKING:
    from kerngen.runtime.cache import KVCache
    from kerngen.templates.kernel import Kernel
    from kerngen.workload.workload import Item, Model, Workload

KEPT_PERIODS = 2  # of layers that repeat: each kind of layer follows, and is followed by, what it does in the model
Kind = tuple[str, int, int, int]  # of a step, whatever its context: phase, batch, q_len, chunk


@dataclass(frozen=True, slots=True)
class Step:
    """What a model does between two answers. phase: decode, verify, prefill or draft (one of the drafter's forwards).

    q_len: tokens a sequence, 0 in prefill; of a drafter that drafts a block at once how many of its drafts are chosen,
    1 for all. context: the most keys that a sequence has, in prefill its chunk's own
    included. chunk: tokens of a prefill's, else 0.
    """

    phase: str
    batch: int
    q_len: int
    context: int
    chunk: int = 0

    @staticmethod
    def decode(batch: int, context: int) -> Step:
        return Step("decode", batch, 1, context)

    @staticmethod
    def verify(batch: int, q_len: int, context: int) -> Step:
        """The target's part of a step with drafts: q_len - 1 of them and the last known token."""
        return Step("verify", batch, q_len, context)

    @staticmethod
    def draft(batch: int, context: int, count: int = 1) -> Step:
        """count: of a block's drafts; 1 for all."""
        return Step("draft", batch, count, context)

    @staticmethod
    def prefill(chunk: int, context: int) -> Step:
        """`chunk` tokens of one sequence, the last of its `context`, whose earlier keys are in the cache."""
        return Step("prefill", 1, 0, context, chunk)

    @property
    def kind(self) -> Kind:
        return self.phase, self.batch, self.q_len, self.chunk

    @property
    def name(self) -> str:
        """ "decode, batch 8, context 512", "verify 4 tokens, batch 1, context 512", "prefill 512 tokens of 2048"."""
        if self.phase == "prefill":
            return f"prefill {self.chunk} tokens of {self.context}"
        what = f"verify {self.q_len} tokens" if self.phase == "verify" else self.phase
        if self.phase == "draft" and self.q_len > 1:
            what = f"draft {self.q_len} tokens"
        return f"{what}, batch {self.batch}, context {self.context}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of one step's time to another's, from runs in turn. median: of the pairs' ratios. spread: the standard error of
    that. base_us: the base's step, in microseconds.
    """

    median: float
    spread: float
    base_us: float


@dataclass(frozen=True, slots=True)
class Launched:
    """One call of a kernel within a step. where: its place in the model."""

    kernel: str
    problem: Any
    where: str


Note = Callable[[str, Any, str], None]  # kernel, problem, place
NoteCollective = Callable[[str, int], None]  # kind, bytes that the rank gives
# Whether a step asks this kernel for this problem, and not those that it replaces: as Selector.fuses.
Fuses = Callable[["Kernel", Any], bool]


class Recorder:
    """A model on tensors without storage, whose steps tell their calls.

    dtype: of activations, "bf16" or "fp16". arch: None for all without bulk copies, which ask for the same.
    """

    def __init__(
        self, target: ModelConfig, drafter: DrafterConfig | DflashConfig | None, dtype: str, arch: Arch | None
    ) -> None:
        import torch

        from kerngen.runtime.cache import KVCache
        from kerngen.runtime.drafters import drafter_for
        from kerngen.runtime.executors.layer_dedup import dedupe
        from kerngen.runtime.executors.record import Record
        from kerngen.runtime.executors.shapes import ShapesAlone
        from kerngen.runtime.model import Gemma4
        from kerngen.runtime.ops.kernels import KernelOps
        from kerngen.runtime.weights.synthetic import synthetic_drafter, synthetic_model
        from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE
        from kerngen.workload.forwards import Forwards

        self.outside: dict[str, None] = {}  # names in `runtime.fallbacks.FALLBACKS` that torch computed
        self._note: Note = _unheard
        self._other: Note = _unheard
        self._collective: NoteCollective = _unheard_collective
        with torch.inference_mode(), ShapesAlone():
            on = None if arch is None else Target.of(arch)
            self._executor = Record(
                self._called, self._unserved, on, target.world, note_other=self._not_called,
                note_collective=self._exchanged,
            )  # fmt: skip
            ops = KernelOps(self._executor, TORCH_DTYPE[dtype])
            model = Gemma4(target, synthetic_model(target, ops), ops)
            dedupe(model, self._executor)
            drafting = None if drafter is None else drafter_for(drafter, synthetic_drafter(drafter, ops), model)
            dedupe(drafting, self._executor)
            self.policy = NO_DRAFTER if drafter is None else drafter.policy
            # of which problems show the tables alone
            self._pool = KVCache.whole(target, ops, batch=1, max_len=1, drafter_layers=self.policy.cache_layers)
        self._forwards = Forwards(model, drafting, self._cache)
        self.config, self.has_drafter = target, drafter is not None
        # Of a model without a drafter what others verify, too.
        self.most_drafts = self.policy.max_drafts if drafter is not None else MAX_MTP_DRAFTS

    def record(
        self, step: Step, note: Note, beside: Note | None = None, *, other: Note | None = None,
        fuses: Fuses | None = None, collective: NoteCollective | None = None,
    ) -> None:  # fmt: skip
        """Tell `note` every call of a greedy `step`, in order; `beside`, what sampling asks in place of its choice.

        fuses: decides where the step asks one kernel or those that it replaces; None for the default configurations.
        other: told the ones that it does not ask there. collective: told the kind and the bytes of each sum, gather and
        choice that the rank of a divided model makes with the others. Raises UsageError for a step that the model
        cannot take.
        """
        import torch

        from kerngen.runtime.executors.shapes import ShapesAlone

        self._require(step)
        self._executor.forget()
        self._executor.decide = fuses
        with torch.inference_mode(), ShapesAlone():
            run, choose = self._forwards.prepare(step)
            self._note, self._other = note, other or _unheard
            self._collective = collective or _unheard_collective
            run()
            self._collective = _unheard_collective
            if beside is not None and choose is not None:
                self._note = beside
                choose()
        self._note = self._other = _unheard

    def _require(self, step: Step) -> None:
        if step.phase == "draft" and not self.has_drafter:
            raise UsageError(f"{step.name}: the model has no drafter", hint="give its folder: --draft")
        if step.phase == "prefill":
            if not 1 <= step.chunk <= step.context:
                raise UsageError(f"{step.name}: a chunk has from 1 to all of its context's tokens")
        elif not 1 <= step.q_len <= (most := 1 + self.most_drafts):
            raise UsageError(f"{step.name}: a step takes 1 to {most} tokens a sequence")

    def _called(self, kernel: str, problem: Any, where: str) -> None:
        self._note(kernel, problem, where)

    def _not_called(self, kernel: str, problem: Any, where: str) -> None:
        self._other(kernel, problem, where)

    def _exchanged(self, kind: str, num_bytes: int) -> None:
        self._collective(kind, num_bytes)

    def _unserved(self, name: str) -> None:
        self.outside[name] = None

    def _cache(self, step: Step) -> KVCache:
        """As KVCache.whole, of the pages of the one pool."""
        import torch

        pages = -(-step.context // self._pool.page_size)
        tables = self._pool.tables
        return self._pool.with_tables(torch.empty(2, step.batch, pages, dtype=tables.dtype, device=tables.device))


def _unheard(kernel: str, problem: Any, where: str) -> None:
    """Whoever records a step says who is told."""


def _unheard_collective(kind: str, num_bytes: int) -> None:
    """As _unheard."""


@cache
def recorder(target: ModelConfig, drafter: DrafterConfig | DflashConfig | None, arch: Arch) -> Recorder:
    """The one of a model in the dtype that it has on `arch` (fp16 on sm70 and sm75, else bf16)."""
    return _recorder(target, drafter, arch.dtype, arch if arch.has_tma else None)


@cache
def _recorder(
    target: ModelConfig, drafter: DrafterConfig | DflashConfig | None, dtype: str, arch: Arch | None
) -> Recorder:
    return Recorder(target, drafter, dtype, arch)


def sequence(model: Model, step: Step, arch: Arch, fuses: Fuses | None = None) -> tuple[Launched, ...]:
    """The kernels that a greedy `step` of `model` calls on `arch`, in order.

    A problem is the very one that is called; which tuned point serves it, `Workload.serving` says. fuses: as in
    Recorder.record; None for the defaults of the board that `arch` is mostly of. Raises UsageError for a step that the
    model cannot take.
    """
    if step.context > model.target.max_positions:
        raise UsageError(f"{step.name}: {model.name} has {model.target.max_positions} positions")
    found: list[Launched] = []
    recorder(model.target, model.drafter, arch).record(
        step, lambda *called: found.append(Launched(*called)), fuses=fuses
    )
    return tuple(found)


def launch_counts(model: Model, step: Step, arch: Arch, fuses: Fuses | None = None) -> Counter[tuple[str, Any]]:
    """(kernel, problem) -> launches in `step` of `model` on `arch`, in the order in which each is first met. fuses, and
    what it raises: as `sequence`.
    """
    return Counter((launched.kernel, launched.problem) for launched in sequence(model, step, arch, fuses))


def fused_as(answers: Mapping[tuple[str, Any], bool], target: Target) -> Fuses:
    """What `answers` says of (kernel, problem); of what is not there, as the default configurations on `target` do."""
    default = default_selector(target).fuses

    def fuses(kernel: Kernel, problem: Any) -> bool:
        known = answers.get((kernel.name, problem))
        return default(kernel, problem) if known is None else known

    return fuses


def unasked(model: Model, step: Step, arch: Arch, fuses: Fuses | None = None) -> dict[tuple[str, Any], int]:
    """(kernel, problem) -> launches of the kernels that `step` might ask in place of several, and does not. fuses, and
    what it raises: as `sequence`.
    """
    found: Counter[tuple[str, Any]] = Counter()

    def other(kernel: str, problem: Any, where: str) -> None:
        if find_kernel(kernel).is_fused:
            found[kernel, problem] += 1

    recorder(model.target, model.drafter, arch).record(step, _unheard, other=other, fuses=fuses)
    return found


# -- layers that repeat


@dataclass(frozen=True, slots=True)
class Repeat:
    """How the step of a shortened model stands for the whole model's.

    layers: the whole model's layers that are kept. counts: (kernel, problem) -> its launches in the whole step and in
    the shortened one, which has the same problems.
    """

    layers: tuple[int, ...]
    num_layers: int
    counts: Mapping[tuple[str, Any], tuple[int, int]]

    @property
    def is_whole(self) -> bool:
        return len(self.layers) == self.num_layers

    def times(self, kernel: str, problem: Any) -> float:
        """How many launches of the whole step one launch of the shortened step stands for.

        What a configuration of this problem gains in the shortened step, times this, it gains in the whole one.
        """
        whole, kept = self.counts[kernel, problem]
        return whole / kept


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers first to first + period * times, in which every period is like the one before."""

    first: int
    period: int
    times: int

    def kept(self, times: int) -> range:
        return range(self.first, self.first + self.period * min(times, self.times))


def shortened(model: Model, step: Step, arch: Arch, fuses: Fuses | None = None) -> tuple[Model, Repeat]:
    """`model` with as few of its layers as stand for all of them in `step`, and how they do.

    Of layers that repeat (five sliding ones and a full one, ten times) KEPT_PERIODS periods are kept. The kept ones
    stand for all if the whole step's launches are the shortened one's and those of a period as often as it was left
    out. Where they are not (one kernel takes all layers, or reads something as wide as there are layers) the model is
    returned as it is. fuses: as in `sequence`.
    """
    runs = _runs([_like(layer) for layer in model.target.layers])
    every = tuple(range(len(model.target.layers)))
    whole = launch_counts(model, step, arch, fuses)
    as_it_is = model, Repeat(every, len(every), {key: (count, count) for key, count in whole.items()})
    kept = dict.fromkeys(runs, KEPT_PERIODS)
    layers = tuple(_kept(kept))
    if layers == every:
        return as_it_is
    short = _of_layers(model, layers)
    counts = launch_counts(short, step, arch, fuses)
    total = Counter(counts)
    for run in runs:
        if run.times > KEPT_PERIODS:
            fewer = _of_layers(model, tuple(_kept(kept | {run: KEPT_PERIODS - 1})))
            without = launch_counts(fewer, step, arch, fuses)
            for key in counts.keys() | without.keys():
                total[key] += (run.times - KEPT_PERIODS) * (counts[key] - without[key])
    if counts.keys() != whole.keys() or any(total[key] != count for key, count in whole.items()):
        return as_it_is
    return short, Repeat(layers, len(every), {key: (count, counts[key]) for key, count in whole.items()})


def _like(layer: LayerConfig) -> LayerConfig:
    """What layers that repeat have in common: all but which layers they are."""
    return replace(layer, index=0, kv_source=0 if layer.owns_kv else 1)


def _runs(layers: Sequence[LayerConfig]) -> list[_Run]:
    """`layers` cut into runs, each the one that covers most from where the one before ends; of equals the shortest
    period.
    """
    found: list[_Run] = []
    at = 0
    while at < len(layers):
        best = _Run(at, 1, 1)
        for period in range(1, (len(layers) - at) // 2 + 1):
            end = at + period
            while end < len(layers) and layers[end] == layers[end - period]:
                end += 1
            run = _Run(at, period, (end - at) // period)
            if run.times > 1 and run.period * run.times > best.period * best.times:
                best = run
        found.append(best)
        at += best.period * best.times
    return found


def _kept(runs: Mapping[_Run, int]) -> Iterator[int]:
    for run, times in runs.items():
        yield from run.kept(times)


def _of_layers(model: Model, layers: Sequence[int]) -> Model:
    """`model` with these of its layers alone, numbered anew. Who shared the K and V of a layer that is left out shares
    those of the last one of its kind that is kept.
    """
    made: list[LayerConfig] = []
    for index, was in enumerate(model.target.layers[i] for i in layers):
        owners = [x.index for x in made if x.kind == was.kind and x.owns_kv]
        source = index if was.owns_kv else owners[-1] if owners else was.kv_source
        made.append(replace(was, index=index, kv_source=source))
    return replace(model, target=replace(model.target, layers=tuple(made)))


# -- what a tuned model is judged by

# Each with the exponent that its time has in the mean: what people wait for, one sequence and many, short and long. A
# draft is a small part of a step with drafts, which its verification stands for.
STEPS: tuple[tuple[Step, float], ...] = (
    (Step.decode(1, 512), 1.0),
    (Step.decode(1, 32768), 1.0),
    (Step.decode(8, 512), 1.0),
    (Step.decode(32, 2048), 1.0),
    (Step.verify(1, 4, 512), 1.0),
    (Step.draft(1, 512), 0.25),
    (Step.prefill(2048, 2048), 0.5),
)
# What else a choice must not make slower: many sizes of batch, every number of drafts, long and short prompts.
ALL_STEPS: tuple[tuple[Step, float], ...] = (
    *((Step.decode(batch, context), 1.0) for batch in (1, 2, 4, 8, 16, 32, 64, 80, 128) for context in (512, 8192)),
    *((Step.decode(batch, 32768), 1.0) for batch in (1, 2, 4)),
    (Step.decode(1, 131072), 1.0),
    *((Step.verify(1, tokens, context), 1.0) for tokens in (4, 5) for context in (512, 8192)),
    *((Step.verify(1, tokens, 2048), 1.0) for tokens in (2, 3, 6, 7, 8)),
    *((Step.verify(batch, 4, 2048), 1.0) for batch in (8, 32)),
    *((Step.draft(batch, 512), 1.0) for batch in (1, 8, 32)),
    *((Step.prefill(tokens, tokens), 1.0) for tokens in (64, 128, 256, 512, 1024, 2048, 4096, 8192)),
)


@dataclass(frozen=True, slots=True)
class Weighed:
    """A step that counts, by how much (all weights add up to 1), and the tuned problems that it launches, how often."""

    step: Step
    weight: float
    launches: tuple[tuple[Item, int], ...]


def steps_for(load: Workload) -> tuple[Weighed, ...]:
    """Those of STEPS that the workload's model can take."""
    recorded = set(load.steps)
    found = [(step, weight) for step, weight in STEPS if step in recorded]
    total = sum(weight for _, weight in found)
    return tuple(
        Weighed(s, weight / total, tuple(load.step(s.phase, s.batch, s.context, s.q_len, chunk=s.chunk)))
        for s, weight in found
    )


def shares(steps: Iterable[Weighed], us: Callable[[Item], float]) -> dict[Item, float]:
    """Each problem's part of the weighted geometric mean of the steps' times, from microseconds a launch.

    Where a problem gets 1 % faster, the mean gets so many percent faster. The parts add up to 1.
    """
    found: dict[Item, float] = {}
    for weighed in steps:
        times = [(item, count * us(item)) for item, count in weighed.launches]
        whole = sum(t for _, t in times)
        for item, t in times:
            found[item] = found.get(item, 0.0) + weighed.weight * t / whole
    return found
