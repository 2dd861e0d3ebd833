"""Beam search equals a plain one over dense logits."""

import jax
import numpy as np
import pytest

from jaxpaged.core.beams import BeamSearchParams
from jaxpaged.errors import PromptTooLong
from tests.support.decoding import logits_of
from tests.support.engines import TinyEngine


def plain_search(parts, prompt, width, num_steps):
    """Tokens after the prompt and their summed logprobs, best first: no pages, no requests."""
    runner = parts.engine.runner
    graphdef = runner._programs.source._graphdef
    beams = [((), 0.0)]
    for _ in range(num_steps):
        longer = []
        for tokens, total in beams:
            ids = [*prompt, *tokens]
            logits = logits_of(graphdef, runner.params, parts.model, ids, [1] * len(ids))
            logprobs = np.asarray(jax.nn.log_softmax(logits[-1]))
            longer += [
                ((*tokens, int(t)), total + float(logprobs[t])) for t in range(len(logprobs))
            ]
        beams = sorted(longer, key=lambda beam: -beam[1])[:width]
    return beams


@pytest.mark.parametrize("prompt_len", [13, 16])
def test_it_finds_what_a_plain_search_over_logits_finds(parts_r, prompt_len):
    prompt = [(7 * i) % 250 for i in range(prompt_len)]
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    (found,) = TinyEngine(parts_r).llm.beam_search([prompt], params)
    wanted = plain_search(parts_r, prompt, 3, 5)
    assert [tuple(s.tokens[prompt_len:]) for s in found.sequences] == [t for t, _ in wanted]
    totals = [s.cum_logprob for s in found.sequences]
    assert totals == pytest.approx([total for _, total in wanted], abs=1e-3)
    assert all(s.tokens[:prompt_len] == prompt for s in found.sequences)


def test_several_prompts_are_searched_at_once_and_too_long_ones_refused(parts_r):
    llm = TinyEngine(parts_r).llm
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    prompts = [[5, 6, 7], [9] * 20]
    together = llm.beam_search(prompts, params)
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = llm.beam_search(prompt, params)
        assert [s.tokens for s in found.sequences] == [s.tokens for s in alone.sequences]
        assert [s.text for s in found.sequences] == [s.text for s in alone.sequences]
    with pytest.raises(PromptTooLong):
        llm.beam_search([[1] * 253], params)
