"""Counts and times of HTTP requests, in a registry of their own."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

TIMES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
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

    def observe(self, method: str, handler: str, status: int, seconds: float) -> None:
        method = method if method in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._requests.labels(method, f"{status // 100}xx", handler).inc()
        self._seconds.labels(method, handler).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
