"""What the engine tells about itself, under vLLM's metric names, in Prometheus' types.

Written by the engine's thread, read by whoever scrapes; prometheus-client locks each value. Each
engine has a registry of its own. Lengths are in tokens, times in seconds.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily

TIMES = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
LONG_TIMES = (*TIMES, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
FIRST_TOKEN_TIMES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_TIMES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REASONS = ("stop", "length", "abort", "error", "repetition")
LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
FEW = (1, 2, 5, 10, 20)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class FinishedSequence:
    """What is observed once a sequence is done. Times are None for one that never ran."""

    reason: str
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    num_preemptions: int
    num_output_tokens: int
    max_tokens: int
    e2e_s: float
    queue_s: float | None
    prefill_s: float | None  # from first scheduled to first token
    decode_s: float | None  # from first token to last
    num_host_cached_tokens: int = 0  # of those found, the ones that came back from host memory


@dataclass(frozen=True)
class EngineLoad:
    """The engine's state after a step."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float  # 0 to 1
    num_preemptions: int  # since start, like the next two
    prefix_queries: int
    prefix_hits: int
    num_compilations: int


NO_LOAD = EngineLoad(0, 0, 0.0, 0, 0, 0, 0)


@dataclass(frozen=True)
class _Speculation:
    drafts: Counter
    guessed: Counter
    right: Counter
    right_by_place: list[Counter]


class EngineMetrics:
    """All metrics of one engine. `load` is also the last state as plain numbers."""

    num_prompt_tokens = num_output_tokens = 0  # since start

    def __init__(self, model_name: str, max_model_len: int, engine: int = 0):
        self.registry, self.load = CollectorRegistry(), NO_LOAD
        self._asked: dict[str, Gauge] = {}  # by name
        self._speculation: _Speculation | None = None
        self._labels = {"model_name": model_name, "engine": str(engine)}
        lengths = _one_two_five(max_model_len)
        self._running = self._gauge("num_requests_running", "sequences in steps")
        self._waiting = self._gauge("num_requests_waiting", "sequences waiting")
        reasons = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "sequences waiting, by what for",
            [*self._labels, "reason"],
            registry=self.registry,
        )
        self._waiting_for_capacity = reasons.labels(**self._labels, reason="capacity")
        reasons.labels(**self._labels, reason="deferred").set(0)  # nothing is held back by choice
        self._usage = self._gauge("kv_cache_usage_perc", "share of pages held, 0 to 1")
        self._compilations = self._gauge(
            "num_compilations", "programs compiled since start", prefix="jaxpaged"
        )
        self._preemptions = self._counter("num_preemptions", "preemptions")
        self._queries = self._counter("prefix_cache_queries", "prompt tokens looked up")
        self._hits = self._counter("prefix_cache_hits", "prompt tokens found")
        self._prompt_tokens = self._counter("prompt_tokens", "prompt tokens computed or found")
        self._output_tokens = self._counter("generation_tokens", "tokens sampled")
        self._corrupted = self._counter("corrupted_requests", "requests whose logits broke")
        self._success = self._counters(
            "request_success", "finished sequences by reason", "finished_reason", REASONS
        )
        self._step_tokens = self._histogram("iteration_tokens_total", "tokens a step", STEP_TOKENS)
        self._first = self._histogram("time_to_first_token_seconds", "", FIRST_TOKEN_TIMES)
        self._between = BulkHistogram("vllm:inter_token_latency_seconds", self._labels, TOKEN_TIMES)
        self.registry.register(self._between)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "mean of a request", TOKEN_TIMES
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "", LONG_TIMES)
        self._queue = self._histogram("request_queue_time_seconds", "", LONG_TIMES)
        self._prefill = self._histogram("request_prefill_time_seconds", "", LONG_TIMES)
        self._decode = self._histogram("request_decode_time_seconds", "", LONG_TIMES)
        self._inference = self._histogram("request_inference_time_seconds", "", LONG_TIMES)
        self._prompt_lens = self._histogram("request_prompt_tokens", "", lengths)
        self._output_lens = self._histogram("request_generation_tokens", "", lengths)
        self._max_tokens = self._histogram("request_params_max_tokens", "", lengths)
        self._longest = self._histogram("request_max_num_generation_tokens", "of n", lengths)
        self._computed_lens = self._histogram(
            "request_prefill_kv_computed_tokens", "prompt tokens not found in the cache", lengths
        )
        self._num_answers = self._histogram("request_params_n", "", FEW)
        self._preempted = self._histogram("request_num_preemptions", "of a sequence", (0, *FEW))
        self._cached = self._counter("prompt_tokens_cached", "prompt tokens found in the cache")
        self._cached_by_source = self._counters(
            "prompt_tokens_cached_by_source", "prompt tokens found, by where", "source"
        )
        self._by_source = self._counters("prompt_tokens_by_source", "prompt tokens", "source")
        self._rejections = self._counters(
            "admission_rejections", "refused: too much waits", "reason", LIMITS
        )

    def cache_config(self, **fields: object) -> None:
        """Publish the pool's settings as labels of `vllm:cache_config_info`."""
        names = {name: str(value) for name, value in fields.items()}
        names["engine"] = self._labels["engine"]
        info = Gauge("vllm:cache_config_info", "page pool", list(names), registry=self.registry)
        info.labels(**names).set(1)

    def watch_memory(self, device: int, in_use: Callable[[], float], limit: float) -> None:
        """Publish a device's memory in bytes; `in_use` is asked at every scrape."""
        for kind, ask in (("in_use", in_use), ("limit", lambda: limit)):
            name = f"device_memory_{kind}_bytes"
            self.ask(name, "of this process", ask, "jaxpaged", device=str(device))

    def ask(
        self,
        name: str,
        help: str,
        value: Callable[[], float],
        prefix: str = "vllm",
        **labels: str,
    ) -> None:
        """Publish a gauge whose value is asked for at every scrape, by the thread that scrapes."""
        names = self._labels | labels
        if name not in self._asked:
            self._asked[name] = Gauge(f"{prefix}:{name}", help, list(names), registry=self.registry)
        self._asked[name].labels(**names).set_function(value)

    def prompt_added(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)
        self.num_prompt_tokens += num_tokens

    def step_started(self, num_tokens: int) -> None:
        self._step_tokens.observe(num_tokens)

    def step_ended(self, num_new_tokens: int, load: EngineLoad) -> None:
        """Count what a step gave and publish the state after it."""
        before, self.load = self.load, load
        self._output_tokens.inc(num_new_tokens)
        self.num_output_tokens += num_new_tokens
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._waiting_for_capacity.set(load.num_waiting)
        self._usage.set(load.kv_cache_usage)
        self._compilations.set(load.num_compilations)
        self._preemptions.inc(load.num_preemptions - before.num_preemptions)
        self._queries.inc(load.prefix_queries - before.prefix_queries)
        self._hits.inc(load.prefix_hits - before.prefix_hits)

    def token_gaps(self, seconds: float, count: int) -> None:
        """Count `count` tokens that came `seconds` after the one before them."""
        self._between.observe(seconds, count)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def rejected(self, reason: str) -> None:
        """Count a request that the limit named `reason` kept out. Called by the callers' thread."""
        self._rejections.labels(**self._labels, reason=reason).inc()

    def request_ended(self, num_output_tokens: Iterable[int]) -> None:
        """Observe a request once all its answers have ended."""
        lengths = tuple(num_output_tokens)
        self._num_answers.observe(len(lengths))
        self._longest.observe(max(lengths))

    def corrupted(self) -> None:
        self._corrupted.inc()

    def finished(self, done: FinishedSequence) -> None:
        """Observe a sequence's whole life."""
        self._success.labels(**self._labels, finished_reason=done.reason).inc()
        self._e2e.observe(done.e2e_s)
        self._prompt_lens.observe(done.num_prompt_tokens)
        self._output_lens.observe(done.num_output_tokens)
        computed = done.num_prompt_tokens - done.num_cached_tokens
        self._computed_lens.observe(computed)
        self._preempted.observe(done.num_preemptions)
        self._cached.inc(done.num_cached_tokens)
        of_device = done.num_cached_tokens - done.num_host_cached_tokens
        for source, num in (("device", of_device), ("host", done.num_host_cached_tokens)):
            self._cached_by_source.labels(**self._labels, source=source).inc(num)
        for source, num in (
            ("local_compute", computed),
            ("local_cache_hit", done.num_cached_tokens - done.num_host_cached_tokens),
            ("external_kv_transfer", done.num_host_cached_tokens),
        ):
            self._by_source.labels(**self._labels, source=source).inc(num)
        self._max_tokens.observe(done.max_tokens)
        if done.queue_s is not None:
            self._queue.observe(done.queue_s)
        if done.prefill_s is not None and done.decode_s is not None:
            self._prefill.observe(done.prefill_s)
            self._decode.observe(done.decode_s)
            self._inference.observe(done.prefill_s + done.decode_s)
            if done.num_output_tokens > 1:
                self._per_token.observe(done.decode_s / (done.num_output_tokens - 1))

    def enable_speculation(self, num_speculative_tokens: int) -> None:
        """Publish the counters of drafts; the one by position has a label for each of them."""
        name = "spec_decode_num_accepted_tokens_per_pos"
        by_place = Counter(f"vllm:{name}", "", [*self._labels, "position"], registry=self.registry)
        self._speculation = _Speculation(
            self._counter("spec_decode_num_drafts", "drafts checked"),
            self._counter("spec_decode_num_draft_tokens", "tokens guessed"),
            self._counter("spec_decode_num_accepted_tokens", "guesses that were right"),
            [
                by_place.labels(**self._labels, position=str(place))
                for place in range(num_speculative_tokens)
            ],
        )

    def drafted(self, verified: list[list[int]], num_guessed: int) -> None:
        """Count a step's drafts: of each the right guesses and the token after them."""
        counters = self._speculation
        if counters is None:
            return
        right = [len(tokens) - 1 for tokens in verified]
        counters.drafts.inc(len(verified))
        counters.guessed.inc(num_guessed)
        counters.right.inc(sum(right))
        for place, counter in enumerate(counters.right_by_place):
            counter.inc(sum([num > place for num in right]))

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, help: str, prefix: str = "vllm") -> Gauge:
        gauge = Gauge(f"{prefix}:{name}", help, list(self._labels), registry=self.registry)
        return gauge.labels(**self._labels)

    def _counter(self, name: str, help: str) -> Counter:
        counter = Counter(f"vllm:{name}", help, list(self._labels), registry=self.registry)
        return counter.labels(**self._labels)

    def _counters(self, name: str, help: str, label: str, values: Iterable[str] = ()) -> Counter:
        """Counters by `label`, those of `values` there from the beginning."""
        names = [*self._labels, label]
        counter = Counter(f"vllm:{name}", help, names, registry=self.registry)
        for value in values:
            counter.labels(**self._labels, **{label: value})
        return counter

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        names = list(self._labels)
        whole = Histogram(f"vllm:{name}", help, names, buckets=buckets, registry=self.registry)
        return whole.labels(**self._labels)


class BulkHistogram:
    """A histogram that takes many equal observations at once. Written by one thread."""

    def __init__(self, name: str, labels: dict[str, str], bounds: tuple[float, ...]):
        self._name, self._labels, self._bounds = name, labels, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, count: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What prometheus-client asks of a collector."""
        total, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self._name, "", labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family


def _one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `limit`."""
    values, ten = [], 1
    while ten <= limit:
        values += [ten * m for m in (1, 2, 5) if ten * m <= limit]
        ten *= 10
    return tuple(values)
