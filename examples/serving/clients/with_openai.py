"""openai-python against `kerngen serve`: what a client uses, each with the answer that it must have.

    kerngen serve examples/tiny/gemma-4-tiny-w4a16 --context 256 --api-key secret
    pip install openai && python examples/serving/clients/with_openai.py http://127.0.0.1:8000/v1 secret

A third argument is the address of `kerngen serve examples/tiny/gemma-4-tiny-media --media images,audio --port 8001`.
Exits with an AssertionError where one is not as it should be.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import openai

MESSAGES: Any = [{"role": "user", "content": "Why is the sky blue?"}]
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["blue", "red"]}}, "required": ["colour"],
          "additionalProperties": False}  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
TINY = Path(__file__).resolve().parents[2] / "tiny"
PNG = base64.b64encode((TINY / "cross.png").read_bytes()).decode()
WAV = base64.b64encode((TINY / "tone.wav").read_bytes()).decode()


def main(url: str, key: str = "none", seeing: str = "") -> None:
    client = openai.OpenAI(base_url=url, api_key=key)
    model = client.models.list().data[0].id
    asked: Any = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}

    whole = client.chat.completions.create(**asked)
    said = whole.choices[0].message.content
    print(f"{model}: {said!r}")
    assert whole.usage.completion_tokens <= 24

    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == said
    assert pieces[-1].usage == whole.usage or pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    print(f"streamed in {len(pieces)} chunks, the same")

    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in found)
    text = client.completions.create(model=model, prompt="The", max_tokens=4, logprobs=1).choices[0]
    assert len(text.logprobs.tokens) == 4 or text.finish_reason == "stop"

    weighed: Any = client.completions.create(model=model, prompt=["Why is the", "Plants"], max_tokens=1, temperature=0,
                                             logprobs=1, echo=True)  # fmt: skip
    for choice in weighed.choices:
        first, *others = choice.logprobs.token_logprobs
        assert first is None
        assert all(value <= 0 for value in others)
        assert choice.text.startswith(("Why is the", "Plants"))
    print(f"prompts weighed: {[len(choice.logprobs.tokens) for choice in weighed.choices]} tokens")

    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    answer = client.chat.completions.create(**{**asked, "max_tokens": 120}, response_format=wanted)
    print(f"by a schema: {json.loads(answer.choices[0].message.content)}")
    called = client.chat.completions.create(**{**asked, "max_tokens": 120}, tools=[TOOL], tool_choice="required")
    call = called.choices[0].message.tool_calls[0].function
    print(f"a call: {call.name}({json.loads(call.arguments)})")

    _responses(client, model)

    for wrong, error in (
        ({"model": "no such model"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"max_tokens": 10**7}, openai.BadRequestError),
    ):
        try:
            client.chat.completions.create(**{**asked, **wrong})
        except error as e:
            print(f"{type(e).__name__}: {e.body['message']}")
        else:
            raise AssertionError(f"{wrong} was taken")

    async def together() -> set[str]:
        many = openai.AsyncOpenAI(base_url=url, api_key=key)
        answers = await asyncio.gather(*[many.chat.completions.create(**asked) for _ in range(8)])
        return {a.choices[0].message.content for a in answers}

    assert asyncio.run(together()) == {said}
    print("eight at once say what one says alone")
    if seeing:
        _media(seeing, key)


def _responses(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "input": MESSAGES, "temperature": 0, "max_output_tokens": 24, "store": False}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1].response
    assert "".join(pieces) == last.output_text == whole.output_text
    assert (last.status, last.usage.output_tokens) == (whole.status, whole.usage.output_tokens)
    tool: Any = {"type": "function", "strict": True, **TOOL["function"]}
    calls: Any = {**asked, "max_output_tokens": 120, "tools": [tool], "tool_choice": "required"}
    with client.responses.stream(**calls) as stream:
        called = stream.until_done().get_final_response()
    (call,) = [item for item in called.output if item.type == "function_call"][:1]
    assert json.loads(call.arguments)["colour"] in ("blue", "red")
    told = [{"type": "function_call_output", "call_id": item.call_id, "output": "It is."}
            for item in called.output if item.type == "function_call"]  # fmt: skip
    after = client.responses.create(**{**asked, "input": [*MESSAGES, *called.output, *told]}, tools=[tool])
    assert after.output_text is not None
    for wrong in ({"previous_response_id": whole.id}, {"store": True}):
        try:
            client.responses.create(**{**asked, **wrong})
        except openai.BadRequestError as e:
            print(f"{type(e).__name__}: {e.body['message']}")
        else:
            raise AssertionError(f"{wrong} was taken")
    print(f"a response streamed in {len(pieces)} pieces, the same; called {call.name}({call.arguments})")


def _media(url: str, key: str) -> None:
    """An image and a sound, by chats and by responses."""
    client = openai.OpenAI(base_url=url, api_key=key)
    asked: Any = {"model": client.models.list().data[0].id, "temperature": 0}
    png = f"data:image/png;base64,{PNG}"
    image: Any = {"type": "image_url", "image_url": {"url": png, "detail": "low"}}
    sound: Any = {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}}
    for parts, question, right in (
        ([image], "What is this?", "A green cross."),
        ([sound], "What do you hear?", "A low tone."),
        ([image, sound], "What do you see and hear?", "A green cross and a low tone."),
    ):
        messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
        said = client.chat.completions.create(**asked, messages=messages).choices[0].message.content
        assert said == right, said
        pieces = client.chat.completions.create(**asked, messages=messages, stream=True)
        assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == right
        print(f"{question} {said}")
    parts = [{"type": "input_image", "image_url": png}, {"type": "input_text", "text": "What is this?"}]
    told = client.responses.create(**asked, input=[{"role": "user", "content": parts}])
    assert told.output_text == "A green cross.", told.output_text
    print(f"by responses: {told.output_text}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["http://127.0.0.1:8000/v1"]))
