"""OpenTelemetry spans: one a request, with vLLM's names, in the client's trace.

Sources: vLLM 0.33, `vllm/tracing` (the span's name and the attributes of latencies); OpenTelemetry's semantic
conventions for generative AI; W3C Trace Context. The SDK is loaded only if tracing is enabled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import kerngen
from kerngen.errors import KerngenError, UsageError
from kerngen.runtime.serve.errors import ApiError, of
from kerngen.system.urls import without_password

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span

    from kerngen.runtime.serve.choice_stream import Part
    from kerngen.runtime.serve.protocol import ChatCompletion, Completion
    from kerngen.runtime.serve.responses import Heading, Usage

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {"http/protobuf": "http", "grpc": "grpc"}
_ASKED = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")


def is_asked_for(endpoint: str | None) -> bool:
    """Whether spans are to be sent: to `endpoint`, or to where the environment says."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return False
    return endpoint is not None or any(os.environ.get(name) for name in ENDPOINTS)


def open_tracing(endpoint: str | None) -> Tracing | None:
    """Spans that go to `endpoint`, as it is, or to where the environment says; None where nobody asked for them.

    Raises UsageError where OpenTelemetry's packages are not installed, or an address is none.
    """
    if not is_asked_for(endpoint):
        return None
    protocol = next((found for name in _PROTOCOLS if (found := os.environ.get(name))), "http/protobuf")
    if protocol not in _EXPORTERS:
        raise UsageError(f"{protocol} is no protocol of OpenTelemetry", hint=" or ".join(_EXPORTERS))
    try:
        exporter = import_module(f"opentelemetry.exporter.otlp.proto.{_EXPORTERS[protocol]}.trace_exporter")
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as e:
        package = "kerngen[otel]" if protocol != "grpc" else "kerngen[otel] opentelemetry-exporter-otlp-proto-grpc"
        raise UsageError(f"spans are asked for, and OpenTelemetry is not installed: {e}",
                         hint=f"pip install {package!r}; or leave --otlp-traces-endpoint and {ENDPOINTS[1]} out"
                         ) from e  # fmt: skip
    where = endpoint or next(found for name in ENDPOINTS if (found := os.environ.get(name)))
    if protocol == "http/protobuf" and not where.startswith(("http://", "https://")):
        raise UsageError(f"spans cannot be sent to {without_password(where)}: it is no http:// or https:// address",
                         hint="for example http://localhost:4318/v1/traces")  # fmt: skip
    return Tracing(BatchSpanProcessor(exporter.OTLPSpanExporter(endpoint=endpoint)))


class Tracing:
    """Makes spans, which `processor` sends."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = {"service.version": kerngen.__version__}
        if not any("service.name" in os.environ.get(name, "") or (name == "OTEL_SERVICE_NAME" and os.environ.get(name))
                   for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")):  # fmt: skip
            about["service.name"] = "kerngen"
        # Its own provider: what else in this process makes spans is not kerngen's to send.
        self._provider: TracerProvider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kerngen.serve", kerngen.__version__)
        self._contexts = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str]) -> Trace:
        """A request that begins now, in the trace that its `traceparent` names."""
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span("llm_request", self._contexts.extract(headers), kind=SpanKind.SERVER)
        return Trace(span)

    def close(self) -> None:
        """Send what is not sent yet, as long as the exporter waits for that."""
        self._provider.shutdown()


class Trace:
    """What is said of one request while it is worked on."""

    def __init__(self, span: Span | None = None) -> None:
        """span: None for no trace at all."""
        self._span = span
        self._began, self._first = time.perf_counter(), 0.0
        self._reasons: dict[int, str] = {}
        self._times: list[float] = []  # in the queue, of prefill, of decoding: of the choice that took longest

    def asked(self, body: ChatCompletion | Completion, heading: Heading, max_tokens: int) -> None:
        if self._span is None:
            return
        operation = "text_completion" if heading.kind.startswith("text") else "chat"
        values = {name: value for name in _ASKED if (value := getattr(body, name)) is not None}
        self._span.set_attributes({
            "gen_ai.operation.name": operation, "gen_ai.provider.name": "kerngen",
            "gen_ai.request.model": heading.model, "gen_ai.response.model": heading.model,
            "gen_ai.request.id": heading.id, "gen_ai.response.id": heading.id,
            "gen_ai.request.n": body.n or 1, "gen_ai.request.max_tokens": max_tokens,
            "gen_ai.request.stream": bool(body.stream), **{f"gen_ai.request.{k}": v for k, v in values.items()},
        })  # fmt: skip

    def part(self, part: Part) -> None:
        if self._span is None:
            return
        if part.tokens and not self._first:
            self._first = time.perf_counter()
        if part.finish_reason is not None:
            self._reasons[part.index] = part.finish_reason
        if (stats := part.stats) is not None:
            self._times = max(self._times, [*stats.phases_s], key=sum)

    def ended(self, usage: Usage, error: BaseException | None = None) -> None:
        """error: why there is no whole answer."""
        if (span := self._span) is None:
            return
        now = time.perf_counter()
        told: dict[str, Any] = {
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens, "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.completion_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.latency.e2e": now - self._began,
        }  # fmt: skip
        if self._first:
            told["gen_ai.latency.time_to_first_token"] = self._first - self._began
        if self._reasons:
            told["gen_ai.response.finish_reasons"] = [self._reasons[i] for i in sorted(self._reasons)]
        if self._times:
            queue_s, prefill_s, decode_s = self._times
            told |= {
                "gen_ai.latency.time_in_queue": queue_s,
                "gen_ai.latency.time_in_model_prefill": prefill_s,
                "gen_ai.latency.time_in_model_decode": decode_s,
                "gen_ai.latency.time_in_model_inference": prefill_s + decode_s,
            }
        span.set_attributes(told)
        if error is not None:
            self._fail(span, error)
        span.end()

    def _fail(self, span: Span, error: BaseException) -> None:
        from opentelemetry.trace import Status, StatusCode

        if not isinstance(error, Exception):  # cancelled, or the generator was closed: nobody reads on
            span.set_attribute("error.type", "client_gone")
            return
        told = of(error) if isinstance(error, ApiError | KerngenError) else None
        span.set_attribute("error.type", type(error).__name__ if told is None else told.code or str(told.status))
        span.set_status(Status(StatusCode.ERROR, str(error) if told is None else told.message))
