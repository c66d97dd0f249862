"""/v1/completions: continues a prompt of text or tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kerngen.runtime.engine import TokenLogprobs
from kerngen.runtime.serve.choice_stream import (
    Asked,
    Part,
    TextReader,
    choice,
    sampling_of,
    stop_ids_of,
    stops_of,
)
from kerngen.runtime.serve.errors import ApiError
from kerngen.runtime.serve.protocol import Completion
from kerngen.runtime.serve.responses import Heading, TextLogprobs, Usage, text_of
from kerngen.runtime.serve.service import service_of
from kerngen.runtime.serve.streaming import send_events, send_whole, unless_gone
from kerngen.runtime.serve.structured_outputs import guiding_of, size_of_schemas
from kerngen.runtime.serve.unsupported_fields import require_honoured

DEFAULT_TOKENS = 16  # of an answer, as OpenAI has it

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request, body: Completion) -> Response:
    service = service_of(request)
    trace = service.trace(request)
    service.require_model(body.model)
    _require_known(body)
    asked_for, count, codec = _prompts(body), body.n or 1, service.codec
    service.require_places(len(asked_for) * count)
    encode = partial(service.encode, with_bos=body.add_special_tokens, control_tokens=body.control_tokens)
    prompts = [await unless_gone(request, encode(p)) if isinstance(p, str) else p for p in asked_for]
    generators: list[AsyncGenerator[Part, None]] = []
    echoes: list[str] = []
    headers: dict[str, str] = {}  # the same for all prompts
    for i, prompt in enumerate(prompts):
        room = service.room(prompt, body.max_tokens or DEFAULT_TOKENS, "prompt")
        guide = partial(guiding_of, service, body, prompt)
        guiding, not_enforced = await service.off_loop(guide, size=size_of_schemas(body))
        of_prompt = body.logprobs if body.echo else None
        asked = Asked(prompt, room, stop_ids_of(service, body), body.logprobs, guiding, of_prompt, not_enforced)
        headers = asked.headers
        echoes += [await service.off_loop(codec.decode, prompt) if body.echo else ""] * count
        for j in range(count):
            reader = TextReader(codec, stops_of(body))
            generators.append(choice(service, asked, i * count + j, reader, sampling_of(service, body, j)))
    heading = Heading.of("cmpl", "text_completion", body.model or service.names[0])
    trace.asked(body, heading, body.max_tokens or DEFAULT_TOKENS)
    usage = Usage(sum(map(len, prompts)))
    logprobs = [TextLogprobs(codec, prompts[i // count] if body.echo else ()) for i in range(len(echoes))]

    def told(part: Part, text: str, of_tokens: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": part.index, "text": text, "logprobs": of_tokens, "finish_reason": part.finish_reason,
                "stop_reason": part.stop_reason}  # fmt: skip

    if body.stream:
        unsaid = dict(enumerate(echoes))

        def chunks(part: Part) -> list[dict[str, Any]]:
            text = unsaid.pop(part.index, "") + text_of(part.deltas)
            found = logprobs[part.index].body([*part.prompt_logprobs, *part.logprobs])
            is_news = text or found or part.finish_reason
            return [told(part, text, found)] if is_news else []

        answer = await send_events(request, service, body.stream_options, heading, usage, trace, generators, chunks)
        answer.headers.update(headers)
        return answer
    texts, last = list(echoes), [Part(i) for i in range(len(echoes))]
    found: list[list[TokenLogprobs]] = [[] for _ in echoes]

    def add(part: Part) -> None:
        texts[part.index] += text_of(part.deltas)
        found[part.index] += [*part.prompt_logprobs, *part.logprobs]
        last[part.index] = part

    def whole() -> dict[str, Any]:
        choices = [told(part, texts[i], logprobs[i].body(found[i])) for i, part in enumerate(last)]
        return heading.body(choices, usage)

    answer = await send_whole(request, service, usage, trace, generators, add, whole)
    answer.headers.update(headers)
    return answer


def _require_known(body: Completion) -> None:
    require_honoured(body)
    if body.suffix:
        raise ApiError(
            400, "suffix: the model here writes what follows a text, not what stands between two", param="suffix"
        )
    if (body.best_of or 1) > (body.n or 1):
        raise ApiError(400, f"best_of {body.best_of}: no answers are made but the n={body.n or 1} that are sent",
                       param="best_of")  # fmt: skip


def _prompts(body: Completion) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)
