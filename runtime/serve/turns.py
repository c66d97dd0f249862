"""What the APIs of responses and of messages share: they are answered as chats, whose request is made and whose answer
is sent here.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

from fastapi import Request
from pydantic import ValidationError
from starlette.responses import Response

from kerngen.errors import UsageError
from kerngen.runtime.media.options import MediaSupport
from kerngen.runtime.media.parts import KINDS, Content, Item, item_of, joined, max_soft_tokens, text_in
from kerngen.runtime.serve import errors
from kerngen.runtime.serve.chat_completions import answers, told_tools, variables_of
from kerngen.runtime.serve.choice_stream import Asked, Part
from kerngen.runtime.serve.errors import ApiError
from kerngen.runtime.serve.messages import template_messages
from kerngen.runtime.serve.output_parser import Delta
from kerngen.runtime.serve.protocol import ChatCompletion
from kerngen.runtime.serve.responses import Usage
from kerngen.runtime.serve.service import Service
from kerngen.runtime.serve.streaming import named_event, parts_of, send_stream, send_whole, unless_gone
from kerngen.runtime.serve.tracing import Trace
from kerngen.runtime.text import TextCodec

Event = dict[str, Any]
_MESSAGE = re.compile(r"^messages\[(\d+)\]")


@dataclass(slots=True)
class Turns:
    """Messages of a chat, made of the items of another API. media: what is read beside text. origins: where in the
    request each of them begins. left_out: tools that do not run here, and what of results cannot be read.
    """

    media: MediaSupport
    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, origin: str, role: str, content: Content, **more: Any) -> None:
        self.messages.append({"role": role, "content": content, **more})
        self.origins.append(origin)

    def add_system(self, origin: str, text: str) -> None:
        """What is said first is one turn, of however many parts."""
        if [m["role"] for m in self.messages] == ["system"]:
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.add(origin, "system", text)

    def assistant(self, origin: str) -> dict[str, Any]:
        """The assistant's turn, which begins here unless it is the last one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add(origin, "assistant", "")
        return self.messages[-1]

    def add_call(self, origin: str, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self.assistant(origin).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_thought(self, origin: str, text: str) -> None:
        turn = self.assistant(origin)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def leave_out_tool(self, where: str, kind: Any) -> None:
        """One that the provider's own servers run. Agents always send some beside those that they run themselves."""
        self.left_out.append(f"{where}: {kind!s:.80}")

    def require_tools(self, found: Sequence[Any], what: str) -> None:
        """Raises ApiError where tools were left out and there are no others: the request is for them."""
        tools = [told for told in self.left_out if told.startswith("tools")]
        if tools and not found:
            where, _, kind = tools[0].partition(": ")
            raise ApiError(400, f"{where} is of type {kind!r}, which does not run here: {what} do, which the client "
                                "calls", param=where)  # fmt: skip

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors inside name the request's own items in place of a chat's messages."""

        def told(text: str) -> str:
            return _MESSAGE.sub(lambda m: self.origins[int(m[1])], text)

        try:
            yield
        except UsageError as e:
            raise ApiError(400, told(e.message)) from e
        except ApiError as e:
            e.message = told(e.message)
            raise


def text_of(content: Any, kinds: Mapping[str, str], where: str, *, join: str = "") -> str:
    """The text of `content`: a string, or parts, each with its text in the field that `kinds` has for its type."""
    return text_in(content_of(content, kinds, where, None, join=join))


def content_of(
    content: Any,
    kinds: Mapping[str, str],
    where: str,
    turns: Turns | None,
    *,
    join: str = "",
    is_result: bool = False,
) -> Content:
    """As `text_of`, with the images and sounds among the parts that `turns` may have; None: all of it is text.

    is_result: of a call. There the model is told of a part that it cannot read, which its own call brought: no client
    can take that back, and the conversation would end.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(400, f"{where} is neither text nor a list of parts", param=where)
    parts: list[str | Item] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kinds.get(kind, "")) if isinstance(kind, str) else None
        if isinstance(text, str):
            parts.append(text)
        elif turns and isinstance(kind, str) and kind in KINDS and (turns.media.reads(KINDS[kind]) or not is_result):
            parts.append(_item(part, f"{where}[{at}]", turns.media))
        elif not turns or not is_result or not isinstance(kind, str) or kind in kinds:
            raise not_text(kind, f"{where}[{at}]", kinds)
        else:
            turns.left_out.append(f"{where}[{at}]: {kind:.80}")
            parts.append(f"({kind:.80}: this cannot be read here)")
    return joined(parts, join)


def _item(part: dict[str, Any], where: str, media: MediaSupport) -> Item:
    try:
        if (item := item_of(part, where, media)) is None:
            raise TypeError(f"{where} is no item, by its type")
        return item
    except UsageError as e:
        raise ApiError(400, e.message, param=where) from e


def not_text(kind: Any, where: str, kinds: Sequence[str] | Mapping[str, str]) -> ApiError:
    """Of a part that the model cannot read."""
    if isinstance(kind, str) and kind in KINDS:
        return ApiError(400, f"{where}: images and sounds are the user's, or what tools return; here is text alone",
                        param=where)  # fmt: skip
    if isinstance(kind, str) and kind in kinds:
        return ApiError(400, f"{where} is of type {kind!r:.80} and has no text", param=where)
    return ApiError(400, f"{where} is of type {kind!r:.80}; read here: {', '.join(kinds)}", param=where)


def chat_body(turns: Turns, values: Mapping[str, Any]) -> ChatCompletion:
    """The request of a chat with these fields beside its messages; a None is left out."""
    if not turns.messages:
        raise ApiError(400, "there are no messages")
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return ChatCompletion.model_validate({"messages": turns.messages, **given})
    except ValidationError as e:
        first = e.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ApiError(400, f"{name}: {first['msg']}", param=name) from None


async def begin(
    request: Request, service: Service, turns: Turns, body: ChatCompletion, *, clip: bool = False
) -> tuple[Asked, list[AsyncGenerator[Part, None]]]:
    """As `answers`; errors name the request's own items."""
    with turns.named():
        asked, generators = await answers(request, service, body, clip=clip)
    return replace(asked, left_out=tuple(turns.left_out)), generators


class Answer(Protocol):
    """An answer of such an API as it comes together, and the events of a stream that tell of it."""

    usage: Usage
    num_thoughts: int  # tokens

    def begin(self) -> Iterator[Event]: ...
    def take(self, delta: Delta) -> Iterator[Event]: ...

    def end(self, reason: str, stopped_by: str | None) -> Iterator[Event]:
        """reason, stopped_by: why the answer ended, as a chat's finish_reason and stop_reason say it."""
        ...

    def whole(self) -> dict[str, Any]: ...
    def fail(self, error: ApiError) -> Event: ...


async def send(
    request: Request,
    service: Service,
    trace: Trace,
    asked: Asked,
    generators: list[AsyncGenerator[Part, None]],
    answer: Answer,
    *,
    as_stream: bool,
) -> Response:
    """`answer` made of what the generators give: its events as they come, or it alone once it is whole.

    Raises ApiError where nothing has been sent yet, and ClientGone where nobody waits.
    """
    thoughts = thought_counter(service.codec, asked.prompt)

    def take(part: Part) -> Iterator[Event]:
        answer.num_thoughts = thoughts(part.tokens)
        for delta in part.deltas:
            yield from answer.take(delta)
        if part.finish_reason is not None:
            yield from answer.end(part.finish_reason, part.stop_reason)

    def add(part: Part) -> None:
        deque(take(part), maxlen=0)

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(parts_of(service, answer.usage, trace, generators)) as parts:
            opening = answer.begin()  # comes with the first part: what goes wrong before has a status
            async for part in parts:
                for event in chain(opening, take(part)):
                    yield named_event(event)

    if as_stream:
        response = await send_stream(request, events(), lambda error: named_event(answer.fail(errors.of(error))))
    else:
        response = await send_whole(request, service, answer.usage, trace, generators, add, answer.whole)
    response.headers.update(asked.headers)
    return response


async def count_tokens(request: Request, service: Service, turns: Turns, body: ChatCompletion) -> int:
    """Of the prompt that the model would see."""
    service.require_model(body.model)
    with turns.named():
        messages = template_messages(body.messages, service.codec.template_reads, service.media)
        tools = [] if body.tool_choice == "none" else told_tools(service, body.tools)
        variables = await variables_of(service, body, tools)
        encoded = service.encode_chat(messages, variables, max_soft_tokens(body.mm_processor_kwargs))
        return len((await unless_gone(request, encoded)).ids)


def thought_counter(codec: TextCodec, prompt: Sequence[int]) -> Callable[[Sequence[int]], int]:
    """Counts an answer's tokens that are thoughts, the channel's markers included: how many so far."""
    first, last = codec.channel_ids or (-1, -1)
    is_thought, count = codec.open_thought(prompt) is not None, 0

    def add(tokens: Sequence[int]) -> int:
        nonlocal is_thought, count
        for token in tokens:
            is_thought = is_thought or token == first
            count += is_thought
            is_thought = is_thought and token != last
        return count

    return add
