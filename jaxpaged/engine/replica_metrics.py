"""Metrics of several replicas as one text: theirs, told apart by `engine`, and those about them."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class ReplicaMetrics:
    """What the front knows of its replicas."""

    def __init__(self, model_name: str, engines: Iterable[int]):
        self._registry = CollectorRegistry()
        labels = ["model_name", "engine"]
        up = Gauge("jaxpaged:replica_up", "1 while it serves", labels, registry=self._registry)
        restarts = Counter(
            "jaxpaged:replica_restarts", "starts after a death", labels, registry=self._registry
        )
        moved = Counter(
            "jaxpaged:requests_moved",
            "requests that lost this replica before it answered, and went to another",
            labels,
            registry=self._registry,
        )
        names = [(model_name, str(engine)) for engine in engines]
        self.up = [up.labels(*name) for name in names]
        self.restarts = [restarts.labels(*name) for name in names]
        self.moved = [moved.labels(*name) for name in names]

    def text(self) -> bytes:
        return generate_latest(self._registry)


def merge_texts(texts: Iterable[bytes]) -> bytes:
    """Several engines' metrics as one text, in which every name is explained once."""
    families: dict[bytes, list[bytes]] = {}  # samples by their HELP and TYPE lines
    for text in texts:
        header, samples = b"", list[bytes]()
        for line in text.splitlines(keepends=True):
            if line.startswith(b"# HELP"):
                header = line
            elif line.startswith(b"# TYPE"):
                samples = families.setdefault(header + line, [])
            else:
                samples.append(line)
    return b"".join([part for header, lines in families.items() for part in (header, *lines)])
