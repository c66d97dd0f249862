"""A service whose chat template reads tools, calls, their answers and thoughts, and whose answers are written here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from played_engine import PlayedEngine, played_service, words
from starlette.testclient import TestClient

from kerngen.runtime.serve.app import make_app
from kerngen.runtime.serve.service import Service

Talk = tuple[TestClient, Service, PlayedEngine]
Q = '<|"|>'
THOUGHT, CALL = "<|channel>thought\nI see.<channel|>", f"<|tool_call>call:look{{city:{Q}Graz{Q},days:2}}<tool_call|>"
TEMPLATE = (
    "{{ bos_token }}{% if enable_thinking %}THINK {% endif %}{% if tools %}TOOLS {{ tools | tojson }} {% endif %}"
    "{% for m in messages %}{{ m.role }}[{{ m.content }}"
    "{% if m.reasoning_content %} thought({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %} call({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% if m.tool_call_id %} of {{ m.name }}{% endif %}] {% endfor %}"
)


def talking_service(answer: str) -> tuple[Service, PlayedEngine]:
    """Answers every prompt with `answer`, a token a step."""
    service, engine = played_service()
    stop = service.stop_ids[0]
    engine.script = lambda prompt: [*words(service.codec, answer), [stop]]
    service.codec._template.source = TEMPLATE
    return service, engine


@contextmanager
def talking(answer: str) -> Iterator[Talk]:
    """A client of the app with such a service."""
    service, engine = talking_service(answer)
    with TestClient(make_app(service), raise_server_exceptions=False) as client:
        yield client, service, engine


def prompt_of(service: Service, engine: PlayedEngine) -> str:
    """What the model read last."""
    return service.codec.decode(engine.asked[-1][0]).strip()


def events_of(text: str) -> list[dict[str, Any]]:
    """Of a stream whose events are named by their types."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found
