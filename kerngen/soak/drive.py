"""Hands random requests to an engine for a while, and writes down what becomes of them."""

from __future__ import annotations

import os
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kerngen.errors import KerngenError, UsageError
from kerngen.runtime.config import NO_DRAFTER
from kerngen.runtime.drafting import Drafter
from kerngen.runtime.engine import PREFILL_CHUNK, CacheShape, Engine, Handle
from kerngen.runtime.engine.scheduler import pages_for, window_pages
from kerngen.runtime.engine.sizing import usual_step
from kerngen.runtime.model import Gemma4
from kerngen.runtime.session import CACHE_SHARE
from kerngen.soak.faults import Faults
from kerngen.soak.models import Opened
from kerngen.soak.requests import Arrivals, RandomRequests
from kerngen.soak.samples import Memory, Sample
from kerngen.system.environment import is_set

# Of the pages that max_batch requests hold on average when they are as long as they get: at times so many run, and at
# times some wait and are preempted.
PRESSURE = 0.9
NUM_LENGTHS = 200  # of requests whose lengths say what is average
SPELL = 1 / 3  # of the steps that the longest answer takes, between changes of how many requests are wanted
SAMPLE_S = 60.0
NUM_SAMPLES = 10  # at least, in a run of less than as many minutes
DRAIN = 0.1  # of the time, and so much more of it at most, for requests that are under way when it is over

Say = Callable[[float, str], None]  # seconds of this phase that are over, and what there is to say


@dataclass(frozen=True, slots=True)
class Settings:
    """What a soak is. Times in seconds. cache_bytes: of K and V, None for `PRESSURE`. cancel: see RandomRequests.

    num_draft_tokens: None for as many as pay. reproducible: as the engine's.
    """

    seconds: float
    check_seconds: float
    max_batch: int
    max_prompt: int
    max_new_tokens: int
    num_draft_tokens: int | None = None
    cancel: float = 0.1
    cache_bytes: int | None = None
    page_size: int = 64
    prefill_chunk: int = PREFILL_CHUNK
    reproducible: bool = False
    seed: int = 0

    @property
    def max_len(self) -> int:
        return self.max_prompt + self.max_new_tokens

    def requests(self, vocab_size: int) -> RandomRequests:
        return RandomRequests(vocab_size, self.max_prompt, self.max_new_tokens, self.cancel, self.seed)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of request `number`: its tokens, all of them or, where it was cancelled, the first."""

    number: int
    tokens: array[int]
    stop_reason: str
    is_greedy: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int


@dataclass(slots=True, eq=False)
class Phase:
    """A run of one engine. leaked: pages that nobody gave back, of each kind. stopped: by Ctrl-C. broken: by an error
    in a step, after which a GPU may answer nothing any more.

    drafted, accepted: by position, of all requests.
    """

    name: str
    num_pages: dict[str, int]
    cache_bytes: int
    answers: list[Answer] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    num_asked: int = 0
    leaked: dict[str, int] = field(default_factory=dict)
    stopped: bool = False
    broken: bool = False
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def note(self, number: int, handle: Handle) -> None:
        stats = handle.stats
        for i, (drafted, accepted) in enumerate(zip(stats.drafted, stats.accepted, strict=True)):
            if i == len(self.drafted):
                self.drafted.append(0)
                self.accepted.append(0)
            self.drafted[i] += drafted
            self.accepted[i] += accepted
        if handle.error is not None:
            self.faults.add(f"request {number}: {handle.error.message}")
            return
        self.answers.append(
            Answer(number, array("i", handle.tokens), handle.stop_reason, handle.request.sampling.is_greedy,
                   stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_preemptions)
        )  # fmt: skip


def pages_of(settings: Settings, model: Gemma4, drafter: Drafter | None) -> dict[str, int]:
    """Pages of each kind for a run of `settings`: as many as it says, or too few for all that comes.

    Raises UsageError where the longest request does not fit.
    """
    policy = NO_DRAFTER if drafter is None else drafter.policy
    shape = CacheShape(model.config, model.ops.dtype, settings.page_size, usual_step(policy), settings.prefill_chunk,
                       policy)  # fmt: skip
    least = shape.pages(1, settings.max_len)
    wanted = _wanted(settings, shape)
    budget = settings.cache_bytes if settings.cache_bytes is not None else int(PRESSURE * shape.num_bytes(wanted))
    if settings.cache_bytes is None and model.ops.device.type == "cuda":  # of rank 0, whose part is the widest
        budget = min(budget, int(CACHE_SHARE * torch.cuda.mem_get_info(model.ops.device)[0]))
    share = budget / shape.num_bytes(wanted)
    pages = {kind: max(int(share * wanted[kind]), least[kind]) for kind in wanted}
    if (need := shape.num_bytes(pages)) > budget and settings.cache_bytes is not None:
        raise UsageError(
            f"a cache of {budget / 1e9:g} GB; with the longest request, of {settings.max_len:,} tokens, and its share "
            f"for the others it takes {need / 1e9:.3g} GB",
            hint="a larger --kv-memory, or a smaller --max-prompt",
        )
    return pages


def _wanted(settings: Settings, shape: CacheShape) -> dict[str, int]:
    """Pages of each kind that max_batch requests hold on average, page 0 included."""
    each = [pages_for(n, shape.page_size) for n in settings.requests(shape.config.vocab_size).lengths(NUM_LENGTHS)]
    window = window_pages(shape.config.window, shape.step, shape.page_size)
    held = {"full": sum(each), "sliding": sum(min(n, window) for n in each)}
    return {kind: settings.max_batch * count // NUM_LENGTHS + 1 for kind, count in held.items()}


def engine_for(
    settings: Settings, opened: Opened, drafter: Drafter | None, num_pages: dict[str, int], *, alone: bool = False
) -> Engine:
    """The engine that is soaked or, `alone`, the one whose answers are compared with.

    That one is the simplest there is, without batches, drafts and prefixes; where runs are reproducible it is the same
    engine again, since there the shapes of its steps are part of what makes them so. Of a divided model it is made
    ready: ranks that compile in a step keep the others waiting.
    """
    model, ranks = opened.model, opened.ranks
    if alone and not settings.reproducible:
        engine = Engine(model, max_len=settings.max_len, page_size=settings.page_size, num_pages=num_pages,
                        prefill_chunk=settings.prefill_chunk, prefix_caching=False, ranks=ranks)  # fmt: skip
    else:
        engine = Engine(
            model, drafter, max_len=settings.max_len, max_batch=settings.max_batch, num_pages=num_pages,
            num_draft_tokens=settings.num_draft_tokens, prefill_chunk=settings.prefill_chunk,
            page_size=settings.page_size, reproducible=settings.reproducible, ranks=ranks,
        )  # fmt: skip
    if ranks is not None:
        engine.make_ready()
    return engine


def run_phase(
    name: str, settings: Settings, opened: Opened, drafter: Drafter | None, seconds: float, say: Say
) -> Phase:
    """`seconds` of random requests; those that are under way then are let end. Raises UsageError for what cannot be."""
    num_pages = pages_of(settings, opened.model, drafter)
    engine = engine_for(settings, opened, drafter, num_pages)
    phase = Phase(name, engine.load.num_pages, engine.cache.num_bytes)
    driver = _Driver(settings, engine, phase, seconds, say, () if opened.ranks is None else opened.ranks.pids)
    try:
        driver.run()
    except KeyboardInterrupt:
        phase.stopped = True
    except (KerngenError, RuntimeError) as e:
        if is_set("KERNGEN_DEBUG"):
            raise
        phase.broken = True
        frame = traceback.extract_tb(e.__traceback__)[-1]
        phase.faults.add(f"{type(e).__name__}: {e} ({os.path.basename(frame.filename)}, line {frame.lineno})")
    driver.end()
    return phase


class _Driver:
    """Requests under way in `engine`, and the sample that is being taken."""

    def __init__(
        self, settings: Settings, engine: Engine, phase: Phase, seconds: float, say: Say, others: Sequence[int]
    ) -> None:
        """others: processes of the other ranks."""
        self.others = others
        self.engine, self.phase, self.seconds, self.say = engine, phase, seconds, say
        self.requests = settings.requests(engine.model.config.vocab_size)
        self.arrivals = Arrivals(settings.max_batch, SPELL * settings.max_new_tokens, settings.seed)
        self.live: dict[Handle, tuple[int, int | None]] = {}  # number, and the step in which it is cancelled
        self.period = min(SAMPLE_S, seconds / NUM_SAMPLES)
        self.began = time.monotonic()
        self.sample = Sample(0.0)
        self.step = 0
        self.num_preemptions = 0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> None:
        while (elapsed := self.elapsed) < self.seconds or (self.live and elapsed < (1 + DRAIN) * self.seconds):
            if elapsed < self.seconds:
                self._submit(self.arrivals.now(len(self.live)))
            self._cancel([h for h, (_, end) in self.live.items() if end is not None and self.step >= end])
            if self.engine.has_work:
                events = self.engine.step()
                self.sample.note(self.engine.load, sum(len(e.tokens) for e in events))
            self.step += 1
            self._collect()
            if elapsed - self.sample.at_s >= self.period:
                self._end_sample(elapsed)
            self.say(min(elapsed, self.seconds), self._text())

    def end(self) -> None:
        """Cancel what is left, and count the pages."""
        try:
            self._cancel(list(self.live))
            self._collect()
            if self.sample.num_steps:
                self._end_sample(self.elapsed)
        except RuntimeError as e:  # a GPU that has failed fails again
            self.phase.faults.add(f"ending what was under way: {e}")
            return
        load = self.engine.load
        if self.engine.has_work:  # Ctrl-C may have come before a request that was handed in was written down here
            if not self.phase.stopped:
                self.phase.faults.add("the engine still has work after its last request has ended")
            return
        lost = {kind: load.num_pages[kind] - free for kind, free in load.free_pages.items()}
        self.phase.leaked = {kind: count for kind, count in lost.items() if count}

    def _submit(self, count: int) -> None:
        for _ in range(count):
            asked = self.requests.ask(self.phase.num_asked)
            handle = self.engine.submit(asked.request)
            end = None if asked.cancel_after is None else self.step + asked.cancel_after
            self.live[handle] = self.phase.num_asked, end
            self.phase.num_asked += 1

    def _cancel(self, handles: list[Handle]) -> None:
        for handle in handles:
            self.engine.cancel(handle)

    def _collect(self) -> None:
        for handle in [h for h in self.live if h.is_done]:
            number, _ = self.live.pop(handle)
            self.phase.note(number, handle)
            self.sample.num_finished += handle.stop_reason not in ("cancelled", "error")
            self.sample.num_cancelled += handle.stop_reason == "cancelled"

    def _end_sample(self, elapsed: float) -> None:
        sample, load = self.sample, self.engine.load
        sample.seconds, sample.at_s = elapsed - sample.at_s, elapsed
        sample.num_preemptions = load.num_preemptions - self.num_preemptions
        sample.num_graphs, self.num_preemptions = load.num_graphs, load.num_preemptions
        sample.memory = Memory.now(self.engine.model.ops.device, self.others)
        self.phase.samples.append(sample)
        self.sample = Sample(elapsed)

    def _text(self) -> str:
        load, samples = self.engine.load, self.phase.samples
        speed = f", {samples[-1].tokens_per_s:.0f} tokens/s" if samples else ""
        return f"{self.phase.name}: {load.num_running} run, {load.num_waiting} wait{speed}"
