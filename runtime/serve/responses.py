"""Response bodies in OpenAI's format: whole responses and chunks, of chats and of completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kerngen.runtime.engine import TokenLogprobs
from kerngen.runtime.serve.choice_stream import Part
from kerngen.runtime.serve.output_parser import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from kerngen.runtime.text import TextCodec, TextStream


@dataclass(slots=True)
class Usage:
    """Tokens of all choices so far; a prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted: int = 0  # drafts that became tokens, and those that did not
    rejected: int = 0

    def add(self, part: Part) -> None:
        self.completion_tokens += len(part.tokens)
        if part.stats is not None:
            self.cached_tokens = max(self.cached_tokens, part.stats.num_cached_tokens)
            self.accepted += sum(part.stats.accepted)
            self.rejected += sum(part.stats.drafted) - sum(part.stats.accepted)

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"accepted_prediction_tokens": self.accepted,
                                          "rejected_prediction_tokens": self.rejected},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk of an answer begins with."""

    kind: str
    model: str
    id: str
    created: int

    @staticmethod
    def of(prefix: str, kind: str, model: str) -> Heading:
        return Heading(kind, model, f"{prefix}-{secrets.token_hex(12)}", int(time.time()))

    def body(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        found = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "choices": choices}
        return found if usage is None else found | {"usage": usage.body}


def deltas_of(deltas: Sequence[Delta], *, with_reasoning: bool) -> list[dict[str, Any]]:
    """The `delta` of a chat's chunks; what follows each other and is of one kind is one of them."""
    found: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            found.append({"tool_calls": [_call(delta)]})
            continue
        name = "content" if isinstance(delta, ContentDelta) else "reasoning_content"
        if name == "reasoning_content" and not with_reasoning:
            continue
        if found and name in found[-1]:
            found[-1][name] += delta.text
        else:
            found.append({name: delta.text})
    return found


def _call(delta: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.name is not None:
        return {"index": delta.index, "id": delta.id, "type": "function", "function": {"name": delta.name, **function}}
    return {"index": delta.index, "function": function}


@dataclass(slots=True)
class Message:
    """A chat's answer as it comes together."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None

    def add(self, part: Part) -> None:
        self.logprobs += part.logprobs
        for delta in part.deltas:
            if isinstance(delta, ContentDelta):
                self.content += delta.text
            elif isinstance(delta, ReasoningDelta):
                self.reasoning += delta.text
            elif delta.name is not None:
                self.calls.append({"id": delta.id, "type": "function",
                                   "function": {"name": delta.name, "arguments": delta.arguments}})  # fmt: skip
            else:
                self.calls[delta.index]["function"]["arguments"] += delta.arguments
        self.finish_reason, self.stop_reason = part.finish_reason, part.stop_reason_of_chat

    def body(self, index: int, codec: TextCodec, *, with_reasoning: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if with_reasoning and self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return {"index": index, "message": message, "logprobs": chat_logprobs(self.logprobs, codec),
                "finish_reason": self.finish_reason, "stop_reason": self.stop_reason}  # fmt: skip


def chat_logprobs(found: Sequence[TokenLogprobs], codec: TextCodec) -> dict[str, Any] | None:
    """As a chat's choices have them; None where none were asked for."""
    if not found:
        return None

    def told(token: int, logprob: float) -> dict[str, Any]:
        text = codec.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

    return {"content": [told(x.token, x.logprob) | {"top_logprobs": [told(*pair) for pair in x.top]} for x in found]}


@dataclass(slots=True)
class TextLogprobs:
    """As a completion's choices have them. echoed: the prompt, where it is told too; nothing comes before its first
    token. An offset is where a token's text begins: control tokens have none in it, and of those that make up one
    character the last one has it.
    """

    codec: TextCodec
    echoed: Sequence[int] = ()
    _offset: int = field(default=0, init=False)
    _count: int = field(default=0, init=False)
    _stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self._stream = self.codec.stream()

    def body(self, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """Of the tokens that came now; None where none were asked for."""
        if not found:
            return None
        tokens: list[int] = [x.token for x in found]
        values: list[float | None] = [x.logprob for x in found]
        top: list[dict[str, float] | None] = [{self.codec.token_text(i): v for i, v in x.top} for x in found]
        if self.echoed and self._count == 0:
            tokens, values, top = [self.echoed[0], *tokens], [None, *values], [None, *top]
        offsets = [self._next_offset(token) for token in tokens]
        texts = [self.codec.token_text(i) for i in tokens]
        return {"tokens": texts, "token_logprobs": values, "text_offset": offsets, "top_logprobs": top}

    def _next_offset(self, token: int) -> int:
        if self.echoed and self._count == len(self.echoed):  # the answer is decoded by itself
            self._offset += len(self._stream.finish())
            self._stream = self.codec.stream()
        self._count += 1
        offset = self._offset
        self._offset += len(self._stream.push([token]))
        return offset


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(d.text for d in deltas if isinstance(d, ContentDelta))
