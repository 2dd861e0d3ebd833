"""The ring of loads between the warpgroup that loads and those that multiply."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Ring:
    """Slots, and for each a barrier that it is full and one that it is free again."""

    stages: int
    full: Any
    free: Any

    def slot(self, load: jax.Array) -> jax.Array:
        return lax.rem(load, jnp.int32(self.stages))

    def begin(self, load: jax.Array) -> jax.Array:
        """The slot of a load, once there is room."""
        slot = self.slot(load)
        pl.when(load >= jnp.int32(self.stages))(lambda: plgpu.barrier_wait(self.free.at[slot]))
        return slot

    def drain(self, loads: jax.Array) -> None:
        """Wait until all of so many loads were used: else a barrier would be left before it is
        told.
        """

        def wait(i, _):
            plgpu.barrier_wait(self.free.at[self.slot(i)])

        lax.fori_loop(jnp.maximum(loads - self.stages, 0), loads, wait, None)

    def multiply(
        self,
        before: jax.Array,
        steps: jax.Array | int,
        start: Callable[[jax.Array, jax.Array], None],
    ) -> None:
        """`start(slot, k)` the product of each of `steps` loads after those `before`, one still in
        flight.

        The last slot stays taken, until `release`.
        """

        def begin(k):
            slot = self.slot(before + k)
            plgpu.barrier_wait(self.full.at[slot])
            start(slot, k)

        def step(k, _):
            begin(k)
            plgpu.wgmma_wait(1)
            self.release(before + k - 1)

        begin(jnp.int32(0))
        lax.fori_loop(1, steps, step, None)

    def release(self, load: jax.Array) -> None:
        plgpu.barrier_arrive(self.free.at[self.slot(load)])
