"""Choosing among a vocabulary's logits without sorting it: filters, best tokens, ranks."""

from pallas_kernels.sampling.filtering import filter_logits
from pallas_kernels.sampling.ranking import rank_of, top_n_logprobs

__all__ = ["filter_logits", "rank_of", "top_n_logprobs"]
