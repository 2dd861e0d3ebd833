"""Counts and times of HTTP requests, in a registry of their own."""

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest

from jaxpaged.openai.parsed import ToolReading

TIMES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
FINE_TIMES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0),
    *(7.5, 10.0, 30.0, 60.0),
)
NOT_COUNTED = frozenset({
    "metrics", "load", "ping", "version", "health", "health_live", "engine_state",
})  # fmt: skip


class HttpMetrics:
    """Labels: the route's pattern, never what a client wrote; statuses as 2xx, 4xx, ..."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "http_requests",
            "requests by route and status",
            ["method", "status", "handler"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "from the head of a request to the end of its answer",
            ["method", "handler"],
            buckets=TIMES,
            registry=self._registry,
        )
        self._fine_seconds = Histogram(
            "http_request_duration_highr_seconds",
            "likewise, of all routes together in finer steps",
            buckets=FINE_TIMES,
            registry=self._registry,
        )
        self._received, self._sent = (
            Summary(f"http_{what}_size_bytes", "bodies", ["handler"], registry=self._registry)
            for what in ("request", "response")
        )

        labels = ["model_name", "mode", "outcome", "request_type"]
        self._parsed = Counter(
            "vllm:tool_call_parser_invocations",
            "answers that a tool parser has read",
            labels,
            registry=self._registry,
        )
        self._broken = Counter(
            "jaxpaged:tool_call_parser_failures",
            "of them, those with text that began a call and departed from its format",
            ["model_name", "request_type"],
            registry=self._registry,
        )

    def answer_parsed(self, model: str, mode: str, kind: str, reading: ToolReading) -> None:
        """An answer has ended in which calls of tools were looked for."""
        outcome = "tool_call" if reading.has_calls else "no_tool_call"
        self._parsed.labels(model, mode, outcome, kind).inc()
        self._broken.labels(model, kind).inc(reading.is_broken)

    def observe(
        self, method: str, handler: str, status: int, seconds: float, received: int, sent: int
    ) -> None:
        """A request that has ended; `received` and `sent` are bytes of the bodies."""
        method = method if method in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._requests.labels(method, f"{status // 100}xx", handler).inc()
        self._seconds.labels(method, handler).observe(seconds)
        self._fine_seconds.observe(seconds)
        self._received.labels(handler).observe(received)
        self._sent.labels(handler).observe(sent)

    def text(self) -> bytes:
        return generate_latest(self._registry)
