"""The text that comes out of a session: whole, in pieces, and up to a stop string."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kerngen.errors import UsageError
from kerngen.runtime.backend import explaining_memory
from kerngen.runtime.engine import Generation, Stats, TokenLogprobs
from kerngen.runtime.text import TextCodec

if TYPE_CHECKING:
    from kerngen.runtime.session import Session


@dataclass(frozen=True, slots=True)
class Completion:
    """text: without special tokens, and without the stop string. tokens: as generated, a stop token included.
    stop_reason: "stop" or "length". logprobs: an entry a token, where they were asked for."""

    text: str
    tokens: list[int]
    stop_reason: str
    stats: Stats
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class UpToStop:
    """A text that comes in pieces, and ends where one of `stop` begins."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise UsageError("an empty stop string stops everything")
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._text = ""
        self._shown = 0
        self._end: int | None = None
        self.ended_by: str | None = None  # the stop string that is complete

    @property
    def is_over(self) -> bool:
        """Whether a stop string is complete."""
        return self._end is not None

    @property
    def text(self) -> str:
        return self._text[: self._end]

    def push(self, piece: str) -> None:
        if self._end is not None:
            return
        before = len(self._text)
        self._text += piece
        found = [(self._text.find(s, max(before - len(s) + 1, 0)), s) for s in self._stop]
        ends = [(at, s) for at, s in found if at >= 0]
        self._end, self.ended_by = min(ends, key=lambda end: end[0], default=(None, None))

    def news(self) -> str:
        """The text since the last call that no stop string can take back."""
        return self._up_to(self._held_from() if self._end is None else self._end)

    def rest(self) -> str:
        """The text since the last call: no more will come."""
        return self._up_to(len(self._text) if self._end is None else self._end)

    def _held_from(self) -> int:
        """Where a stop string may have begun. Not in what was shown: it would have been held then."""
        for at in range(max(self._shown, len(self._text) - self._longest + 1), len(self._text)):
            if any(s.startswith(self._text[at:]) for s in self._stop):
                return at
        return len(self._text)

    def _up_to(self, end: int) -> str:
        piece = self._text[self._shown : end]
        self._shown = max(end, self._shown)
        return piece


class Answer:
    """The text of one answer as its tokens come, which ends where one of `stop` begins."""

    def __init__(self, codec: TextCodec, stop: Sequence[str] = ()) -> None:
        self._codec = codec
        self._text = UpToStop(stop)
        self._decoder = codec.stream()

    def ends_with(self, token: int) -> bool:
        """Takes the next token; whether a stop string is complete with it."""
        self._text.push(self._decoder.push([token]))
        return self._text.is_over

    def news(self) -> str:
        """The text since the last call that no stop string can take back."""
        return self._text.news()

    def finish(self, made: Generation) -> tuple[str, Completion]:
        """What is left to show, and all of it."""
        self._text.push(self._decoder.finish())
        text = self._text.text if self._text.is_over else self._codec.decode(made.tokens)
        done = Completion(text, made.tokens, made.stop_reason, made.stats, made.logprobs)
        return self._text.rest(), done


class CompletionStream(Iterator[str]):
    """The text of a generation in pieces, as they are made; then `completion` is all of it."""

    def __init__(self, session: Session, answer: Answer, steps: Generator[list[int], None, Generation]) -> None:
        self._completion: Completion | None = None
        self._pieces = self._read(session, answer, steps)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the generation where it is; what it holds is free at once. `completion` never comes."""
        self._pieces.close()

    @property
    def completion(self) -> Completion:
        """Raises UsageError before the last piece came."""
        if self._completion is None:
            raise UsageError("the stream has not ended", hint="iterate over it to its end first")
        return self._completion

    def _read(
        self, session: Session, answer: Answer, steps: Generator[list[int], None, Generation]
    ) -> Generator[str, None, None]:
        try:
            while True:
                try:
                    with explaining_memory(session.ops.device):
                        next(steps)
                except StopIteration as end:
                    made: Generation = end.value
                    break
                if piece := answer.news():
                    yield piece
            rest, self._completion = answer.finish(made)
            if rest:
                yield rest
        finally:
            steps.close()
