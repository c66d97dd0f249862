"""anthropic-python against `kerngen serve`: what a client uses, each with the answer that it must have.

    kerngen serve examples/tiny/gemma-4-tiny-w4a16 --context 256 --api-key secret
    pip install anthropic && python examples/serving/clients/with_anthropic.py http://127.0.0.1:8000/v1 secret

A third argument is the address of `kerngen serve examples/tiny/gemma-4-tiny-media --media images,audio --port 8001`.
Exits with an AssertionError where one is not as it should be.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path
from typing import Any

import anthropic

HI: Any = {"role": "user", "content": "Why is the sky blue?"}
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["blue", "red"]}}, "required": ["colour"],
          "additionalProperties": False}  # fmt: skip
TOOL: Any = {"name": "look_up", "description": "Looks up.", "input_schema": SCHEMA}
TINY = Path(__file__).resolve().parents[2] / "tiny"
PNG = base64.b64encode((TINY / "cross.png").read_bytes()).decode()


def main(url: str, key: str = "none", seeing: str = "") -> None:
    url = url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=url, api_key=key)
    model = client.models.list().data[0].id
    asked: Any = {"model": model, "messages": [HI], "system": "Be brief.", "max_tokens": 24,
                  "extra_body": {"temperature": 0}}  # fmt: skip

    whole = client.messages.create(**asked)
    said = "".join(block.text for block in whole.content if block.type == "text")
    print(f"{model}: {said!r}, {whole.stop_reason}")
    assert 0 < whole.usage.output_tokens <= 24
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == said
        last = stream.get_final_message()
    assert (last.stop_reason, last.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = client.messages.count_tokens(model=model, messages=[HI], system="Be brief.").input_tokens
    assert counted == last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)
    print(f"streamed, the same; a prompt of {counted} tokens")

    calls: Any = {**asked, "max_tokens": 120, "tools": [TOOL], "tool_choice": {"type": "any"}}
    called = client.messages.create(**calls)
    (call,) = [block for block in called.content if block.type == "tool_use"][:1]
    assert called.stop_reason == "tool_use"
    assert call.input["colour"] in ("blue", "red")
    with client.messages.stream(**calls) as stream:
        again = stream.get_final_message()
    assert next((b.name, b.input) for b in again.content if b.type == "tool_use") == (call.name, call.input)
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "It is."}
               for block in called.content if block.type == "tool_use"]  # fmt: skip
    turns = [HI, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    after = client.messages.create(**{**asked, "messages": turns}, tools=[TOOL])
    assert after.role == "assistant"
    print(f"called {call.name}({call.input}), was told 'It is.'")

    for wrong, error in (
        ({"model": "no such model"}, anthropic.NotFoundError),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{**asked, **wrong})
        except error as e:
            print(f"{type(e).__name__}: {e.body['error']['message']}")
        else:
            raise AssertionError(f"{wrong} was taken")

    async def together() -> set[str]:
        many = anthropic.AsyncAnthropic(base_url=url, api_key=key)
        answers = await asyncio.gather(*[many.messages.create(**asked) for _ in range(8)])
        return {"".join(block.text for block in a.content if block.type == "text") for a in answers}

    assert asyncio.run(together()) == {said}
    print("eight at once say what one says alone")
    if seeing:
        _media(seeing, key)


def _media(url: str, key: str) -> None:
    """An image; this API has no sound."""
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    parts: Any = [image, {"type": "text", "text": "What is this?"}]
    asked: Any = {"model": client.models.list().data[0].id, "messages": [{"role": "user", "content": parts}]}
    counted = client.messages.count_tokens(**asked).input_tokens
    told = client.messages.create(**asked, max_tokens=24, extra_body={"temperature": 0})
    said = "".join(block.text for block in told.content if block.type == "text")
    assert said == "A green cross.", said
    assert told.usage.input_tokens + (told.usage.cache_read_input_tokens or 0) == counted
    print(f"What is this? {said} A prompt of {counted} tokens")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["http://127.0.0.1:8000/v1"]))
