"""Sends one request and records it: when its tokens came, and what went wrong."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kerngen.errors import UsageError
from kerngen.loadgen.http import Server, ServerGone

FIRST_ID = 1000  # of random tokens: below lie control tokens
WAYS = ("ids", "text", "chat")  # how prompts are sent
Leaves = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of prompts and answers. spread: each is drawn from its length times 1 - spread to 1 + spread, as vLLM's
    --random-range-ratio has it. way: see WAYS. vocab_size: prompts are of tokens below it. image: width and height of
    the picture that each prompt shows, another one each, or with same_image one for all.
    """

    prompt_tokens: int
    answer_tokens: int
    spread: float = 0.0
    way: str = "ids"
    vocab_size: int = 32_000
    temperature: float = 0.0
    seed: int = 0
    image: tuple[int, int] | None = None
    same_image: bool = False

    def draw(self, number: int) -> tuple[list[int], int]:
        """(prompt, tokens of the answer) of request `number`: a function of these fields and of it alone."""
        draw = random.Random(f"{self.seed} load {number}")

        def about(count: int) -> int:
            return max(draw.randint(round(count * (1 - self.spread)), round(count * (1 + self.spread))), 1)

        first = min(FIRST_ID, self.vocab_size // 2)
        return draw.choices(range(first, self.vocab_size), k=about(self.prompt_tokens)), about(self.answer_tokens)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it is sent."""

    path: str
    body: dict[str, Any]
    num_prompt_tokens: int


async def prepared(server: Server, model: str, shape: Shape, numbers: Sequence[int]) -> list[Asked]:
    """The requests of these numbers. Of text the server itself says what the tokens are. Raises UsageError."""
    return [await _prepared(server, model, shape, number) for number in numbers]


async def _prepared(server: Server, model: str, shape: Shape, number: int) -> Asked:
    ids, count = shape.draw(number)
    body = {
        "model": model, "max_tokens": count, "ignore_eos": True, "temperature": shape.temperature, "stream": True,
        "stream_options": {"include_usage": True}, "seed": number,
    }  # fmt: skip
    if shape.way == "ids":
        return Asked("/v1/completions", {**body, "prompt": ids}, len(ids))
    status, said = await server.ask("POST", "/detokenize", {"model": model, "tokens": ids})
    if status != 200:
        raise UsageError(
            f"/detokenize: {_said(said)}",
            hint="--vocab NUMBER for a vocabulary of another size; --as ids sends tokens, which need no text",
        )
    try:
        text = str(json.loads(said)["prompt"])
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"/detokenize answered no text: {said[:80]!r}", hint="--as ids sends tokens") from None
    if shape.way == "text":
        return Asked("/v1/completions", {**body, "prompt": text}, len(ids))
    content: Any = text
    if shape.image:
        picture = _picture(shape.image, 0 if shape.same_image else number)
        content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": text}]
    return Asked("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": content}]}, len(ids))


@lru_cache(maxsize=1)  # which prompts may all show
def _picture(size: tuple[int, int], number: int) -> str:
    """A data: URL of JPEG: random shades in 40 by 40 fields and a little noise, about as large as a photograph's."""
    try:
        from PIL import Image
    except ImportError:
        raise UsageError("--image draws pictures with Pillow, which is not installed",
                         hint="pip install 'kerngen[media]'") from None  # fmt: skip
    import numpy as np

    draw = np.random.default_rng(number)
    shades = Image.fromarray(draw.integers(0, 256, (40, 40, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    pixels = np.asarray(shades, np.int16) + draw.integers(-8, 9, (size[1], size[0], 1), np.int16)
    into = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(into, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(into.getvalue()).decode()


@dataclass(slots=True)
class Outcome:
    """Times in seconds on time.perf_counter. at: when each chunk of the answer came; num_prompt_tokens,
    num_tokens: as the server counted them. error: what went wrong, "" for nothing.
    """

    began: float
    at: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def first_s(self) -> float:
        """To the first token."""
        return self.at[0] - self.began

    @property
    def whole_s(self) -> float:
        return self.at[-1] - self.began

    @property
    def between_s(self) -> list[float]:
        """Between chunks that follow each other."""
        return [b - a for a, b in zip(self.at, self.at[1:], strict=False)]

    @property
    def per_token_s(self) -> float:
        """Of each token behind the first, on average; 0 where there is none."""
        return (self.whole_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


async def follow(server: Server, asked: Asked, timeout_s: float, leaves: Leaves | None = None) -> Outcome:
    """Ask, and watch the answer come. leaves: whether nobody wants the rest after so many chunks: that is no error."""
    outcome = Outcome(time.perf_counter(), num_prompt_tokens=asked.num_prompt_tokens)
    try:
        async with asyncio.timeout(timeout_s):
            await _follow(server, asked, outcome, leaves)
    except TimeoutError:
        outcome.error = f"not done within {timeout_s:g} s"
    except ServerGone as e:
        outcome.error = e.message
    return outcome


async def _follow(server: Server, asked: Asked, outcome: Outcome, leaves: Leaves | None) -> None:
    answer = await server.open("POST", asked.path, asked.body)
    try:
        if answer.status != 200:
            outcome.error = f"HTTP {answer.status}: {_said(b''.join([d async for d in answer.data()]))}"
            return
        is_over = False
        async for event in answer.events():
            if event == b"[DONE]":
                is_over = True
                continue
            try:
                is_chunk = _hear(json.loads(event), outcome)
            except (ValueError, LookupError, TypeError, AttributeError):
                outcome.error = f"sent what is none of the API's: {event[:80]!r}"
                return
            if is_chunk and leaves is not None and leaves(len(outcome.at)):
                return
        if not is_over and not outcome.error:
            outcome.error = "ended without [DONE]"
        elif not outcome.at and not outcome.error:
            outcome.error = "no token came"
    finally:
        answer.leave()


def _hear(said: dict[str, Any], outcome: Outcome) -> bool:
    """Tells `outcome` what an event says. Whether it is a chunk of the answer."""
    choices = said.get("choices")
    if "error" in said:
        outcome.error = f"broke off: {said['error'].get('message')}"
    elif choices:
        outcome.at.append(time.perf_counter())
        outcome.text += choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or ""
    if usage := said.get("usage"):
        outcome.num_prompt_tokens = usage["prompt_tokens"]
        outcome.num_tokens = usage["completion_tokens"]
    return bool(choices) and not outcome.error


def _said(body: bytes) -> str:
    """What an error says of itself."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


async def first_model(server: Server) -> str:
    """The name that the server goes by. Raises ServerGone, UsageError."""
    status, said = await server.ask("GET", "/v1/models")
    if status != 200:
        raise UsageError(f"{server}/v1/models: HTTP {status}: {_said(said)}",
                         hint="--api-key, or is it another kind of server?")  # fmt: skip
    try:
        return str(json.loads(said)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"{server}/v1/models is no list of models: {said[:80]!r}",
                         hint="is it another kind of server?") from None  # fmt: skip
