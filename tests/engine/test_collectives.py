"""What devices that share each layer say to each other, counted in the compiled text."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.config.architecture import ModelConfig
from jaxpaged.config.settings import ParallelSettings
from jaxpaged.core.buckets import Bucket
from jaxpaged.engine.capacity import page_bytes, tree_bytes, weight_bytes
from jaxpaged.engine.local_capacity import share_of
from jaxpaged.engine.program_source import ProgramSource
from jaxpaged.layers.attention import paged_attention
from jaxpaged.models.decoder import device_state_shapes
from jaxpaged.sharding import laid_out, make_placement
from jaxpaged.weights.loader import abstract_model
from tests.layers.shapes import TINY

NUM_DEVICES, ROWS, TOKENS, EMBED = 8, 4, 24, 20
# a device's part is over what the filters look through block by block
MODEL = replace(TINY, vocab=8 * 32 * 260, embed=EMBED, ffn=16, heads=8, head_dim=4)
MOST_BYTES_OF_A_ROW = 1024

_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)[\w-]*\("
)
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")


@pytest.fixture(scope="module")
def source():
    placement = make_placement(ParallelSettings(tensor_parallel_size=NUM_DEVICES))
    assert placement is not None
    model = laid_out(MODEL, NUM_DEVICES)
    graphdef, params = abstract_model(model, paged_attention, jnp.float32, placement)
    sizes = {"num_pages": 5, "page_size": 4, "max_num_seqs": ROWS, "dtype": jnp.float32}
    return ProgramSource(graphdef, params, model, **sizes, mesh=placement.stages[0])


def collectives(program) -> list[tuple[int, ...]]:
    """The shape of every result of a collective."""
    options = {"xla_backend_optimization_level": 0}
    text = program.lower().compile(compiler_options=options).as_text()
    results = [found[1] for found in _COLLECTIVE.finditer(text)]
    shapes = [shape for result in results for shape in _SHAPE.findall(result)]
    return [tuple(map(int, filter(None, sizes.split(",")))) for _, sizes in shapes]


def test_a_layer_sums_twice_and_the_embedding_once(source):
    found = collectives(source.forward(Bucket("mixed", "greedy", TOKENS, ROWS)))
    assert found.count((TOKENS, EMBED)) == 2 * MODEL.num_layers + 1
    of_sampler = [shape for shape in found if shape != (TOKENS, EMBED)]
    assert 0 < len(of_sampler) <= 6
    assert max(map(math.prod, of_sampler)) <= ROWS * NUM_DEVICES


@pytest.mark.parametrize("sampler", ["sampled", "scored"])
def test_sampling_exchanges_little_of_a_row_and_nothing_as_wide_as_the_vocabulary(source, sampler):
    found = collectives(source.sample(Bucket("mixed", sampler, TOKENS, ROWS)))
    assert found
    for shape in found:
        num_rows = next(rows for rows in (TOKENS, ROWS) if rows in shape)
        assert 4 * math.prod(shape) <= MOST_BYTES_OF_A_ROW * num_rows


def test_pages_and_histories_move_without_a_word(source):
    for kind, width in (("copy", 8), ("fetch", 1), ("store", 1)):
        assert collectives(source.page(kind, width)) == []
    assert collectives(source.reset(MODEL.max_len)) == []


def test_a_device_has_its_part_of_weights_pages_and_counts(source):
    """Of shapes that divide; two of the eight parts of the KV are each other's copies here."""
    one_device = ProgramSource(
        *abstract_model(MODEL, paged_attention, jnp.float32), MODEL,
        num_pages=5, page_size=4, max_num_seqs=ROWS, dtype=jnp.float32,
    )  # fmt: skip
    for program in ("forward", "sample"):
        bucket = Bucket("mixed", "full", TOKENS, ROWS)
        whole, part = (
            tree_bytes(getattr(each, program)(bucket).arguments[:-1])
            for each in (one_device, source)
        )
        assert part == pytest.approx(whole / NUM_DEVICES, rel=0.05)
    state = source.make_state()
    assert {shard.data.shape[1] for shard in state.kv_pages[0].k.addressable_shards} == {1}
    assert {len(x.addressable_shards) for x in jax.tree.leaves(state)} == {NUM_DEVICES}


LARGE = replace(
    MODEL, vocab=32_000, embed=1024, ffn=4096, heads=32, kv_heads=8, head_dim=32, qk_norm=True
)


def on_a_device(model: ModelConfig, num_devices: int) -> tuple[int, int]:
    """Bytes of weights and of pages, of shapes alone, as the planner counts them too."""
    settings = ParallelSettings(tensor_parallel_size=num_devices)
    placement, stored = make_placement(settings), laid_out(model, num_devices)
    params = abstract_model(stored, paged_attention, jnp.float32, placement)[1]
    mesh = placement and placement.stages[0]
    pages = device_state_shapes(stored, 64, 16, ROWS, jnp.float32, mesh).kv_pages
    weights = weight_bytes(params, stored, placement)
    assert tree_bytes(pages) == 64 * page_bytes(share_of(model, settings), 16, jnp.dtype("float32"))
    return weights, tree_bytes(pages)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_a_device_has_an_nth_of_weights_and_pages_or_the_copies_of_its_kv_head(num_devices):
    weights, pages = on_a_device(LARGE, 1)
    its_weights, its_pages = on_a_device(LARGE, num_devices)
    assert its_weights == pytest.approx(weights / num_devices, rel=0.05)
    assert its_pages == pages // num_devices
    few = replace(LARGE, kv_heads=2)
    copies = num_devices // 2  # of each KV head
    (weights, pages), (its_weights, its_pages) = on_a_device(few, 1), on_a_device(few, num_devices)
    assert its_pages == copies * pages // num_devices
    repeated = 2 * (copies - 1) * 2 * few.head_dim * few.embed * 4 * few.num_layers  # K and V
    assert its_weights == pytest.approx((weights + repeated) / num_devices, rel=0.001)
