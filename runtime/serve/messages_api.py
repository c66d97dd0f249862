"""/v1/messages: Anthropic's API of content blocks, answered as a chat, and /v1/messages/count_tokens.

Source: Anthropic's API reference (messages, streaming, errors); each event's fields are those of its Python client.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json
from starlette.responses import Response

from kerngen.runtime.chat import THINKING
from kerngen.runtime.media.options import MediaSupport
from kerngen.runtime.media.parts import Item, joined
from kerngen.runtime.serve.errors import ApiError, anthropic_body, json_response
from kerngen.runtime.serve.output_parser import ContentDelta, Delta, ToolCallDelta
from kerngen.runtime.serve.protocol import MAX_STOPS, ChatCompletion
from kerngen.runtime.serve.responses import Heading, Usage
from kerngen.runtime.serve.service import service_of
from kerngen.runtime.serve.turns import (
    Event,
    Turns,
    begin,
    chat_body,
    content_of,
    count_tokens,
    not_text,
    send,
    text_of,
)

router = APIRouter()
_TEXT = {"text": "text"}
_THINKS = {"enabled": True, "adaptive": True, "disabled": False}
_KEPT_THOUGHTS = "clear_thinking_20251015"  # what the chat template does with thoughts of earlier turns anyhow
# Fields that ask for what is not there.
_REFUSED = {
    "mcp_servers": "no servers of tools are asked here; the client calls tools",
    "container": "no code runs here",
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class Turn(_Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ToolUse(_Body):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(_Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(_Body):
    type: Literal["enabled", "adaptive", "disabled"]
    display: Literal["summarized", "omitted"] | None = None


class Format(_Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Body):
    format: Format | None = None


class ContextManagement(_Body):
    edits: list[dict[str, Any]] = []


class CountedMessage(_Body):
    """POST /v1/messages/count_tokens: what the model is to read."""

    model: str
    messages: list[Turn] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[ToolUse], Field(max_length=256)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    mm_processor_kwargs: dict[str, Any] | None = None  # as a chat has it


class CreateMessage(CountedMessage):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stream: bool | None = None


@router.post("/v1/messages")
async def create_message(request: Request, body: CreateMessage) -> Response:
    service = service_of(request)
    trace = service.trace(request)
    turns, chat = _chat(body, service.media)
    asked, generators = await begin(request, service, turns, chat, clip=True)
    heading = Heading("chat", body.model, f"msg_{secrets.token_hex(12)}", int(time.time()))
    trace.asked(chat, heading, asked.max_new_tokens)
    shows_thoughts = body.thinking is None or body.thinking.display != "omitted"
    is_clipped = asked.max_new_tokens < body.max_tokens
    made = _Made(heading, Usage(len(asked.prompt)), is_clipped, shows_thoughts)
    return await send(request, service, trace, asked, generators, made, as_stream=bool(body.stream))


@router.post("/v1/messages/count_tokens")
async def count(request: Request, body: CountedMessage) -> Response:
    service = service_of(request)
    turns, chat = _chat(body, service.media)
    return json_response({"input_tokens": await count_tokens(request, service, turns, chat)})


# -- a request as a chat


def _chat(body: CountedMessage, media: MediaSupport) -> tuple[Turns, ChatCompletion]:
    """What `body` asks for as turns and as a chat's request. Raises ApiError for what is not there."""
    for name, instead in _REFUSED.items():
        if (body.model_extra or {}).get(name):
            raise ApiError(400, f"{name} is not there: {instead}", param=name)
    for edit in body.context_management.edits if body.context_management else ():
        if edit.get("type") != _KEPT_THOUGHTS:
            raise ApiError(400, f"context_management: {edit!s:.80} is not there: shorten the messages")
    turns = Turns(media)
    if body.system:
        turns.add_system("system", text_of(body.system, _TEXT, "system", join="\n\n"))
    for at, turn in enumerate(body.messages):
        _add_turn(turns, turn, f"messages.{at}")
    if body.messages[-1].role == "assistant":
        raise ApiError(
            400, "the last message is the assistant's: an answer is a turn of its own, and goes on with none"
        )
    tools, choice = _tools(body, turns)
    created = body if isinstance(body, CreateMessage) else None
    wanted = body.output_config.format if body.output_config else None
    return turns, chat_body(turns, {
        "model": body.model, "tools": tools, "tool_choice": choice,
        "parallel_tool_calls": False if body.tool_choice and body.tool_choice.disable_parallel_tool_use else None,
        "chat_template_kwargs": {THINKING: _THINKS[body.thinking.type]} if body.thinking else None,
        "mm_processor_kwargs": body.mm_processor_kwargs,
        "response_format": wanted and {"type": "json_schema", "json_schema": {"schema": wanted.schema_}},
        **({"max_completion_tokens": created.max_tokens, "stop": created.stop_sequences, "stream": created.stream,
            "temperature": created.temperature, "top_p": created.top_p, "top_k": created.top_k} if created else {}),
    })  # fmt: skip


def _add_turn(turns: Turns, turn: Turn, where: str) -> None:
    if turn.role == "system":
        turns.add_system(where, text_of(turn.content, _TEXT, f"{where}.content", join="\n\n"))
        return
    if isinstance(turn.content, str):
        blocks: list[dict[str, Any]] = [{"type": "text", "text": turn.content}]
    else:
        blocks = turn.content
    if turn.role == "user":
        said: list[str | Item] = []
        for at, block in enumerate(blocks):  # results come first, wherever they stand: they answer the turn before
            if block.get("type") == "tool_result":
                _add_result(turns, block, f"{where}.content.{at}")
            else:
                content = content_of([block], _TEXT, f"{where}.content.{at}", turns)
                said += [content] if isinstance(content, str) else content
        if said:
            turns.add(where, "user", joined(said, "\n"))
        return
    turns.assistant(where)
    for at, block in enumerate(blocks):
        _add_answer(turns, block, f"{where}.content.{at}")


def _add_result(turns: Turns, block: dict[str, Any], where: str) -> None:
    said = content_of(block.get("content"), _TEXT, f"{where}.content", turns, join="\n", is_result=True)
    if not isinstance(call := block.get("tool_use_id"), str):
        raise ApiError(400, f"{where} has no tool_use_id")
    # Anthropic's clients mark an error beside its text, which alone the model reads.
    turns.add(where, "tool", said or ("error" if block.get("is_error") else ""), tool_call_id=call)


def _add_answer(turns: Turns, block: dict[str, Any], where: str) -> None:
    """A block of the assistant's."""
    kind = block.get("type")
    if kind == "tool_use":
        name, call_id, given = block.get("name"), block.get("id"), block.get("input")
        if not (isinstance(name, str) and isinstance(call_id, str) and isinstance(given, dict)):
            raise ApiError(400, f"{where} is no call: it has no id, name and input")
        turns.add_call(where, call_id, name, given)
    elif kind == "thinking" and isinstance(block.get("thinking"), str):
        turns.add_thought(where, block["thinking"])
    elif kind == "redacted_thinking":
        raise ApiError(400, f"{where} is a thought that another server encrypted; leave it out")
    elif kind == "text" and isinstance(block.get("text"), str):
        turns.assistant(where)["content"] += block["text"]
    else:
        raise not_text(kind, where, ("text", "thinking", "tool_use"))


def _tools(body: CountedMessage, turns: Turns) -> tuple[list[dict[str, Any]] | None, Any]:
    """tools and tool_choice as a chat has them."""
    found = []
    for at, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            turns.leave_out_tool(f"tools.{at}", tool.type)
            continue
        function: dict[str, Any] = {"name": tool.name, "strict": tool.strict}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.input_schema is not None:
            function["parameters"] = tool.input_schema
        found.append({"type": "function", "function": function})
    turns.require_tools(found, "tools with an input_schema")
    if (choice := body.tool_choice) is None:
        return found or None, None
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice of type tool has no name")
        return found or None, {"type": "function", "function": {"name": choice.name}}
    return found or None, "required" if choice.type == "any" else choice.type


# -- an answer as a message


@dataclass(slots=True)
class _Made:
    """A message as it comes together, and the events that tell of it."""

    heading: Heading
    usage: Usage
    is_clipped: bool  # the context has less room than max_tokens
    shows_thoughts: bool
    num_thoughts: int = 0  # tokens
    message: dict[str, Any] = field(init=False)
    _is_open: bool = False  # the last block may go on

    def __post_init__(self) -> None:
        self.message = {
            "id": self.heading.id, "type": "message", "role": "assistant", "model": self.heading.model, "content": [],
            "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": self.usage.prompt_tokens, "cache_creation_input_tokens": 0,
                      "cache_read_input_tokens": 0, "output_tokens": 0},
        }  # fmt: skip

    @property
    def _blocks(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.message["content"]
        return found

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self.message}
        yield {"type": "ping"}

    def take(self, delta: Delta) -> Iterator[Event]:
        if isinstance(delta, ToolCallDelta):
            if delta.name is not None:
                yield from self._open({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
                self._blocks[-1]["input"] = ""  # its JSON, until the message is whole
            if delta.arguments:
                self._blocks[-1]["input"] += delta.arguments
                yield self._delta("input_json", partial_json=delta.arguments)
            return
        kind = "text" if isinstance(delta, ContentDelta) else "thinking"
        if kind == "thinking" and not self.shows_thoughts:
            return
        if not (self._is_open and self._blocks[-1]["type"] == kind):
            yield from self._open({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._blocks[-1][kind] += delta.text
        yield self._delta(kind, **{kind: delta.text})

    def end(self, reason: str, stopped_by: str | None) -> Iterator[Event]:
        yield from self._close()
        if reason == "length":
            reason = "model_context_window_exceeded" if self.is_clipped else "max_tokens"
        elif stopped_by is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if reason == "tool_calls" else "end_turn"
        usage = self.usage
        self.message |= {"stop_reason": reason, "stop_sequence": stopped_by}
        self.message["usage"] = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens, "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self.num_thoughts},
        }  # fmt: skip
        yield {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stopped_by},
               "usage": self.message["usage"]}  # fmt: skip
        yield {"type": "message_stop"}

    def whole(self) -> dict[str, Any]:
        """The message with calls as objects. Of a call that was cut off, the members that are complete; one that cannot
        be read is text, as the model wrote it.
        """
        is_cut = self.message["stop_reason"] in ("max_tokens", "model_context_window_exceeded")
        for at, block in enumerate(self._blocks):
            if block["type"] == "tool_use":
                self._blocks[at] = _call(block, is_cut=is_cut and at == len(self._blocks) - 1)
        if self.message["stop_reason"] == "tool_use" and all(b["type"] != "tool_use" for b in self._blocks):
            self.message["stop_reason"] = "end_turn"
        return self.message

    def fail(self, error: ApiError) -> Event:
        return anthropic_body(error)

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if self._is_open:
            self._is_open = False
            if self._blocks[-1]["type"] == "thinking":
                yield self._delta("signature", signature="")
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, kind: str, **fields: Any) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1,
                "delta": {"type": f"{kind}_delta", **fields}}  # fmt: skip


def _call(block: dict[str, Any], *, is_cut: bool) -> dict[str, Any]:
    text: str = block["input"]
    try:
        given = from_json(text, allow_partial=True) if is_cut else json.loads(text)
    except ValueError:
        given = None
    if is_cut and not text:
        given = {}
    if not isinstance(given, dict):
        return {"type": "text", "text": f"call:{block['name']}{text}"}
    return {**block, "input": given}
