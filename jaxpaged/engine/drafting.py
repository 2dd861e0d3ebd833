"""A small model that guesses tokens ahead, within the programs of the model that checks them.

Its KV lies in further layers of the same page pool, a token's at the same page and place: it is
shared, copied, swapped and evicted with the other. So it runs over every batch that the model runs
over, and in a step with drafts first over these, token by token. What it guesses is never more than
a guess: a place without its KV costs right guesses, no answer.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int32

from jaxpaged.arrays import DeviceState, KVPages, Params, RaggedBatch
from jaxpaged.config.architecture import ModelConfig
from jaxpaged.config.settings import EngineConfig
from jaxpaged.config.speculation import MAX_DRAFT_ROWS, Speculation
from jaxpaged.core.buckets import Bucket
from jaxpaged.errors import ConfigError
from jaxpaged.layers.sampling import pick_greedy
from jaxpaged.models.decoder import Decoder, input_ids
from jaxpaged.sharding import Placement, laid_out
from jaxpaged.weights.loader import DRAFT, LoadedModel, ModelFiles, open_model

LEAST_COST = 0.03  # of guessing a token, in steps of the model, beside reading the weights


def open_draft(
    config: EngineConfig, model: ModelConfig, dtype: np.dtype, placement: Placement | None
) -> ModelFiles | None:
    """The configured draft model, of which only the configuration is read; None without one.

    Raises:
        ConfigError: it cannot guess for `model`, or not on these devices.
    """
    settings = config.scheduler.speculation
    if settings is None or settings.method != "draft_model":
        return None
    if config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "speculative_config: a draft model runs on one stage only: leave out "
            "--pipeline-parallel-size, or take method ngram"
        )
    files = open_model(
        settings.model,
        dtype=dtype,
        load_format="dummy" if config.model.load_format == "dummy" else "auto",
        revision=settings.revision,
        placement=placement,
    )
    _check(files.config, model, files.path)
    return files


def draft_cost(files: ModelFiles) -> float:
    """What guessing a token takes, in steps of the model: both read all their weights."""
    if files.draft is None:
        return 0.0
    return LEAST_COST + _size(files.draft.params) / _size(files.params)


def _size(params: Params) -> int:
    return sum([leaf.size for leaf in jax.tree.leaves(params)])


def _check(draft: ModelConfig, model: ModelConfig, path: Path) -> None:
    if draft.vocab != model.vocab:
        raise ConfigError(
            f"speculative_config: {path.name} has a vocabulary of {draft.vocab} tokens, the model "
            f"one of {model.vocab}: take a draft model of the same family"
        )
    if all(kind.window is not None for kind in model.layer_kinds):
        raise ConfigError(
            "speculative_config: a draft model needs pages of the whole context, and every layer "
            "of the model has a window: take method ngram"
        )


@dataclass(frozen=True)
class DraftModel:
    """What programs are traced with: the decoder that guesses, as it is laid out for the mesh."""

    graphdef: nnx.GraphDef
    config: ModelConfig
    settings: Speculation

    @classmethod
    def of(
        cls, model: ModelFiles | LoadedModel, settings: Speculation | None, num_shards: int = 1
    ) -> "DraftModel | None":
        """That of a model, if it has one."""
        draft = model.draft
        if draft is None or settings is None:
            return None
        return cls(draft.graphdef, laid_out(draft.config, num_shards), settings)

    def take_params(self, params: Params) -> tuple[Params, Params]:
        """The weights of this model, and the others."""
        return params[DRAFT], {name: x for name, x in params.items() if name != DRAFT}

    def run(
        self, params: Params, state: DeviceState, batch: RaggedBatch, bucket: Bucket
    ) -> tuple[DeviceState, tuple[KVPages, ...], RaggedBatch]:
        """Guess what the batch's rows ask for, and write this model's KV.

        Returns the state without this model's layers, these, and the batch with the guesses.
        """
        num_layers = len(state.kv_pages) - self.config.num_layers
        pages = state.kv_pages[num_layers:]
        rest = replace(state, kv_pages=state.kv_pages[:num_layers])
        if bucket.kind == "decode" and bucket.num_seqs > MAX_DRAFT_ROWS:
            return rest, pages, batch  # with so many rows nothing is guessed, nor made ready for it
        model: Decoder = nnx.merge(self.graphdef, params)
        mine = replace(state, kv_pages=pages)
        if bucket.kind == "draft":
            mine, batch = self._guess(model, mine, batch)
        _, mine = model(batch, mine)
        return rest, mine.kv_pages, batch

    def _guess(
        self, model: Decoder, state: DeviceState, batch: RaggedBatch
    ) -> tuple[DeviceState, RaggedBatch]:
        """Put guesses in the place of all tokens but the first of each row."""
        firsts = jnp.minimum(batch.cu_q_lens[:-1], len(batch.token_ids) - 1)
        q_lens = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
        rows = jnp.arange(len(q_lens), dtype=jnp.int32)
        starts = batch.positions[firsts]
        page_size, width = state.kv_pages[0].k.shape[2], batch.page_table.shape[1]
        begin = replace(
            batch,
            token_ids=input_ids(batch, state.last_token_ids)[firsts],
            from_last=jnp.zeros(len(rows), bool),
            # every row has a token, those without a draft theirs again and again, kept nowhere
            cu_q_lens=jnp.minimum(jnp.arange(len(rows) + 1, dtype=jnp.int32), (q_lens > 0).sum()),
            logit_rows=rows,
            is_decode_only=True,
        )

        def one_more(i: Array, carry: tuple[tuple[KVPages, ...], Array, Array]):
            pages, ids, guessed = carry
            is_drafting = i < q_lens - 1
            places = starts + jnp.where(is_drafting, i, 0)
            page_ids = batch.page_table[rows, jnp.minimum(places // page_size, width - 1)]
            step = replace(
                begin,
                token_ids=ids,
                positions=places,
                slot_mapping=jnp.where(is_drafting, page_ids * page_size + places % page_size, 0),
                kv_lens=jnp.where(q_lens > 0, places + 1, 0),
            )
            hidden, after = model(step, replace(state, kv_pages=pages))
            ids = pick_greedy(model.unembed(hidden))
            return after.kv_pages, ids, guessed.at[:, i].set(ids)

        most = self.settings.num_speculative_tokens
        guessed = jnp.zeros((len(rows), most), jnp.int32)
        carry = state.kv_pages, begin.token_ids, guessed
        num_steps = jnp.minimum(jnp.max(q_lens) - 1, most)
        pages, _, guessed = jax.lax.fori_loop(0, num_steps, one_more, carry)
        state = replace(state, kv_pages=pages)
        return state, replace(batch, token_ids=_put(batch, guessed))


def _put(batch: RaggedBatch, guessed: Int32[Array, "rows most"]) -> Int32[Array, " tokens"]:
    places = jnp.arange(len(batch.token_ids), dtype=jnp.int32)
    rows = jnp.searchsorted(batch.cu_q_lens, places, side="right") - 1
    rows = jnp.minimum(rows, len(guessed) - 1)
    index = places - batch.cu_q_lens[rows] - 1
    found = guessed[rows, jnp.clip(index, 0, guessed.shape[1] - 1)]
    is_guess = (index >= 0) & (places < batch.cu_q_lens[-1])
    return jnp.where(is_guess, found, batch.token_ids)
