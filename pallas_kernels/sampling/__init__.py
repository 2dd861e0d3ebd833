"""Choosing among a vocabulary's logits without sorting it: filters, best tokens, ranks."""

from pallas_kernels.sampling.filtering import filter_logits
from pallas_kernels.sampling.ranking import rank_of, top_n_logprobs
from pallas_kernels.sampling.shards import (
    best_token,
    log_sum_exp,
    logit_of,
    logits_of,
    max_over,
)

__all__ = [
    "best_token",
    "filter_logits",
    "log_sum_exp",
    "logit_of",
    "logits_of",
    "max_over",
    "rank_of",
    "top_n_logprobs",
]
