"""Many prompts through one session, however many there are: read when there is room, answered in order."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kerngen.errors import CheckpointError, KerngenError, UsageError
from kerngen.runtime.backend import explaining_memory
from kerngen.runtime.completion import Answer, Completion
from kerngen.runtime.engine import Engine, Handle, Request, TokenMask
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.session import MAX_BATCH, MAX_NEW_TOKENS, Prompt, Session

AHEAD = 4 * MAX_BATCH  # jobs held at once: so far the others may get while the first of them takes its time


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and what is wanted of its answer, as in `Session.generate`."""

    prompt: Prompt
    max_new_tokens: int = MAX_NEW_TOKENS
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    chat: bool = True
    logprobs: int | None = None
    mask: TokenMask | None = None


@dataclass(slots=True)
class _Slot:
    """A job that was read and whose outcome was not yet handed out. request, answer: None where it is none."""

    request: Request | None = None
    answer: Answer | None = None
    handle: Handle | None = None
    outcome: Completion | KerngenError | None = None


class Outcomes(Iterator[tuple[int, Completion | KerngenError]]):
    """(number from 0, outcome) of each of `jobs`, in order: its answer, or the error that ended this one and no other.

    As many run at once as memory takes. Jobs are read when there is room for them, AHEAD at most of those that were not
    handed out yet. An error among `jobs` is its own outcome. What ends them all is raised: DeviceError where memory
    runs out, and whatever `jobs` raises. `finished` are the answers that lie behind the one that is awaited.
    """

    def __init__(self, session: Session, jobs: Iterable[Job | KerngenError]) -> None:
        self._session, self._jobs = session, iter(jobs)
        self._slots: deque[_Slot] = deque()
        self._running: dict[Handle, _Slot] = {}
        self._engine: Engine | None = None
        self._num_out = 0

    def __next__(self) -> tuple[int, Completion | KerngenError]:
        while True:
            self._read()
            if not self._slots:
                raise StopIteration
            if (outcome := self._slots[0].outcome) is not None:
                self._slots.popleft()
                self._num_out += 1
                return self._num_out - 1, outcome
            with explaining_memory(self._session.ops.device):
                self._submit()
                self._step()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def finished(self) -> list[tuple[int, Completion | KerngenError]]:
        """(number, outcome) of what is complete already, and was not handed out."""
        slots = enumerate(self._slots, self._num_out)
        return [(number, slot.outcome) for number, slot in slots if slot.outcome is not None]

    def close(self) -> None:
        """End all that run; what they hold is free at once."""
        for handle in self._running:
            if self._engine is not None:
                self._engine.cancel(handle)
        self._running.clear()

    def _read(self) -> None:
        while len(self._slots) < AHEAD and (job := next(self._jobs, None)) is not None:
            self._slots.append(self._prepared(job))

    def _prepared(self, job: Job | KerngenError) -> _Slot:
        if isinstance(job, KerngenError):
            return _Slot(outcome=job)
        session = self._session
        try:
            answer = Answer(session.codec, job.stop)
            said = session.encode_media(job.prompt, chat=job.chat)
            ids = array("i", said.ids)
            self._require_room(len(ids), job.max_new_tokens)
        except (UsageError, CheckpointError) as e:  # a chat template may refuse one chat and not the next
            return _Slot(outcome=e)
        request = Request(ids, job.max_new_tokens, job.sampling, session.stop_ids, answer.ends_with,
                          logprobs=job.logprobs, mask=job.mask, media=said.media)  # fmt: skip
        return _Slot(request, answer)

    def _require_room(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        most = self._session.config.max_positions
        if num_prompt_tokens + max_new_tokens > most:
            raise UsageError(
                f"{num_prompt_tokens} prompt tokens and {max_new_tokens} new ones; the model takes {most:,} together",
                hint="a shorter prompt, or a smaller max_new_tokens",
            )

    def _submit(self) -> None:
        """Hand all that wait to the engine, up to one that is too long for it: that one waits for a larger engine."""
        waiting = [s for s in self._slots if s.outcome is None and s.handle is None]
        if not waiting:
            return
        engine, longest = self._engine, max(map(_length, waiting))
        if engine is None or (longest > engine.max_len and not self._running):
            if engine is not None:  # a larger one costs its time: not for each line that is a little longer
                longest = min(max(longest, 2 * engine.max_len), self._session.config.max_positions)
            self._engine = engine = None  # its cache goes before the new one comes
            self._engine = engine = self._session.reserve(longest, min(len(self._slots), MAX_BATCH))
        for slot in waiting:
            if slot.request is None or (_length(slot) > engine.max_len and self._running):
                return
            try:
                slot.handle = engine.submit(slot.request)
                self._running[slot.handle] = slot
            except UsageError as e:
                slot.outcome = e

    def _step(self) -> None:
        if self._engine is None or not self._running:
            return
        self._engine.step()
        for handle in [h for h in self._running if h.is_done]:
            slot = self._running.pop(handle)
            if handle.error is not None:
                slot.outcome = handle.error
            elif slot.answer is not None:
                slot.outcome = slot.answer.finish(handle.generation)[1]


def _length(slot: _Slot) -> int:
    """Tokens of its prompt and answer, at most."""
    return 0 if slot.request is None else len(slot.request.prompt) + slot.request.max_new_tokens
