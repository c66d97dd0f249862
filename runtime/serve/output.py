from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kerngen.runtime.text import TextCodec


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = ReasoningDelta | ContentDelta | ToolCallDelta


class Output:
    def __init__(self, codec: TextCodec, prompt: Sequence[int] = ()) -> None:
        self._s = codec.stream()

    def push(self, ids: Sequence[int]) -> list[Delta]:
        t = self._s.push(ids)
        return [ContentDelta(t)] if t else []

    def finish(self) -> list[Delta]:
        t = self._s.finish()
        return [ContentDelta(t)] if t else []
