"""What `/metrics` shows, in Prometheus' text format: requests, tokens, waits and the tables.

Owns a registry of its own. Counters of tables and the queue are read from the engine when somebody
asks; the rest is counted as it happens, from any thread.
"""

from __future__ import annotations

import bisect
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from rowstream.runtime.engine import Engine

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST

# from one read of a fast SSD to a disk that is about to time out
_GATHER_S = (25e-6, 50e-6, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 10)
# in a prefill the tokens of a chunk share one gather
_WAIT_S = (1e-6, 2e-6, 5e-6, 1e-5, *_GATHER_S)
_FIRST_TOKEN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_INTER_TOKEN_S = (1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)

_TABLE_COUNTERS = {
    "gathers": "Gathers answered.",
    "rows": "Rows asked for.",
    "reads": "Reads issued.",
    "read_bytes": "Bytes read.",
    "duplicate_rows": "Rows that another row of the same gather served.",
    "missing_rows": "Row ids that mean no row.",
    "retries": "Reads issued again after an error that may pass.",
    "read_errors": "Reads given up after every retry.",
    "timeouts": "Times that reads did not end within the time-out.",
    "zeroed_rows": "Rows that could not be read and are zeroes.",
}
_TABLE_GAUGES = {
    "memory_bytes": "Memory that the table holds.",
    "table_bytes": "Size of the table.",
}
_GPU_COUNTERS = {
    "rings": "Lookups that a GPU sent to the host.",
    "void_steps": "Lookups whose rows did not come.",
    "late_answers": "Answers that came after the step was given up.",
    "answer_s": "Seconds from a lookup seen by the host to its answer.",
    "lookups": "Lookups launched of a table that the GPU addresses, replays of graphs apart.",
}
_GPU_GAUGES = {
    "channel_bytes": "Pinned memory for lookups.",
    "addressed_bytes": "Size of the table where the GPU addresses it.",
}


class Metrics:
    """Everything that one server counts."""

    def __init__(self, engine: Engine) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._requests = Counter(
            "rowstream_requests",
            "Requests answered, by what came of them: 499 for a client that left, and for a stream"
            " the status that its error would have had.",
            ["endpoint", "status"],
            registry=registry,
        )
        self._errors = Counter(
            "rowstream_errors", "Requests refused or failed, by kind.", ["kind"], registry=registry
        )
        self._cancelled = Counter(
            "rowstream_cancelled_requests",
            "Requests dropped because their client left or stopped reading.",
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "rowstream_prompt_tokens", "Tokens of prompts taken.", registry=registry
        )
        self._completion_tokens = Counter(
            "rowstream_completion_tokens", "Tokens generated for clients.", registry=registry
        )
        self._first_token = Histogram(
            "rowstream_time_to_first_token_seconds",
            "From the arrival of a request to its first token, the wait in the queue included.",
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self._inter_token = Histogram(
            "rowstream_inter_token_seconds",
            "Between one token of an answer and the next.",
            buckets=_INTER_TOKEN_S,
            registry=registry,
        )
        self._gathers = _WeightedHistogram(
            "rowstream_table_gather_seconds",
            "Time of one gather of a model on a CPU; for a GPU see rowstream_table_gpu_*.",
            _GATHER_S,
        )
        self._waits = _WeightedHistogram(
            "rowstream_table_wait_per_token_seconds",
            "Time that a model on a CPU waited for the rows of a token; each token counts.",
            _WAIT_S,
        )
        registry.register(self._gathers)
        registry.register(self._waits)
        registry.register(_EngineCounters(engine))
        ProcessCollector(registry=registry)

    def request(self, endpoint: str, status: int) -> None:
        """Count a request that has ended."""
        self._requests.labels(endpoint, str(status)).inc()

    def error(self, kind: str) -> None:
        """Count a refusal or failure; `kind` is one of few."""
        self._errors.labels(kind).inc()

    def cancelled(self) -> None:
        """Count a request whose client did not wait."""
        self._cancelled.inc()

    def prompt(self, tokens: int) -> None:
        """Count the tokens of prompts that the engine took."""
        self._prompt_tokens.inc(tokens)

    def completion(self, tokens: int) -> None:
        """Count tokens on their way to a client."""
        self._completion_tokens.inc(tokens)

    def first_token(self, seconds: float) -> None:
        """Count the time from a request to its first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, tokens: int, seconds: float) -> None:
        """Count the time from one chunk to the next, shared by the tokens of the latter."""
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def lookup(self, table: str, tokens: int, seconds: float) -> None:
        """Count a lookup of the rows of some tokens, for which a model on a CPU waited."""
        self._gathers.observe(table, seconds)
        if tokens:
            self._waits.observe(table, seconds / tokens, tokens)

    def text(self) -> bytes:
        """Return all of it as Prometheus reads it."""
        return generate_latest(self._registry)


class _WeightedHistogram:
    """A histogram by table whose observations can stand for several, at the cost of one."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, table: str, value: float, weight: int = 1) -> None:
        at = bisect.bisect_left(self._bounds, value)
        with self._lock:
            counts = self._counts.setdefault(table, [0] * (len(self._bounds) + 1))
            counts[at] += weight
            self._sums[table] = self._sums.get(table, 0.0) + value * weight

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["table"])
        with self._lock:
            found = {table: (list(self._counts[table]), self._sums[table]) for table in self._sums}
        for table, (counts, total) in found.items():
            reached = 0
            buckets = []
            for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
                reached += count
                buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), reached))
            family.add_metric([table], buckets, total)
        yield family


class _EngineCounters:
    """Read the engine's counters when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        # without it the registry would collect once to learn the names
        return []

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for name, key, meaning in (
            ("rowstream_requests_running", "running", "Requests that the model works on."),
            ("rowstream_requests_queued", "waiting", "Requests that wait for the model."),
        ):
            yield GaugeMetricFamily(name, meaning, value=_number(stats.get(key, 0)))
        tables = stats.get("tables")
        assert isinstance(tables, Sequence)
        yield from _table_metrics(tables)


def _table_metrics(tables: Sequence[Mapping[str, Any]]) -> Iterable[Metric]:
    named = [(str(table.get("table", index)), table) for index, table in enumerate(tables)]
    info = InfoMetricFamily("rowstream_table", "Where rows come from.", labels=["table"])
    for name, table in named:
        keys = ("backend", "reader", "on_read_error")
        info.add_metric([name], {key: str(table.get(key) or "none") for key in keys})
    yield info
    for key, meaning in _TABLE_COUNTERS.items():
        counter = CounterMetricFamily(f"rowstream_table_{key}", meaning, labels=["table"])
        for name, table in named:
            counter.add_metric([name], _number(table.get(key, 0)))
        yield counter
    for key, meaning in _TABLE_GAUGES.items():
        # "rowstream_table_bytes" for the table's own size
        gauge = GaugeMetricFamily(
            f"rowstream_table_{key.removeprefix('table_')}", meaning, labels=["table"]
        )
        for name, table in named:
            gauge.add_metric([name], _number(table.get(key, 0)))
        yield gauge
    yield from _gpu_metrics(named)


def _gpu_metrics(named: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterable[Metric]:
    """How rows get to GPUs; families without samples where there is none."""
    ways = [
        ([name, gpu], found)
        for name, table in named
        for gpu, found in table.get("gpus", {}).items()
    ]
    labels = ["table", "gpu"]
    info = InfoMetricFamily("rowstream_table_gpu", "How rows get to a GPU.", labels=labels)
    for way, found in ways:
        info.add_metric(way, {key: str(found.get(key, "none")) for key in ("sync", "addressed")})
    yield info
    kinds = ((_GPU_COUNTERS, CounterMetricFamily), (_GPU_GAUGES, GaugeMetricFamily))
    for meanings, family in kinds:
        for key, meaning in meanings.items():
            unit = re.sub("_s$", "_seconds", key)
            metric = family(f"rowstream_table_gpu_{unit}", meaning, labels=labels)
            for way, found in ways:
                if key in found:
                    metric.add_metric(way, _number(found[key]))
            yield metric


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
