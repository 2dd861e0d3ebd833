"""What a look at the engine costs its thread: a picture of a full pool, and how it gets out.

    python -m benchmarks.engine_picture [--rows 391] [--pictures 50]

`rows` sequences of 3,800 tokens and more fill a pool of 256 pages each (391: 100,097 pages).
Printed are the thread's CPU time for one picture (median, least), the time to encode it for the
front's process, and what the pictures of a watched engine are of the thread's time.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.host_loop import MAX_LEN, VOCAB, make_llm
from jaxpaged.core.params import SamplingParams
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.wire import Reply, frame
from jaxpaged.text.tokenizer import ids_only_tokenizer

PROMPT_LEN = 3800
PICTURES_A_SECOND = 2  # at most, see server/engine_state.py


def full_engine(rows: int) -> Engine:
    """An engine whose sequences hold nearly all pages."""
    llm = make_llm(rows, ids_only_tokenizer(), VOCAB)
    params = SamplingParams(
        temperature=0, max_tokens=MAX_LEN - PROMPT_LEN, ignore_eos=True, detokenize=False
    )
    random = np.random.RandomState(0)
    for number in range(rows):
        prompt = random.randint(0, VOCAB, PROMPT_LEN).tolist()
        request = llm.parts.inputs.request(prompt, params, request_id=str(number))
        llm.parts.engine.add(request)
    engine = llm.parts.engine
    while engine.scheduler.num_waiting:
        engine.step()
    return engine


def cpu_times(function: Callable[[], object], number: int) -> list[float]:
    """CPU milliseconds of this thread, call by call."""
    times: list[float] = []
    for _ in range(number):
        start = time.thread_time()
        function()
        times.append(1e3 * (time.thread_time() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=391)
    parser.add_argument("--pictures", type=int, default=50)
    args = parser.parse_args()
    engine = full_engine(args.rows)
    pool = engine.scheduler.pool
    print(f"{pool.num_pages} pages, {pool.usage:.0%} held by {args.rows} sequences")
    picture = engine.picture()
    taking = cpu_times(engine.picture, args.pictures)
    sending = cpu_times(lambda: frame(Reply(1, picture)), args.pictures)
    for what, times in (("picture", taking), ("message", sending)):
        print(f"{what}: median {statistics.median(times):.2f} ms of CPU, least {min(times):.2f} ms")
    share = PICTURES_A_SECOND * (statistics.median(taking) + statistics.median(sending)) / 1e3
    print(f"{PICTURES_A_SECOND} pictures a second: {share:.2%} of the thread's time")


if __name__ == "__main__":
    main()
