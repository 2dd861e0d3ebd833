"""How a pool's memory is shared between layers that see all and layers with a window."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpaged.config.architecture import LayerKind, ModelConfig
from jaxpaged.config.settings import ParallelSettings
from jaxpaged.core.local_pages import MOST_CHUNK, LocalPages, most_of_decode
from jaxpaged.core.page_pool import PagePool
from jaxpaged.errors import ConfigError
from jaxpaged.sharding import laid_out, layers_of_stages

# windows of context at which both kinds of pages are used up together: in longer sequences local
# pages are left over, in shorter ones pages
EVEN_AT_WINDOWS = 8


@dataclass(frozen=True)
class PoolSizes:
    """Pages of both kinds, null pages included; without windows there are no local ones.

    Where every layer has a window, a page takes no memory: it only stands for its tokens.
    """

    num_pages: int
    num_local_pages: int
    num_full_layers: int
    local_pages_of_one: int  # that a decoding sequence holds at most

    @property
    def has_both(self) -> bool:
        return self.num_local_pages > 0 and self.num_full_layers > 0

    def make(self, page_size: int, window: int | None) -> tuple[PagePool, LocalPages | None]:
        """The bookkeeping of such pools."""
        pool = PagePool(self.num_pages, page_size)
        if window is None:
            return pool, None
        return pool, LocalPages(pool, window, self.num_local_pages)


@dataclass(frozen=True)
class _Shape:
    """Bytes and counts of pages for one sequence."""

    page: int  # bytes, in the layers that see all
    local_page: int
    full: int  # pages of the longest sequence
    window: int  # local pages of one that decodes
    chunk: int  # and more of one whose prompt is being computed

    @property
    def least_local(self) -> int:
        """For one sequence in chunks of a page, the null page included."""
        return 1 + min(self.window + 1, self.full)

    def bytes_of(self, num_pages: int, num_local: int) -> int:
        return num_pages * self.page + num_local * self.local_page


def layer_kinds_of(model: ModelConfig, num_stages: int) -> tuple[LayerKind, ...]:
    """The layers that a stage is planned with: as many of each kind of page as any stage has.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if num_stages > model.num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size is {num_stages}, over the model's {model.num_layers} "
            "layers: lower it"
        )
    stages = [
        model.layer_kinds[layers.start : layers.stop]
        for layers in layers_of_stages(model.num_layers, num_stages)
    ]
    kinds: list[LayerKind] = []
    for has_window in (False, True):
        of_stages = ([k for k in stage if (k.window is not None) == has_window] for stage in stages)
        kinds += max(of_stages, key=len)
    return tuple(kinds)


def share_of(model: ModelConfig, parallel: ParallelSettings) -> ModelConfig:
    """What a device computes, see `layer_kinds_of` about its layers.

    Raises:
        ConfigError: heads or widths do not divide, or a stage would have no layer.
    """
    num_shards = parallel.tensor_parallel_size
    stored = laid_out(model, num_shards)
    return dataclasses.replace(
        stored,
        heads=stored.heads // num_shards,
        kv_heads=stored.kv_heads // num_shards,
        ffn=stored.ffn // num_shards,
        vocab=stored.vocab // num_shards,
        layer_kinds=layer_kinds_of(model, parallel.pipeline_parallel_size),
    )


def page_bytes(model: ModelConfig, page_size: int, dtype: np.dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    elements = 2 * model.num_layers * page_size * model.kv_heads * model.head_dim
    return elements * np.dtype(dtype).itemsize


@dataclass(frozen=True)
class PageNeeds:
    """What pages of both kinds take, and how many of them sequences need.

    `page` are a page's bytes in all layers, of which `draft_page` are those of a draft model.
    """

    page: int
    model: ModelConfig
    page_size: int
    max_num_seqs: int
    budget: int  # tokens of a step
    draft_page: int = 0

    def share_pool(self, memory: int) -> PoolSizes:
        """Pages of both kinds in so much memory."""
        model, max_num_seqs = self.model, self.max_num_seqs
        if model.local_window is None:
            return PoolSizes(memory // self.page, 0, model.num_layers, 0)
        shape = self._shape
        num_full_layers = model.num_layers - model.num_local_layers
        if not num_full_layers:
            num_local = memory // shape.local_page
            num_pages = 1 + max_num_seqs * shape.full + num_local
            return PoolSizes(num_pages, num_local, 0, shape.window)
        even = min(shape.full, EVEN_AT_WINDOWS * shape.window)
        spare = memory - shape.bytes_of(1, 1 + shape.chunk)
        num_even = max(spare, 0) / shape.bytes_of(even, shape.window)
        num_local = 1 + shape.chunk + int(min(num_even, max_num_seqs) * shape.window)
        # the longest sequence must find both
        most = (memory - shape.bytes_of(1 + shape.full, 0)) // shape.local_page
        num_local = max(min(num_local, most), shape.least_local)
        num_pages = (memory - shape.bytes_of(0, num_local)) // shape.page
        num_pages = max(min(num_pages, 1 + max_num_seqs * shape.full), 1)
        return PoolSizes(num_pages, num_local, num_full_layers, shape.window)

    @property
    def most_useful(self) -> int:
        """What all sequences could use together at most, in pages of all layers."""
        if self.model.local_window is None:
            return 1 + self.max_num_seqs * self._full
        shape = self._shape
        each = shape.bytes_of(shape.full, min(shape.window + shape.chunk, shape.full))
        return -(-(shape.bytes_of(1, 1) + self.max_num_seqs * each) // self.page)

    @property
    def least_of_one(self) -> int:
        """What the longest sequence needs alone, computed in chunks of a page."""
        if self.model.local_window is None:
            return 1 + self._full
        shape = self._shape
        return -(-shape.bytes_of(1 + shape.full, shape.least_local) // self.page)

    @property
    def _full(self) -> int:
        return -(-self.model.max_len // self.page_size)

    @cached_property
    def _shape(self) -> _Shape:
        window = self.model.local_window
        assert window is not None
        full = self._full
        layer = (self.page - self.draft_page) // self.model.num_layers
        local = layer * self.model.num_local_layers
        of_decode = min(most_of_decode(window, self.page_size), full)
        chunk = -(-min(self.budget, max(MOST_CHUNK, window)) // self.page_size)
        return _Shape(self.page - local, local, full, of_decode, min(chunk, full))
