"""Prometheus metrics, under vLLM's names (vLLM 0.24, `vllm/v1/metrics/loggers.py`). Of several engines those are sums;
what each of them does is told under names of our own, with the label `replica`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kerngen.runtime.engine import Load, Stats
    from kerngen.runtime.serve.engines import Engines

disable_created_metrics()  # when each began says nothing that dashboards read
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN_S = (
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_WHOLE_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_MODEL = ("model_name",)
_OF_REPLICA = (
    ("up", "up", "1 where it takes requests, 0 where it is being started."),
    ("requests_running", "running", "Requests that have rows or are prefilled."),
    ("requests_waiting", "waiting", "Requests that wait for pages or a row."),
    ("pending_tokens", "pending_tokens", "Tokens still to be computed, as far as that is known."),
    ("kv_cache_usage_perc", "kv_cache_usage", "Share of its cache's pages that are held, 0 to 1."),
    ("requests", "requests", "Requests that it was sent."),
    ("restarts", "restarts", "Times that it was started again."),
)  # name, field of ReplicaState, text


def cache_usage(load: Load) -> float:
    """The share of the cache's pages that are held, of the kind of which fewest are free; 0 of no cache."""
    used = (1 - load.free_pages[kind] / max(total, 1) for kind, total in load.num_pages.items() if total)
    return max(used, default=0.0)


class Metrics:
    """Of one server. engines: what is behind it; cache: what their caches are, as labels of cache_config_info."""

    def __init__(self, model: str, engines: Engines, cache: Mapping[str, str] | None = None) -> None:
        self._registry = registry = CollectorRegistry()
        self._engines = engines
        registry.register(_Replicas(model, engines))
        registry.register(_KeyTiles(model, engines))

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, _MODEL, registry=registry).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, _MODEL, registry=registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, _MODEL, registry=registry, buckets=buckets).labels(model)

        if cache:
            Gauge("vllm:cache_config_info", "What the cache of keys and values is; 1.", (*_MODEL, *cache),
                  registry=registry).labels(model, *cache.values()).set(1)  # fmt: skip
        self._model = model
        self._running = gauge("num_requests_running", "Requests that have rows or are prefilled.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for pages or a row.")
        self._kv_use = gauge("kv_cache_usage_perc", "Share of the cache's pages that are held, 0 to 1.")
        self._preemptions = counter("num_preemptions", "Times that a request gave up its pages to an earlier one.")
        self._counted = 0  # of those
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._asked = counter("prefix_cache_queries", "Tokens of prompts that were looked for in the cache.")
        self._found = counter("prefix_cache_hits", "Tokens of prompts that were found in the cache.")
        self._first = histogram("time_to_first_token_seconds", "From the request to its first token.", _FIRST_S)
        self._between = histogram("inter_token_latency_seconds", "Between two tokens of an answer.", _BETWEEN_S)
        self._whole = histogram("e2e_request_latency_seconds", "From the request to its last token.", _WHOLE_S)
        self._phases = (
            histogram("request_queue_time_seconds", "From the request until it had pages.", _WHOLE_S),
            histogram("request_prefill_time_seconds", "From there to its first token.", _WHOLE_S),
            histogram("request_decode_time_seconds", "From its first token to its last.", _WHOLE_S),
        )
        self._inference = histogram("request_inference_time_seconds", "Of prefill and decoding.", _WHOLE_S)
        self._prompts = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answers = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._success = Counter("vllm:request_success", "Requests that ended.", (*_MODEL, "finished_reason"),
                                registry=registry)  # fmt: skip
        self._drafts = counter("spec_decode_num_drafts", "Steps that drafted.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafts accepted.")
        self._by_position = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position.",
                                    (*_MODEL, "position"), registry=registry)  # fmt: skip

    def watch(self) -> Watch:
        """A request that begins now."""
        return Watch(self)

    def text(self) -> bytes:
        if (load := self._engines.load) is not None:
            self._running.set(load.num_running + load.num_prefilling)
            self._waiting.set(load.num_waiting)
            self._kv_use.set(cache_usage(load))
            self._preemptions.inc(load.num_preemptions - self._counted)
            self._counted = load.num_preemptions
        return generate_latest(self._registry)

    def _ended(self, reason: str, stats: Stats | None, num_tokens: int, seconds: float) -> None:
        self._success.labels(self._model, reason).inc()
        self._whole.observe(seconds)
        if stats is None:
            return
        self._prompt.inc(stats.num_prompt_tokens)
        self._asked.inc(stats.num_prompt_tokens)
        self._found.inc(stats.num_cached_tokens)
        for phase, of_it in zip(self._phases, stats.phases_s, strict=True):
            phase.observe(of_it)
        self._inference.observe(sum(stats.phases_s[1:]))
        self._prompts.observe(stats.num_prompt_tokens)
        self._answers.observe(num_tokens)
        if stats.drafted:
            self._drafts.inc(stats.drafted[0])
            self._drafted.inc(sum(stats.drafted))
            self._accepted.inc(sum(stats.accepted))
            for i, accepted in enumerate(stats.accepted):
                self._by_position.labels(self._model, str(i)).inc(accepted)


class Watch:
    """Takes the times of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.perf_counter()
        self._last: float | None = None
        self._count = 0

    def tokens(self, count: int) -> None:
        """`count` tokens came now."""
        if not count:
            return
        now, metrics = time.perf_counter(), self._metrics
        metrics._generated.inc(count)
        self._count += count
        if self._last is None:
            metrics._first.observe(now - self._began)
            count -= 1
            self._last = now
        for _ in range(count):  # tokens of one step come together: each its share of the time
            metrics._between.observe((now - self._last) / count)
        self._last = now

    def ended(self, reason: str, stats: Stats | None = None) -> None:
        self._metrics._ended(reason, stats, self._count, time.perf_counter() - self._began)


class _Replicas(Collector):
    """What each of several engines does; nothing where there is one."""

    def __init__(self, model: str, engines: Engines) -> None:
        self._model, self._engines = model, engines

    def collect(self) -> Iterator[Metric]:
        if not (replicas := self._engines.replicas):
            return
        for name, field, text in _OF_REPLICA:
            kind = CounterMetricFamily if name in ("requests", "restarts") else GaugeMetricFamily
            family = kind(f"kerngen:replica_{name}", text, labels=(*_MODEL, "replica"))
            for replica in replicas:
                family.add_metric((self._model, str(replica.replica)), float(getattr(replica, field)))
            yield family


class _KeyTiles(Collector):
    """Which tiles of keys prompts read, of each layer where they choose; nothing where they read all."""

    def __init__(self, model: str, engines: Engines) -> None:
        self._model, self._engines = model, engines

    def collect(self) -> Iterator[Metric]:
        if (load := self._engines.load) is None or not load.key_tiles:
            return
        for i, (name, text) in enumerate((
            ("prefill_key_tiles_read", "Tiles of 128 keys that blocks of 128 queries of prompts have read."),
            ("prefill_key_tiles", "Tiles that they would have read, had they read all."),
        )):  # fmt: skip
            family = CounterMetricFamily(f"kerngen:{name}", text, labels=(*_MODEL, "layer"))
            for layer, counted in load.key_tiles.items():
                family.add_metric((self._model, str(layer)), float(counted[i]))
            yield family
