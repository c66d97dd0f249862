"""`kerngen serve`: a span for each request, in the trace of who asks. The engine is played, and so is the collector."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from command import Kerngen
from played_engine import TINY, PlayedEngine, played_service
from starlette.testclient import TestClient

from kerngen.errors import UsageError
from kerngen.runtime.serve.app import make_app
from kerngen.runtime.serve.service import Limits, Service
from kerngen.runtime.serve.tracing import Tracing, open_tracing

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
Traced = tuple[TestClient, PlayedEngine, Any, Service]


@pytest.fixture
def traced() -> Iterator[Traced]:
    pytest.importorskip("opentelemetry.sdk", reason="pip install opentelemetry-sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    sent = InMemorySpanExporter()
    service, engine = played_service(tracing=Tracing(SimpleSpanProcessor(sent)), limits=Limits(queue=2))
    with TestClient(make_app(service), raise_server_exceptions=False) as client:
        yield client, engine, sent, service
    service.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_span(traced: Traced, stream: bool) -> None:
    client, _, sent, _ = traced
    asked = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 40, "n": 2, "stream": stream}
    answer = client.post(CHAT, json=HI | asked, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    (span,) = sent.get_finished_spans()
    assert (span.name, span.kind.name, span.status.status_code.name) == ("llm_request", "SERVER", "UNSET")
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    told = {name.removeprefix("gen_ai."): value for name, value in span.attributes.items()}
    assert {name: told[name] for name in told if name.startswith(("request.", "operation"))} == {
        "operation.name": "chat", "request.model": "tiny", "request.n": 2, "request.max_tokens": 40,
        "request.temperature": 0.5, "request.top_p": 0.9, "request.stream": stream, "request.id": told["response.id"],
    }  # fmt: skip
    assert told["response.finish_reasons"] == ("stop", "stop")
    if not stream:
        body = answer.json()
        assert told["response.id"] == body["id"]
        assert told["usage.prompt_tokens"] == told["usage.input_tokens"] == body["usage"]["prompt_tokens"]
        assert told["usage.completion_tokens"] == told["usage.output_tokens"] == body["usage"]["completion_tokens"]
    # The played engine says: 0.04 s in the queue, 0.1 s until the first token, 0.2 s after it.
    assert told["latency.time_in_queue"] == pytest.approx(0.04)
    assert told["latency.time_in_model_prefill"] == pytest.approx(0.06)
    assert told["latency.time_in_model_decode"] == pytest.approx(0.2)
    assert told["latency.time_in_model_inference"] == pytest.approx(0.26)
    assert 0 < told["latency.time_to_first_token"] <= told["latency.e2e"]
    about = span.resource.attributes
    assert about["service.name"] == "kerngen"


def test_a_request_that_fails_has_a_span(traced: Traced) -> None:
    client, engine, sent, service = traced
    with service.admitted(1):
        assert client.post(CHAT, json=HI | {"n": 2}).status_code == 429
    engine.fails = "the model computed NaN"
    assert client.post(TEXT, json={"prompt": "a"}).status_code == 503
    engine.fails_at = 1
    assert "NaN" in client.post(TEXT, json={"prompt": "a", "stream": True}).text
    spans = sent.get_finished_spans()
    assert [s.attributes["error.type"] for s in spans] == ["queue_full", "engine_failed", "engine_failed"]
    assert all(s.status.status_code.name == "ERROR" for s in spans)
    assert spans[1].status.description == "the model computed NaN"
    assert [s.attributes["gen_ai.operation.name"] for s in spans] == ["chat", "text_completion", "text_completion"]
    assert all(s.parent is None for s in spans)


def test_no_spans_where_nobody_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert open_tracing(None) is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracing("http://localhost:4318/v1/traces") is None
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert open_tracing(None) is None


@pytest.mark.parametrize("by", ["option", "environment"])
def test_what_is_not_installed_is_said(by: str, monkeypatch: pytest.MonkeyPatch, kerngen: Kerngen) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    where = "http://localhost:4318"
    arguments = ["--otlp-traces-endpoint", where] if by == "option" else []
    if by == "environment":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", where)
    code, out, err = kerngen("serve", str(TINY), "--port", "0", *arguments)
    assert (code, out) == (2, "")
    assert "pip install 'kerngen[otel]'" in err


def test_what_no_spans_can_be_sent_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier/pigeon")
    with pytest.raises(UsageError, match="carrier/pigeon"):
        open_tracing("http://localhost:4318")
