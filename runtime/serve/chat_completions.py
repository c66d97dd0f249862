"""/v1/chat/completions: generates the assistant's next message."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kerngen.errors import UsageError
from kerngen.runtime.chat import THINKING
from kerngen.runtime.media.parts import max_soft_tokens
from kerngen.runtime.serve.choice_stream import (
    Asked,
    ChatReader,
    Part,
    choice,
    sampling_of,
    stop_ids_of,
    stops_of,
)
from kerngen.runtime.serve.engine_process import Guiding
from kerngen.runtime.serve.errors import ApiError
from kerngen.runtime.serve.lark import Grammar
from kerngen.runtime.serve.messages import template_messages, template_tools
from kerngen.runtime.serve.protocol import ChatCompletion, NamedTool, Tokenize, Tool
from kerngen.runtime.serve.responses import Heading, Message, Usage, chat_logprobs, deltas_of
from kerngen.runtime.serve.service import Service, service_of, size_of
from kerngen.runtime.serve.streaming import send_events, send_whole, unless_gone
from kerngen.runtime.serve.structured_outputs import guiding_of, size_of_schemas
from kerngen.runtime.serve.tool_grammar import call_grammar
from kerngen.runtime.serve.unsupported_fields import require_honoured

router = APIRouter()


async def answers(
    request: Request, service: Service, body: ChatCompletion, *, clip: bool = False
) -> tuple[Asked, list[AsyncGenerator[Part, None]]]:
    """What the n answers that `body` asks for share, and the answers, which begin as they are read. clip: where the
    context has less room than max_tokens, an answer is as long as the room.

    Raises ApiError, UsageError, and ClientGone where nobody waits.
    """
    service.require_model(body.model)
    require_honoured(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs is there only beside logprobs: true", param="top_logprobs")
    codec, count = service.codec, body.n or 1
    tools = _tools(service, body)
    names = [tool["function"]["name"] for tool in tools]
    num_tokens = max_soft_tokens(body.mm_processor_kwargs)
    messages = template_messages(body.messages, codec.template_reads, service.media)
    variables = await variables_of(service, body, tools)
    encoded = await unless_gone(request, service.encode_chat(messages, variables, num_tokens))
    prompt = list(encoded.ids)
    may_think = bool(variables.get(THINKING))
    guide = partial(_guiding, service, body, tools, prompt, may_think)
    guiding, not_enforced = await service.off_loop(guide, size=size_of(tools) + size_of_schemas(body))
    wanted = body.max_completion_tokens or body.max_tokens
    room = service.room(prompt, None if clip else wanted, "messages", encoded.media)
    asked = Asked(
        prompt,
        min(wanted or room, room) if clip else room,
        stop_ids_of(service, body, codec.end_of_calls_ids if tools else ()),
        (body.top_logprobs or 0) if body.logprobs else None,
        guiding,
        not_enforced=not_enforced,
        media=encoded.media,
    )
    generators = [
        choice(service, asked, i, ChatReader(codec, stops_of(body), prompt, tools=names),
               sampling_of(service, body, i)) for i in range(count)
    ]  # fmt: skip
    return asked, generators


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatCompletion) -> Response:
    service = service_of(request)
    trace = service.trace(request)
    asked, generators = await answers(request, service, body)
    codec = service.codec
    heading = Heading.of("chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion",
                         body.model or service.names[0])  # fmt: skip
    trace.asked(body, heading, asked.max_new_tokens)
    usage = Usage(len(asked.prompt))
    if body.stream:
        begun: set[int] = set()

        def chunks(part: Part) -> list[dict[str, Any]]:
            deltas = deltas_of(part.deltas, with_reasoning=body.include_reasoning)
            if part.index not in begun:
                begun.add(part.index)
                deltas.insert(0, {"role": "assistant", "content": ""})
            if (part.finish_reason or part.logprobs) and not deltas:
                deltas.append({})
            last, found = len(deltas) - 1, chat_logprobs(part.logprobs, codec)
            return [
                {"index": part.index, "delta": delta, "logprobs": found if i == last else None,
                 "finish_reason": part.finish_reason if i == last else None,
                 "stop_reason": part.stop_reason_of_chat if i == last else None} for i, delta in enumerate(deltas)
            ]  # fmt: skip

        answer = await send_events(request, service, body.stream_options, heading, usage, trace, generators, chunks)
        answer.headers.update(asked.headers)
        return answer
    made = [Message() for _ in generators]

    def add(part: Part) -> None:
        made[part.index].add(part)

    def whole() -> dict[str, Any]:
        choices = [m.body(i, codec, with_reasoning=body.include_reasoning) for i, m in enumerate(made)]
        return heading.body(choices, usage)

    answer = await send_whole(request, service, usage, trace, generators, add, whole)
    answer.headers.update(asked.headers)
    return answer


async def variables_of(
    service: Service, body: ChatCompletion | Tokenize, tools: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the chat template is to see besides messages."""
    variables = dict(body.chat_template_kwargs or {})
    if tools:
        variables["tools"] = await service.off_loop(template_tools, tools, size=size_of(tools))
    if isinstance(body, ChatCompletion) and body.reasoning_effort is not None:
        variables.setdefault(THINKING, body.reasoning_effort != "none")
    return variables


def told_tools(service: Service, tools: list[Tool] | None) -> list[dict[str, Any]]:
    """`tools` as a client sends them. Raises ApiError where the model knows none."""
    if tools and service.codec.call_ids is None:
        raise ApiError(400, "this model has no tokens for tool calls", param="tools")
    return [tool.model_dump(exclude_none=True) for tool in tools or ()]


def _tools(service: Service, body: ChatCompletion) -> list[dict[str, Any]]:
    """Those that the model is told of."""
    if not body.tools or body.tool_choice == "none":
        if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
            raise ApiError(400, "tool_choice asks for a call, and there are no tools", param="tool_choice")
        return []
    return told_tools(service, body.tools)


def _guiding(
    service: Service, body: ChatCompletion, tools: list[dict[str, Any]], prompt: list[int], may_think: bool
) -> tuple[Guiding | None, tuple[str, ...]]:
    """By which grammar the answer goes, and what of its schemas that does not enforce."""
    choice, is_parallel = body.tool_choice, body.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        calls = _call_grammar(service, tools, name=choice.function.name, is_parallel=False)
    elif choice == "required":
        calls = _call_grammar(service, tools, is_parallel=is_parallel)
    else:
        calls = None
    is_strict = any(tool["function"].get("strict") for tool in tools)

    def or_calls(content: Grammar | None) -> Grammar | None:
        if calls is not None or not tools or (content is None and not is_strict):
            return content
        return _call_grammar(service, tools, is_required=False, is_parallel=is_parallel, in_place_of=content)

    return guiding_of(service, body, prompt, calls=calls, may_think=may_think, or_calls=or_calls)


def _call_grammar(service: Service, tools: list[dict[str, Any]], **options: Any) -> Grammar:
    try:
        if service.codec.call_ids is None:
            raise UsageError("this model has no tokens for tool calls")
        return call_grammar(tools, service.codec.call_ids, **options)
    except UsageError as e:
        raise ApiError(400, e.message, param="tools") from e
