"""langchain-openai against `kerngen serve`: what a client uses, each with the answer that it must have.

python examples/serving/clients/with_langchain.py URL KEY [URL OF A SERVER THAT SEES AND HEARS]
"""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path
from typing import Any, Literal

import openai
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = "Why is the sky blue?"
TINY = Path(__file__).resolve().parents[2] / "tiny"
PNG = base64.b64encode((TINY / "cross.png").read_bytes()).decode()
WAV = base64.b64encode((TINY / "tone.wav").read_bytes()).decode()


class Colour(BaseModel):
    """A colour of the sky."""

    colour: Literal["blue", "red"]
    is_day: bool


@tool
def look_up(colour: Literal["blue", "red"]) -> str:
    """Say what a colour stands for."""
    return f"{colour} stands for the sky"


def main(url: str, key: str, seeing: str = "") -> None:
    model = openai.OpenAI(base_url=url, api_key=key).models.list().data[0].id

    def chat(**more: Any) -> ChatOpenAI:
        return ChatOpenAI(**{"base_url": url, "api_key": key, "model": model, "temperature": 0, "max_tokens": 24,
                             "max_retries": 0, "stream_usage": True} | more)  # fmt: skip

    whole = chat().invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    whole = chat().invoke(QUESTION)
    assert isinstance(whole.content, str)
    assert whole.usage_metadata is not None
    assert 0 < whole.usage_metadata["output_tokens"] <= 24
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    print(f"{model}: {whole.content!r}")

    streamed: Any = None
    pieces = 0
    for piece in chat().stream(QUESTION):
        streamed, pieces = piece if streamed is None else streamed + piece, pieces + 1
    assert isinstance(streamed, AIMessageChunk)
    assert streamed.content == whole.content
    assert streamed.usage_metadata == whole.usage_metadata, (streamed.usage_metadata, whole.usage_metadata)
    print(f"streamed in {pieces} pieces, the same")

    found = chat(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert len(found) == whole.usage_metadata["output_tokens"]

    async def together() -> tuple[list[Any], list[Any], str]:
        one = chat()
        many = await asyncio.gather(*[one.ainvoke(QUESTION) for _ in range(4)])
        batch = await one.abatch([QUESTION] * 4)
        text = "".join([str(piece.content) async for piece in one.astream(QUESTION)])
        return many, batch, text

    many, batch, text = asyncio.run(together())
    assert {m.content for m in (*many, *batch, *chat().batch([QUESTION] * 3))} == {whole.content} == {text}
    print("async, batch and abatch: the same")

    for method in ("json_schema", "function_calling"):
        made = chat(max_tokens=120).with_structured_output(Colour, method=method).invoke(QUESTION)
        assert isinstance(made, Colour), made
        print(f"structured by {method}: {made}")

    for strict in (None, True):
        caller = chat(max_tokens=120).bind_tools([look_up], tool_choice="any", strict=strict, parallel_tool_calls=False)
        called = caller.invoke(QUESTION)
        assert not called.invalid_tool_calls
        (call,) = called.tool_calls
        assert call["name"] == "look_up"
        streamed = None
        for piece in caller.stream(QUESTION):
            streamed = piece if streamed is None else streamed + piece
        assert streamed is not None
        assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(call["name"], call["args"])]
    told = look_up.invoke(call)
    assert isinstance(told, ToolMessage)
    after = chat().bind_tools([look_up]).invoke([HumanMessage(QUESTION), called, told])
    assert isinstance(after.content, str)
    print(f"called {call['name']}({call['args']}), was told {told.content!r}")

    items = chat(max_tokens=120, use_responses_api=True).bind_tools([look_up], tool_choice="any")
    called = items.invoke(QUESTION)
    (call,) = called.tool_calls[:1]
    assert call["name"] == "look_up"
    streamed = None
    for piece in items.stream(QUESTION):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None
    assert streamed.tool_calls[0]["args"] == call["args"]
    answers = [look_up.invoke(made) for made in called.tool_calls]
    after = chat(use_responses_api=True).bind_tools([look_up]).invoke([HumanMessage(QUESTION), called, *answers])
    print(f"by responses: called {call['name']}({call['args']}), then {after.text!r:.60}")

    text = OpenAI(base_url=url, api_key=key, model=model, temperature=0, max_tokens=8, max_retries=0)
    said = text.invoke("The")
    assert "".join(text.stream("The")) == said
    assert text.batch(["The", "A"])[0] == said
    print(f"completions: {said!r}")

    for wrong, error in (
        ({"model": "no such model"}, openai.NotFoundError),
        ({"max_tokens": 10**7}, openai.BadRequestError),
        ({"api_key": "wrong"}, openai.AuthenticationError),
    ):
        try:
            chat(**wrong).invoke(QUESTION)
        except error as e:
            print(f"{type(e).__name__}: {e.body['message']}")  # type: ignore[index]
        else:
            raise AssertionError(f"{wrong} was taken")
    if seeing:
        _media(seeing, key)


def _media(url: str, key: str) -> None:
    """An image and a sound, in LangChain's own form and in OpenAI's, by chats; an image by responses."""
    served = openai.OpenAI(base_url=url, api_key=key).models.list().data[0].id
    images: list[dict[str, Any]] = [
        {"type": "image", "base64": PNG, "mime_type": "image/png"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
    ]
    sounds: list[dict[str, Any]] = [
        {"type": "audio", "base64": WAV, "mime_type": "audio/wav"},
        {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}},
    ]
    asked: Any = {"base_url": url, "api_key": key, "model": served, "temperature": 0, "max_retries": 0}
    asks = [(one, "What is this?", "A green cross.", False) for one in images]
    asks += [(one, "What do you hear?", "A low tone.", False) for one in sounds]
    asks += [(one, "What is this?", "A green cross.", True) for one in images]
    for part, question, right, by_responses in asks:
        message = HumanMessage([part, {"type": "text", "text": question}])
        said = ChatOpenAI(**asked, use_responses_api=by_responses).invoke([message]).text
        assert said == right, (part["type"], said)
    print("an image and a sound, in both forms: named")


if __name__ == "__main__":
    main(*sys.argv[1:])
