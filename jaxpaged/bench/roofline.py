"""The least time that a step can take on a device, from bytes and operations alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpaged.config.architecture import ModelConfig


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches at best: a long sum over memory, a large matrix product."""

    bytes_per_s: float
    flops_per_s: float


# measured, not from the sheet: a sum over 4 GB; an 8192-cube in bfloat16
CEILINGS = {"NVIDIA H200": Ceilings(4.28e12, 758e12)}


@dataclass(frozen=True)
class StepCost:
    """What one step must move and compute."""

    num_tokens: int
    num_rows: int
    kv_tokens: int  # read by the rows, once each
    attention_pairs: int  # of query and visible key


def step_cost(starts: Sequence[int], q_lens: Sequence[int]) -> StepCost:
    """Count the work of a plan's rows."""
    kv_tokens = pairs = 0
    for start, q_len in zip(starts, q_lens, strict=True):
        kv_tokens += start + q_len
        pairs += q_len * start + q_len * (q_len + 1) // 2
    return StepCost(sum(q_lens), len(q_lens), kv_tokens, pairs)


def matrix_params(model: ModelConfig) -> int:
    """Weights of the layers' matrix products."""
    attention = model.embed * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    return model.num_layers * (attention + 3 * model.embed * model.ffn)


def kv_token_bytes(model: ModelConfig, itemsize: int) -> int:
    return 2 * model.num_layers * model.kv_heads * model.head_dim * itemsize


def floor_seconds(model: ModelConfig, cost: StepCost, ceilings: Ceilings, itemsize: int) -> float:
    """Products of the layers, the unembedding of one row each, then attention, one after another.

    Each part takes the longer of its bytes and its operations. Windows are not counted.
    """
    layers, head = matrix_params(model), model.vocab * model.embed
    attention_flops = 4 * model.num_layers * model.heads * model.head_dim * cost.attention_pairs
    parts = [
        (layers * itemsize, 2 * layers * cost.num_tokens),
        (head * itemsize, 2 * head * cost.num_rows),
        (cost.kv_tokens * kv_token_bytes(model, itemsize), attention_flops),
    ]
    return sum(
        max(size / ceilings.bytes_per_s, flops / ceilings.flops_per_s) for size, flops in parts
    )
