"""`kerngen serve`: OpenAI's and Anthropic's own clients read /v1/responses and /v1/messages. The engine is played."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import uvicorn
from talking import CALL, THOUGHT, prompt_of, talking_service

from kerngen.runtime.serve.app import make_app

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
GRAZ = {"city": "Graz", "days": 2}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Any]]:
    """Its address, and what the model has read last."""
    service, engine = talking_service(f"{THOUGHT}So.{CALL}")
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(service, ["key"]), log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}", lambda: prompt_of(service, engine)
    server.should_exit = True
    thread.join()


def test_openais_client(served: tuple[str, Any]) -> None:
    url, read = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    first = client.responses.create(model="tiny", input="Hi", tools=tools, store=False)
    assert (first.output_text, [item.type for item in first.output]) == (
        "So.",
        ["reasoning", "message", "function_call"],
    )
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sunny"}
    with client.responses.stream(model="tiny", input=[{"role": "user", "content": "Hi"}, *first.output, result],
                                 tools=tools) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        last = stream.get_final_response()
    assert {"response.reasoning_text.delta", "response.output_text.delta", "response.completed"} <= kinds
    assert (last.output_text, last.output[2].arguments) == ("So.", first.output[2].arguments)
    assert read().endswith('assistant[So. thought(I see.) call(look {"city": "Graz", "days": 2})] tool[sunny of look]')
    with pytest.raises(openai.NotFoundError, match="nothing is stored here"):
        client.responses.retrieve(first.id)


def test_anthropics_client(served: tuple[str, Any]) -> None:
    url, read = served
    client = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "tools": [{"name": "look", "input_schema": SCHEMA}]}
    hi = {"role": "user", "content": "Hi"}
    first = client.messages.create(**asked, messages=[hi])
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert (first.content[2].input, first.stop_reason) == (GRAZ, "tool_use")
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "sunny"}
    turns = [hi, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(**asked, messages=turns) as stream:
        assert "".join(stream.text_stream) == "So."
        last = stream.get_final_message()
    assert (last.content[2].input, last.stop_reason) == (GRAZ, "tool_use")
    assert read().endswith('assistant[So. thought(I see.) call(look {"city": "Graz", "days": 2})] tool[sunny of look]')
    counted = client.messages.count_tokens(model="tiny", tools=asked["tools"], messages=turns)
    assert counted.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError, match="there is tiny"):
        client.messages.create(**asked | {"model": "no"}, messages=[hi])
