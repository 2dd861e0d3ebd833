import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checks import KernelArgumentError
from pallas_kernels.kv_write import kv_write, kv_write_reference

PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM = 6, 2, 4, 8


def pools(dtype=jnp.float32, pages=PAGES):
    shape = (2, pages, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    return tuple(jax.random.normal(jax.random.key(0), shape).astype(dtype))


def rows(tokens, dtype=jnp.float32):
    shape = (2, tokens, KV_HEADS, HEAD_DIM)
    return tuple(jax.random.normal(jax.random.key(1), shape).astype(dtype))


def slots(*values):
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_agrees_with_reference(dtype):
    args = (*pools(dtype), *rows(5, dtype), slots(5, 4, 23, 11, 16))
    got, want = jax.jit(kv_write)(*args), jax.jit(kv_write_reference)(*args)
    for got_pages, want_pages, old_pages in zip(got, want, args[:2], strict=True):
        np.testing.assert_array_equal(got_pages, want_pages)
        assert (np.asarray(got_pages) != np.asarray(old_pages)).any()


def test_a_token_lands_in_its_page_and_offset():
    k, v = rows(1)
    k_pages, v_pages = kv_write(*pools(), k, v, slots(2 * PAGE_SIZE + 3))
    np.testing.assert_array_equal(k_pages[2, :, 3], k[0])
    np.testing.assert_array_equal(v_pages[2, :, 3], v[0])


def test_padding_tokens_change_the_null_page_only():
    k_pages, v_pages = pools()
    k, v = rows(4)
    new_k, new_v = kv_write(k_pages, v_pages, k, v, slots(9, 0, 0, 0))
    changed = np.argwhere((np.asarray(new_k) != np.asarray(k_pages)).any(axis=(1, 3)))
    assert {tuple(place) for place in changed} == {(0, 0), (2, 1)}
    np.testing.assert_array_equal(new_v[2, :, 1], v[0])


def test_slots_past_the_pool_are_dropped():
    old = pools()
    new = kv_write(*old, *rows(1), slots(PAGES * PAGE_SIZE))
    for old_pages, new_pages in zip(old, new, strict=True):
        np.testing.assert_array_equal(new_pages, old_pages)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_donated_pages_are_written_in_place_and_never_copied(dtype):
    def memory(pages):
        args = (*pools(dtype, pages), *rows(8, dtype), slots(*range(8)))
        compiled = jax.jit(kv_write, donate_argnums=(0, 1)).lower(*args).compile()
        return compiled.memory_analysis(), args[0].nbytes

    small, _ = memory(PAGES)
    large, pool_bytes = memory(100 * PAGES)
    assert large.alias_size_in_bytes == 2 * pool_bytes
    assert large.temp_size_in_bytes == small.temp_size_in_bytes < pool_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k": jnp.zeros((5, KV_HEADS, HEAD_DIM + 1))},
            "kv_write: k has shape (5, 2, 9), expected [tokens kv_heads head_dim] with "
            "head_dim = 8",
        ),
        (
            {"v": jnp.zeros((5, KV_HEADS, HEAD_DIM), jnp.bfloat16)},
            "kv_write: v is bfloat16, allowed: float32; cast it before",
        ),
        (
            {"slot_mapping": jnp.zeros(4, jnp.int32)},
            "kv_write: slot_mapping has shape (4,), expected [tokens] with tokens = 5",
        ),
        (
            {"slot_mapping": jnp.zeros((5, 1), jnp.int32)},
            "kv_write: slot_mapping has shape (5, 1), expected [tokens]",
        ),
    ],
)
def test_refuses_arguments_with_one_clear_line(change, message):
    k_pages, v_pages = pools()
    k, v = rows(5)
    args = {
        "k_pages": k_pages,
        "v_pages": v_pages,
        "k": k,
        "v": v,
        "slot_mapping": slots(*range(5)),
    }
    with pytest.raises(KernelArgumentError) as error:
        kv_write(**(args | change))
    assert str(error.value) == message
