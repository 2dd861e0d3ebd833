"""Answer a JSONL file of prompts on many nodes: Ray Data feeds one engine a replica.

    pip install '.[cuda13,ray]'
    python examples/ray_batch.py MODEL 's3://bucket/prompts/' 's3://bucket/answers/' \
        --replicas 16 --gpus 1

Each line is an object with a "prompt"; what else it has is kept. Every answer adds "answer",
"num_tokens" and "error": a prompt that cannot be served has the reason there, and stops nobody.
Where the answers are written must not exist yet: a run that broke off starts again in another
folder, with the lines that have no answer.
"""

import argparse
from typing import Any

import ray

ROWS_AT_ONCE = 1024  # an engine schedules them among themselves; more keep it busier at the end


class Engine:
    """One engine in an actor of its own, with the GPUs that Ray gave it."""

    def __init__(self, model: str, num_gpus: int, max_tokens: int, temperature: float):
        from jaxpaged import LLM, SamplingParams  # in the actor: it opens the devices

        self.llm = LLM(model, tensor_parallel_size=max(1, num_gpus))
        self.params = SamplingParams(max_tokens=max_tokens, temperature=temperature)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Add answers to rows, which come as a NumPy array a column."""
        from jaxpaged.errors import RequestError

        inputs, prompts = self.llm.parts.inputs, list[list[int]]()
        errors: list[str] = []
        for prompt in rows["prompt"]:
            try:
                _, token_ids = inputs.encode(prompt)
                inputs.request(token_ids, self.params)
                prompts.append(token_ids)
                errors.append("")
            except RequestError as error:
                errors.append(str(error))
        outputs = iter(self.llm.generate(prompts, self.params, use_tqdm=False))
        answers = [None if error else next(outputs).outputs[0] for error in errors]
        return rows | {
            "answer": [answer.text if answer else "" for answer in answers],
            "num_tokens": [len(answer.token_ids) if answer else 0 for answer in answers],
            "error": errors,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="directory or GGUF file that every node sees, or a hub id")
    parser.add_argument("prompts", help="JSONL file, folder or address")
    parser.add_argument("answers", help="folder or address to write JSONL files to")
    parser.add_argument("--replicas", type=int, default=1, help="engines over all nodes")
    parser.add_argument("--gpus", type=int, default=1, help="of an engine; 0: it runs on a CPU")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    rows = ray.data.read_json(args.prompts, lines=True)
    rows.map_batches(
        Engine,
        fn_constructor_args=(args.model, args.gpus, args.max_tokens, args.temperature),
        batch_size=ROWS_AT_ONCE,
        num_gpus=args.gpus,
        concurrency=args.replicas,
    ).write_json(args.answers)


if __name__ == "__main__":
    main()
