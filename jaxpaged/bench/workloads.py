"""The peer's workloads: the same requests for every engine, from NumPy's frozen MT19937 stream.

`build(name, vocab)` gives the same lists everywhere; equal digests mean equal requests.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

LOWEST_ID = 100  # ids are drawn from here to vocab - 1000, clear of special ids at either end


@dataclass(frozen=True)
class Workload:
    """`num_requests` prompts; lengths in tokens, both bounds included."""

    num_requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    seed: int


@dataclass(frozen=True)
class WorkItem:
    """One request: its prompt and exactly how many tokens to sample."""

    prompt: list[int]
    output_len: int


WORKLOADS = {
    "decode": Workload(256, (128, 128), (512, 512), 101),
    "mixed": Workload(512, (32, 1024), (32, 512), 202),
    "latency": Workload(1, (128, 128), (256, 256), 303),
    "prefill": Workload(64, (2048, 2048), (1, 1), 404),
}


def build(workload: Workload, vocab: int) -> list[WorkItem]:
    """The requests of `workload` for a model with `vocab` logits."""
    random = np.random.RandomState(workload.seed)
    count = workload.num_requests
    prompt_lens = random.randint(workload.prompt[0], workload.prompt[1] + 1, size=count)
    output_lens = random.randint(workload.output[0], workload.output[1] + 1, size=count)
    end = max(LOWEST_ID + 1, vocab - 1000)
    return [
        WorkItem(random.randint(LOWEST_ID, end, size=int(prompt_len)).tolist(), int(output_len))
        for prompt_len, output_len in zip(prompt_lens, output_lens, strict=True)
    ]


def digest(items: list[WorkItem]) -> str:
    """16 hex digits of the SHA-256 over all prompts and lengths."""
    total = hashlib.sha256()
    for item in items:
        total.update(np.asarray(item.prompt, dtype="<i4").tobytes())
        total.update(np.int32(item.output_len).tobytes())
    return total.hexdigest()[:16]
