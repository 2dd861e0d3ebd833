"""Embeddings per second, ours and those of sentence-transformers, on the same cores and texts.

    python -m benchmarks.embedding_speed ours MODEL
    python benchmarks/embedding_speed.py theirs MODEL    # where sentence-transformers is installed

Texts are sentences of tests/reference. Seconds of CPU a thousand texts stand beside the rate, since
other work on the machine changes the one much and the other little. Everything is float32.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

NUM_TEXTS, REPEATS = 256, 3


def main(who: str, model: str) -> None:
    file = Path(__file__).parents[1] / "tests" / "reference" / "britannica_shakespeare.txt"
    text = re.sub(r"\s+", " ", file.read_text(encoding="utf-8"))
    texts = re.split(r"(?<=[.;:]) ", text)[:NUM_TEXTS]
    embed = _ours(model) if who == "ours" else _theirs(model)
    embed(texts)  # what is compiled or allocated once
    walls, cpus = [], []
    for _ in range(REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        embed(texts)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    line = {
        "who": who,
        "texts": len(texts),
        "texts_per_s": round(len(texts) / min(walls), 1),
        "cpu_s_per_1000": round(1000 * min(cpus) / len(texts), 2),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(line))


def _ours(model: str) -> Callable[[list[str]], object]:
    from jaxpaged import LLM

    llm = LLM(model)
    return lambda texts: llm.embed(texts, use_tqdm=False)


def _theirs(model: str) -> Callable[[list[str]], object]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    loaded = SentenceTransformer(model, device="cpu")
    return lambda texts: loaded.encode(texts, show_progress_bar=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
