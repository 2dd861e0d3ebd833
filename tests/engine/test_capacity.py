import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config.architecture import LayerKind, ModelConfig, RopeConfig
from jaxpaged.config.flags import ArgumentParser, add_engine_flags, config_from_args
from jaxpaged.engine.advice import plan_or_refuse, ran_out
from jaxpaged.engine.capacity import plan_memory, tree_bytes
from jaxpaged.engine.memory import GIB, DeviceMemory, named_device
from jaxpaged.errors import ConfigError
from jaxpaged.layers.attention import paged_attention
from jaxpaged.models.decoder import device_state_shapes
from jaxpaged.sharding import layers_of_stages
from jaxpaged.weights.loader import abstract_model

BF16 = np.dtype(jnp.bfloat16)
LLAMA3_8B = ModelConfig(
    family="llama",
    vocab=128_256,
    embed=4096,
    ffn=14_336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    layer_kinds=(LayerKind(None, RopeConfig(5e5)),) * 32,
    max_len=8192,
    norm_eps=1e-5,
)
WEIGHTS = 16_060_522_496 + 532_480  # 8,030,261,248 bfloat16 parameters, norms in float32
H200 = named_device("H200")
CPU = DeviceMemory("CPU", 64 * GIB, is_cpu=True)


def configured(*flags):
    parser = ArgumentParser()
    add_engine_flags(parser)
    return config_from_args(parser.parse_args(flags))


def plan(*flags, model=LLAMA3_8B, weights=WEIGHTS, device=H200):
    return plan_memory(configured(*flags), model, weights, BF16, device)


def refused(*flags, device, model=LLAMA3_8B, weights=WEIGHTS):
    with pytest.raises(ConfigError) as caught:
        plan_or_refuse(configured(*flags), model, weights, BF16, device)
    return str(caught.value)


def test_weights_are_counted_from_shapes_alone():
    _, params = abstract_model(LLAMA3_8B, paged_attention, jnp.bfloat16)
    assert tree_bytes(params) == WEIGHTS


def test_slots_and_pages_are_counted_as_the_device_state_has_them():
    model = replace(LLAMA3_8B, layer_kinds=LLAMA3_8B.layer_kinds[:2])
    found = plan("--max-num-seqs", "4", "--num-gpu-blocks-override", "9", model=model)
    state = device_state_shapes(model, found.num_pages, found.page_size, 4, jnp.bfloat16)
    assert tree_bytes(state.kv_pages) == found.num_pages * found.page
    assert tree_bytes(state.output_counts) == found.slots


@pytest.mark.parametrize("device", [named_device("H200"), named_device("L4"), named_device("48")])
def test_the_whole_stays_within_what_the_process_may_take(device):
    found = plan(device=device)
    taken = found.weights + found.slots + found.workspace + found.num_pages * found.page
    assert found.fits
    assert taken + found.margin <= found.limit == int(0.92 * device.total_bytes)
    assert taken + found.margin + found.page > found.limit  # and not a page is left out


@pytest.mark.parametrize("length", [8192, 1000])
def test_pages_that_no_sequence_could_use_are_not_taken(length):
    found = plan("--max-num-seqs", "8", "--max-model-len", str(length))
    assert found.num_pages == 1 + 8 * -(-length // 16)
    assert found.concurrency == 8


def test_context_is_shortened_to_the_pool_only_where_it_was_left_open():
    small = named_device("17.8")
    found = plan("--gpu-memory-utilization", "0.97", device=small)
    assert found.model.max_len == found.pool_tokens < found.wanted_len == 8192
    automatic = plan("--gpu-memory-utilization", "0.97", "--max-model-len", "auto", device=small)
    assert automatic == found
    refused("--gpu-memory-utilization", "0.97", "--max-model-len", "8192", device=small)


def test_the_number_of_running_sequences_follows_the_pool():
    assert plan().max_num_seqs == 256
    found = plan(device=named_device("L4"))
    assert found.max_num_seqs == 64
    assert found.pool_tokens >= 64 * 512
    assert plan("--max-num-seqs", "200", device=named_device("L4")).max_num_seqs == 200
    assert plan(device=CPU, model=replace(LLAMA3_8B, max_len=256)).max_num_seqs == 8


CASES = [
    (("--max-model-len", "8192"), named_device("18.5")),
    (("--num-gpu-blocks-override", "70000"), named_device("H200")),
    (("--kv-cache-memory-bytes", str(130 * GIB)), named_device("H200")),
    (("--kv-cache-memory-bytes", str(GIB // 2), "--max-model-len", "8192"), named_device("H200")),
    (("--max-num-batched-tokens", "64k", "--gpu-memory-utilization", "0.5"), named_device("34")),
    (("--max-model-len", "8192", "--cpu-kvcache-space", "0.2"), CPU),
]


@pytest.mark.parametrize(("flags", "device"), CASES)
def test_every_flag_that_a_refusal_names_makes_it_fit(flags, device):
    text = refused(*flags, device=device)
    needed, free = (float(x) for x in re.findall(r"([\d.]+) GiB (?:needed|free)", text))
    assert needed > free or "--kv-cache-memory-bytes" in flags
    told = re.findall(r"(--[a-z-]+) ([\d.]+)", text)
    assert 1 <= len(told) <= 3
    for flag, value in told:
        plan_or_refuse(configured(*flags, flag, value), LLAMA3_8B, WEIGHTS, BF16, device)


def test_flags_that_help_only_together_are_told_as_such():
    text = refused("--max-num-batched-tokens", "64k", device=named_device("17.3"))
    assert "together these help: " in text
    told = [word for pair in re.findall(r"(--[a-z-]+) ([\d.]+)", text) for word in pair]
    assert len(told) >= 4
    plan_or_refuse(configured(*told), LLAMA3_8B, WEIGHTS, BF16, named_device("17.3"))


def test_no_flag_is_told_where_none_is_enough_but_what_takes_the_memory():
    text = refused(device=named_device("A10"), weights=2 * WEIGHTS)
    assert "no flag is enough, the weights alone take 29.92 GiB" in text
    assert "--" not in text
    text = refused(device=named_device("17"))  # weights would fit
    assert "no flag is enough, the least is 16.57 GiB (weights 14.96 GiB, workspace 0.78" in text


def test_running_out_all_the_same_names_smaller_sizes():
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory trying to allocate 2.50GiB.")
    found = plan()
    text = str(ran_out(found, error))
    assert text.startswith("H200 ran out of memory: 2.50 GiB more needed")
    pool = int(re.findall(r"--kv-cache-memory-bytes (\d+)", text)[0])
    assert found.num_pages * found.page - pool >= 2.5 * GIB
    assert "--max-num-batched-tokens 4096, --max-num-seqs 128" in text
    assert ran_out(found, RuntimeError("INTERNAL: something else")) is None


def test_a_device_of_several_has_its_share_of_every_width():
    one = plan()
    two, sixteen, staged = (plan(*flags.split()) for flags in ("-tp 2", "-tp 16", "-tp 2 -pp 4"))
    assert (two.page * 2, two.slots * 2) == (one.page, one.slots)
    assert sixteen.page * 8 == one.page  # of 8 KV heads, each on two devices
    assert staged.page * 8 == one.page
    with pytest.raises(ConfigError, match="3, which does not divide the model's heads of 32"):
        plan("-tp", "3")


@pytest.mark.parametrize(
    ("name", "gibibytes"), [("nvidia h200", 140.4), ("L40s", 45), ("80GB", 80)]
)
def test_a_gpu_is_known_by_name_or_size(name, gibibytes):
    assert named_device(name).total_bytes == pytest.approx(gibibytes * GIB, rel=0.01)


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"--gpu is 'potato', known are A10, .*H200"):
        named_device("potato")


def windowed(window, every, num_layers=48):
    """Llama's layers, of which all but every `every`-th see a window."""
    kind = LLAMA3_8B.layer_kinds[0]
    kinds = [
        replace(kind, window=None if (i + 1) % every == 0 else window) for i in range(num_layers)
    ]
    return replace(LLAMA3_8B, layer_kinds=tuple(kinds), max_len=131_072)


def test_windows_let_more_long_sequences_run_together():
    flags = "--max-num-seqs", "64", "--num-gpu-blocks-override", "20000"
    local = windowed(1024, 6)
    kept = replace(local, layer_kinds=(local.layer_kinds[-1],) * local.num_layers)
    found, whole = plan(*flags, model=local), plan(*flags, model=kept)
    assert whole.concurrency == pytest.approx(19_999 / 8192)
    assert found.concurrency > 3 * whole.concurrency
    pools, layer = found.pools, found.page // local.num_layers
    taken = layer * (8 * pools.num_pages + 40 * pools.num_local_pages)
    assert 0 <= 20_000 * found.page - taken < found.page
    sizes = pools.num_pages, found.page_size, 64, jnp.bfloat16
    state = device_state_shapes(local, *sizes, num_local_pages=pools.num_local_pages)
    assert tree_bytes(state.kv_pages) == taken
    text = "\n".join(found.lines())
    assert f"and {pools.num_local_pages - 1} in 40 layers with a window of 1024 tokens" in text


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_every_stage_has_room_for_the_pages_of_its_layers(num_stages):
    model = windowed(1024, 6, 26)
    found = plan("--max-num-seqs", "64", "-pp", str(num_stages), model=model)
    pools, sizes = found.pools, (found.page_size, 64, jnp.bfloat16)
    taken = []
    for layers in layers_of_stages(model.num_layers, num_stages):
        stage = replace(model, layer_kinds=model.layer_kinds[layers.start : layers.stop])
        local = {"num_local_pages": pools.num_local_pages}
        taken.append(
            tree_bytes(device_state_shapes(stage, pools.num_pages, *sizes, **local).kv_pages)
        )
    memory = found.num_pages * found.page
    assert 0.8 * memory < max(taken) <= memory
    with pytest.raises(ConfigError, match="is 27, over the model's 26 layers: lower it"):
        plan("-pp", "27", model=model)


def test_where_every_layer_has_a_window_the_context_costs_nothing():
    mistral = windowed(4096, 1000, 32)
    found = plan("--max-num-seqs", "32", "--num-gpu-blocks-override", "8300", model=mistral)
    assert found.pools.num_local_pages == 8300
    assert found.concurrency == pytest.approx(8299 / 257)
    short = plan("--max-model-len", "4096", "--num-gpu-blocks-override", "8300", model=mistral)
    assert (short.pools.num_pages, short.pools.num_local_pages) == (8300, 0)


@pytest.mark.parametrize("every", [6, 1000])
@pytest.mark.parametrize("blocks", [3, 40, 70, 100, 700, 3000, 9000])
def test_the_longest_sequence_finds_pages_of_both_kinds_whatever_the_memory(every, blocks):
    model = windowed(1024, every)
    found = plan("--kv-cache-memory-bytes", str(blocks * plan(model=model).page), model=model)
    assert found.fits
    assert found.model.max_len > 0
    if every == 1000 and blocks > 67:
        assert found.model.max_len == 131_072
    assert found.concurrency >= 1
    assert found.model.max_len >= (blocks - 1) * 16 or found.model.max_len == 131_072


@pytest.mark.parametrize(
    ("weights_gib", "device", "flags", "steps"),
    [
        (1, H200, (), 8),
        (7.5, H200, (), 8),  # 4e9 parameters
        (15, H200, (), 1),
        (1.5, named_device("NVIDIA A10G"), (), 1),
        (0.5, CPU, (), 1),
        (1, H200, ("--num-scheduler-steps", "1"), 1),
        (15, H200, ("--num-scheduler-steps", "4"), 4),
        (1, H200, ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'), 8),
        (1, H200, ("-tp", "2"), 1),
    ],
)
def test_several_steps_a_dispatch_where_weights_are_read_faster_than_the_host_dispatches(
    weights_gib, device, flags, steps
):
    found = plan(*flags, weights=int(weights_gib * GIB), device=device)
    assert found.num_scheduler_steps == steps
