"""/v1/responses: OpenAI's API of items, answered as a chat. Nothing is stored: a request has the turns before it.

Source: OpenAI's API reference (responses, streaming events); the fields of each event are those of its Python client.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from kerngen.runtime.media.options import MediaSupport
from kerngen.runtime.serve.choice_stream import sampling_of
from kerngen.runtime.serve.errors import ApiError, json_response
from kerngen.runtime.serve.output_parser import ContentDelta, Delta, ToolCallDelta
from kerngen.runtime.serve.protocol import ChatCompletion
from kerngen.runtime.serve.responses import Heading, Usage
from kerngen.runtime.serve.service import Service, service_of
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
_ANSWER_TEXT = {"output_text": "text", "refusal": "refusal"}
_TEXT = {"input_text": "text", "text": "text", **_ANSWER_TEXT}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_STATELESS = "nothing is stored here: send the turns before it in input, and store: false"
# Fields that ask for what is not there, with the values that do not.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "store": ((None, False), _STATELESS),
    "previous_response_id": ((None, ""), _STATELESS),
    "conversation": ((None, ""), _STATELESS),
    "prompt": ((None,), "there are no stored prompts: instructions and input say it"),
    "background": ((None, False), "answers come while the client waits; stream sends them as they are made"),
    "truncation": ((None, "disabled"), "nothing is cut out of a conversation: shorten the input"),
    "context_management": ((None, []), "nothing is cut out of a conversation: shorten the input"),
    "top_logprobs": ((None, 0), "/v1/chat/completions has logprobs"),
    "max_tool_calls": ((None,), "it counts calls of tools that OpenAI's servers run, and none run here"),
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class ToolChoice(_Body):
    """A function by its name, or those of `tools` that may be called."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]] = []


class Reasoning(_Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class TextFormat(_Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Text(_Body):
    format: TextFormat | None = None


class CountedResponse(_Body):
    """POST /v1/responses/input_tokens: what the model is to read."""

    model: str | None = None
    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=256)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    mm_processor_kwargs: dict[str, Any] | None = None  # as a chat has it


class CreateResponse(CountedResponse):
    """POST /v1/responses."""

    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None


@router.post("/v1/responses")
async def create_response(request: Request, body: CreateResponse) -> Response:
    service = service_of(request)
    trace = service.trace(request)
    turns, chat = _chat(body, service.media)
    try:
        asked, generators = await begin(request, service, turns, chat)
    except ApiError as e:
        e.param = {"messages": "input", "response_format": "text.format"}.get(e.param or "", e.param)
        raise
    heading = Heading("response", body.model or service.names[0], _id("resp"), int(time.time()))
    trace.asked(chat, heading, asked.max_new_tokens)
    made = _Made(_echoed(service, body, chat, heading), Usage(len(asked.prompt)), _namespaces(body))
    return await send(request, service, trace, asked, generators, made, as_stream=bool(body.stream))


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request, body: CountedResponse) -> Response:
    service = service_of(request)
    turns, chat = _chat(body, service.media)
    count = await count_tokens(request, service, turns, chat)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.api_route("/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
async def stored(rest: str) -> Response:
    raise ApiError(404, f"there is no response {rest!r:.80}: {_STATELESS}", code="not_found")


# -- a request as a chat


def _chat(body: CountedResponse, media: MediaSupport) -> tuple[Turns, ChatCompletion]:
    """What `body` asks for as turns and as a chat's request. Raises ApiError for what is not there."""
    for name, (off, instead) in _REFUSED.items():
        if (body.model_extra or {}).get(name) not in off:
            raise ApiError(400, f"{name} is not there: {instead}", param=name)
    created = body if isinstance(body, CreateResponse) else None
    if created and "message.output_text.logprobs" in (created.include or ()):
        raise ApiError(400, "message.output_text.logprobs: /v1/chat/completions has logprobs", param="include")
    turns = Turns(media)
    if body.instructions:
        turns.add_system("instructions", body.instructions)
    if isinstance(body.input, str):
        turns.add("input", "user", body.input)
    else:
        for at, item in enumerate(body.input):
            _add_item(turns, item, f"input[{at}]")
    tools, choice = _tools(body, turns)
    return turns, chat_body(turns, {
        "model": body.model, "tools": tools, "tool_choice": choice, "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None, "response_format": _format(body),
        "mm_processor_kwargs": body.mm_processor_kwargs,
        **({"stream": created.stream, "max_completion_tokens": created.max_output_tokens,
            "temperature": created.temperature, "top_p": created.top_p} if created else {}),
    })  # fmt: skip


def _add_item(turns: Turns, item: dict[str, Any], where: str) -> None:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise ApiError(400, f"{where} has no role of {', '.join(_ROLES)}", param=where)
        if role == "user":
            turns.add(where, role, content_of(item.get("content"), _TEXT, f"{where}.content", turns))
            return
        text = text_of(item.get("content"), _TEXT, f"{where}.content")
        if role == "assistant":
            turns.assistant(where)["content"] += text
        else:
            turns.add_system(where, text)
    elif kind == "function_call":
        name, call_id, arguments = (_string(item, key, where) for key in ("name", "call_id", "arguments"))
        turns.add_call(where, call_id, _joined(item.get("namespace"), name), arguments)
    elif kind == "function_call_output":
        output = content_of(item.get("output"), _TEXT, f"{where}.output", turns, is_result=True)
        turns.add(where, "tool", output, tool_call_id=_string(item, "call_id", where))
    elif kind == "reasoning":
        text = text_of(item.get("content"), {"reasoning_text": "text"}, f"{where}.content")
        text = text or text_of(item.get("summary"), {"summary_text": "text"}, f"{where}.summary", join="\n\n")
        if not text and item.get("encrypted_content"):
            raise ApiError(400, f"{where} is a thought that another server encrypted; leave it out", param=where)
        turns.add_thought(where, text)
    elif kind == "item_reference":
        raise ApiError(400, f"{where} is an item_reference: {_STATELESS}", param=where)
    else:
        raise not_text(kind, where, ("message", "function_call", "function_call_output", "reasoning"))


def _string(item: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(value := item.get(name), str):
        raise ApiError(400, f"{where} has no {name}", param=f"{where}.{name}")
    return value


def _tools(body: CountedResponse, turns: Turns) -> tuple[list[dict[str, Any]] | None, Any]:
    """tools and tool_choice as a chat has them."""
    found: list[dict[str, Any]] = []
    for at, tool in enumerate(body.tools or ()):
        where, kind = f"tools[{at}]", tool.get("type")
        namespace, functions = ("", [tool]) if kind == "function" else (tool.get("name"), tool.get("tools"))
        if kind not in ("function", "namespace"):
            turns.leave_out_tool(where, kind)
        elif not isinstance(namespace, str) or not isinstance(functions, list):
            raise ApiError(400, f"{where} has no name and tools", param=where)
        else:
            for function in functions:
                if not isinstance(function, dict) or function.get("type") != "function":
                    turns.leave_out_tool(where, function.get("type") if isinstance(function, dict) else function)
                else:
                    found.append(_function(function, tool if namespace else None))
    turns.require_tools(found, "functions")
    choice = body.tool_choice
    if not isinstance(choice, ToolChoice):
        return found or None, choice
    if choice.type == "function":
        return found or None, {"type": "function", "function": {"name": choice.name}}
    allowed = [tool.get("name") for tool in choice.tools]
    if unknown := [name for name in allowed if name not in [tool["function"].get("name") for tool in found]]:
        raise ApiError(400, f"tool_choice allows {unknown[0]!r:.80}, which is none of the tools", param="tool_choice")
    return [tool for tool in found if tool["function"].get("name") in allowed], choice.mode


def _function(tool: dict[str, Any], namespace: dict[str, Any] | None) -> dict[str, Any]:
    """A chat's tool, whose name and description begin with its namespace's."""
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    if namespace is not None and isinstance(function.get("name"), str):
        function["name"] = _joined(namespace["name"], function["name"])
        texts = [of["description"] for of in (namespace, tool) if isinstance(of.get("description"), str)]
        function["description"] = "\n\n".join(texts)
    return {"type": "function", "function": function}


def _joined(namespace: Any, name: str) -> str:
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def _namespaces(body: CountedResponse) -> dict[str, dict[str, str]]:
    """Name and namespace of each function that has one, by the name that the model knows."""
    spaces = [tool for tool in body.tools or () if tool.get("type") == "namespace"]
    return {_joined(space["name"], function["name"]): {"name": function["name"], "namespace": space["name"]}
            for space in spaces for function in space["tools"]
            if isinstance(function, dict) and function.get("type") == "function"}  # fmt: skip


def _format(body: CountedResponse) -> dict[str, Any] | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type != "json_schema":
        return None if wanted is None else {"type": wanted.type}
    return {
        "type": "json_schema",
        "json_schema": wanted.model_dump(include={"name", "schema_", "strict"}, by_alias=True),
    }


# -- an answer as a response


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def _echoed(service: Service, body: CreateResponse, chat: ChatCompletion, heading: Heading) -> dict[str, Any]:
    """The response before it has any output."""
    sampling = sampling_of(service, chat, 0)
    choice = body.tool_choice
    wanted = (body.text and body.text.format) or TextFormat()
    return {
        "id": heading.id, "object": heading.kind, "created_at": heading.created, "status": "in_progress",
        "background": False, "error": None, "incomplete_details": None, "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens, "model": heading.model, "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None}, "store": False,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "truncation": "disabled",
        "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice.model_dump(exclude_unset=True) if isinstance(choice, ToolChoice) else choice or "auto",
        "tools": body.tools or [], "usage": None, "metadata": body.metadata or {},
    }  # fmt: skip


@dataclass(slots=True)
class _Made:
    """A response as it comes together, and the events that tell of it."""

    response: dict[str, Any]
    usage: Usage
    namespaces: dict[str, dict[str, str]]
    num_thoughts: int = 0  # tokens
    _item: dict[str, Any] | None = None  # that is not done; it is the last of the output
    _num_events: int = 0

    def begin(self) -> Iterator[Event]:
        yield self._event("created", response=self.response)
        yield self._event("in_progress", response=self.response)

    def take(self, delta: Delta) -> Iterator[Event]:
        if isinstance(delta, ToolCallDelta):
            if delta.name is not None:
                yield from self._close("completed")
                named = self.namespaces.get(delta.name, {"name": delta.name})
                yield from self._open("function_call", "fc", call_id=delta.id, **named, arguments="")
            if delta.arguments and self._item is not None:
                self._item["arguments"] += delta.arguments
                yield self._of_item("function_call_arguments.delta", delta=delta.arguments)
            return
        kind = "message" if isinstance(delta, ContentDelta) else "reasoning"
        if self._item is None or self._item["type"] != kind:
            yield from self._close("completed")
            part: dict[str, Any]
            if kind == "message":
                yield from self._open(kind, "msg", role="assistant", content=[])
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            else:
                yield from self._open(kind, "rs", summary=[], content=[])
                part = {"type": "reasoning_text", "text": ""}
            yield self._of_item("content_part.added", content_index=0, part=part)
            self._content.append(part)
        self._content[0]["text"] += delta.text
        yield self._of_text("delta", delta=delta.text)

    def end(self, reason: str, stopped_by: str | None) -> Iterator[Event]:
        usage, is_cut = self.usage, reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage.prompt_tokens, "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self.num_thoughts},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }  # fmt: skip
        if not is_cut:
            self.response["completed_at"] = int(time.time())
        yield self._event(status, response=self.response)

    def whole(self) -> dict[str, Any]:
        return self.response

    def fail(self, error: ApiError) -> Event:
        told = {"code": "server_error", "message": error.message}
        self.response |= {"status": "failed", "error": told}
        return self._event("failed", response=self.response)

    @property
    def _content(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._item["content"] if self._item is not None else []
        return found

    def _open(self, kind: str, prefix: str, **fields: Any) -> Iterator[Event]:
        self._item = {"type": kind, "id": _id(prefix), "status": "in_progress", **fields}
        self.response["output"].append(self._item)
        yield self._event("output_item.added", output_index=len(self.response["output"]) - 1, item=self._item)

    def _close(self, status: str) -> Iterator[Event]:
        if (item := self._item) is None:
            return
        if item["type"] == "function_call":
            yield self._of_item("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            yield self._of_text("done", text=self._content[0]["text"])
            yield self._of_item("content_part.done", content_index=0, part=self._content[0])
        item["status"] = status
        yield self._event("output_item.done", output_index=len(self.response["output"]) - 1, item=item)
        self._item = None

    def _of_text(self, kind: str, **fields: Any) -> Event:
        """Of the item's one part, which has all of its text."""
        part = self._content[0]
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        return self._of_item(f"{part['type']}.{kind}", content_index=0, **fields, **more)

    def _of_item(self, kind: str, **fields: Any) -> Event:
        at = len(self.response["output"]) - 1
        return self._event(kind, item_id=self.response["output"][at]["id"], output_index=at, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **fields}
