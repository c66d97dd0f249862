"""LiteLLM against `kerngen serve`: what a client uses, each with the answer that it must have.

python examples/serving/clients/with_litellm.py URL KEY [URL OF A SERVER THAT SEES AND HEARS]
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks GitHub for prices
import litellm

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["blue", "red"]}}, "required": ["colour"],
          "additionalProperties": False}  # fmt: skip
# A schema of its own: LiteLLM takes additionalProperties out of tools that it sends to hosted_vllm.
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": {**SCHEMA}}}
TINY = Path(__file__).resolve().parents[2] / "tiny"
PNG = base64.b64encode((TINY / "cross.png").read_bytes()).decode()
WAV = base64.b64encode((TINY / "tone.wav").read_bytes()).decode()


def main(url: str, key: str, seeing: str = "") -> None:
    import openai

    served = openai.OpenAI(base_url=url, api_key=key).models.list().data[0].id
    for provider in ("openai", "hosted_vllm"):
        asked: dict[str, Any] = {"model": f"{provider}/{served}", "messages": MESSAGES, "api_base": url, "api_key": key,
                                 "temperature": 0, "max_tokens": 24, "num_retries": 0}  # fmt: skip
        whole = litellm.completion(**asked)
        said = whole.choices[0].message.content
        assert 0 < whole.usage.completion_tokens <= 24
        print(f"{asked['model']}: {said!r}")
        _stream(asked, whole)
        _tools(asked)
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
        answer = litellm.completion(**{**asked, "max_tokens": 120}, response_format=wanted)
        assert json.loads(answer.choices[0].message.content)["colour"] in ("blue", "red")
        found = litellm.completion(**asked, logprobs=True, top_logprobs=2).choices[0].logprobs
        assert len(found.content if hasattr(found, "content") else found["content"]) == whole.usage.completion_tokens
        many = litellm.batch_completion(**{**asked, "messages": [MESSAGES] * 3})
        assert {m.choices[0].message.content for m in many} == {said}
        assert asyncio.run(_together(asked)) == {said}
        _errors(asked)
    _responses(url, key, served)
    text = litellm.text_completion(model=f"text-completion-openai/{served}", prompt="The", api_base=url, api_key=key,
                                   temperature=0, max_tokens=8)  # fmt: skip
    print(f"completions: {text.choices[0].text!r}")
    assert text.usage.completion_tokens <= 8
    if seeing:
        _media(seeing, key, openai.OpenAI(base_url=seeing, api_key=key).models.list().data[0].id)


def _media(url: str, key: str, served: str) -> None:
    """An image by all three providers, a sound by those that have it."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    sound = {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}}
    for provider, part, question, right in (
        ("openai", image, "What is this?", "A green cross."),
        ("openai", sound, "What do you hear?", "A low tone."),
        ("hosted_vllm", image, "What is this?", "A green cross."),
        ("hosted_vllm", sound, "What do you hear?", "A low tone."),
        ("anthropic", image, "What is this?", "A green cross."),
    ):
        messages = [{"role": "user", "content": [part, {"type": "text", "text": question}]}]
        base = url.removesuffix("/v1") if provider == "anthropic" else url
        told = litellm.completion(f"{provider}/{served}", messages, api_base=base, api_key=key, temperature=0,
                                  max_tokens=24, num_retries=0)  # fmt: skip
        said = told.choices[0].message.content
        assert said == right, (provider, said)
        print(f"{provider}: {question} {said}")


def _responses(url: str, key: str, served: str) -> None:
    """Both APIs of coding agents, by their names in LiteLLM, and its adapter from one to the other."""
    asked: dict[str, Any] = {"model": f"openai/{served}", "api_base": url, "api_key": key, "temperature": 0}
    whole = litellm.responses(**asked, input=MESSAGES, max_output_tokens=24)
    *_, last = litellm.responses(**asked, input=MESSAGES, max_output_tokens=24, stream=True)
    assert last.response.output[0].content[0].text == whole.output[0].content[0].text
    tool = {"name": "look_up", "description": "Looks up.", "input_schema": SCHEMA}
    chat: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 120, "tools": [tool], "tool_choice": {"type": "any"}}
    adapted = asyncio.run(litellm.anthropic.messages.acreate(**asked, **chat))
    assert any(block["type"] == "tool_use" for block in adapted["content"])
    asked |= {"model": f"anthropic/{served}", "api_base": url.removesuffix("/v1"), "num_retries": 0}
    called = litellm.completion(**asked, messages=MESSAGES, max_tokens=120, tools=[TOOL], tool_choice="required")
    call = called.choices[0].message.tool_calls[0].function
    assert json.loads(call.arguments)["colour"] in ("blue", "red")
    pieces = list(litellm.completion(**asked, messages=MESSAGES, max_tokens=24, stream=True))
    again = litellm.stream_chunk_builder(pieces)
    assert again is not None
    said = litellm.completion(**asked, messages=MESSAGES, max_tokens=24).choices[0].message.content
    assert again.choices[0].message.content == said
    print(f"responses and messages, whole and streamed, the same; called {call.name}({call.arguments})")


def _stream(asked: dict[str, Any], whole: Any) -> None:
    pieces = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    again = litellm.stream_chunk_builder(pieces, messages=asked["messages"])
    assert again is not None
    assert again.choices[0].message.content == whole.choices[0].message.content
    assert again.choices[0].finish_reason == whole.choices[0].finish_reason
    assert again.usage.completion_tokens == whole.usage.completion_tokens, (again.usage, whole.usage)
    assert again.usage.prompt_tokens == whole.usage.prompt_tokens
    print(f"streamed in {len(pieces)} chunks, the same")


def _tools(asked: dict[str, Any]) -> None:
    asked = {**asked, "max_tokens": 120, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    message = litellm.completion(**asked).choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments)["colour"] in ("blue", "red")
    pieces = list(litellm.completion(**asked, stream=True))
    again = litellm.stream_chunk_builder(pieces)
    assert again is not None
    assert again.choices[0].finish_reason == "tool_calls"
    assert again.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    told = [*MESSAGES, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "blue"}]
    assert litellm.completion(**{**asked, "messages": told, "tool_choice": "none"}).choices[0].message.content
    print(f"a call: {call.function.name}({call.function.arguments}), and on with its answer")


async def _together(asked: dict[str, Any]) -> set[str]:
    answers = await asyncio.gather(*[litellm.acompletion(**asked) for _ in range(4)])
    streamed = await litellm.acompletion(**asked, stream=True)
    text = "".join([piece.choices[0].delta.content or "" async for piece in streamed])
    return {a.choices[0].message.content for a in answers} | {text}


def _errors(asked: dict[str, Any]) -> None:
    for wrong, error in (
        ({"model": asked["model"].partition("/")[0] + "/none"}, litellm.NotFoundError),
        ({"temperature": -1}, litellm.BadRequestError),
        ({"max_tokens": 10**7}, litellm.ContextWindowExceededError),
        ({"api_key": "wrong"}, litellm.AuthenticationError),
    ):
        try:
            litellm.completion(**{**asked, **wrong})
        except error as e:
            print(f"{type(e).__name__}: {str(e)[:100]}")
        else:
            raise AssertionError(f"{wrong} was taken")
    many = {**asked, "n": 40, "max_tokens": 60}  # run.py starts the server with a queue of 48
    busy = litellm.completion(**many, stream=True)
    next(busy)
    try:
        litellm.completion(**many)
    except litellm.RateLimitError as e:
        print(f"{type(e).__name__}: {str(e)[:100]}")
    else:
        raise AssertionError("more requests were taken than there are places for")
    for _ in busy:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
