"""What each compiled program of one model and one page pool computes, and on which shapes."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxpaged.arrays import DeviceState, KVPages, Params
from jaxpaged.config.architecture import ModelConfig
from jaxpaged.config.settings import LogprobsMode
from jaxpaged.core.buckets import Bucket, BucketLadder
from jaxpaged.core.host_tier import MOVE_WIDTHS
from jaxpaged.core.packing import PackedLayout
from jaxpaged.engine.drafting import DraftModel
from jaxpaged.engine.executables import programs_identity
from jaxpaged.engine.page_moves import (
    COPY_WIDTHS,
    PageKinds,
    copy_pages,
    fetch_pages,
    page_rows,
    store_pages,
)
from jaxpaged.engine.step import (
    SamplerState,
    make_chain,
    make_forward,
    make_inner,
    make_last,
    make_sample,
    reset_counts,
)
from jaxpaged.layers.sampling import LogitsProcessor
from jaxpaged.models.decoder import device_state_shapes, empty_like
from jaxpaged.models.stages import StageKind
from jaxpaged.sharding import spec_of

RESET_LENGTHS = (256, 4096)  # padded history lengths of `reset_counts`, besides the longest
FEW_TOKENS = 32  # up to here XLA's own Triton products read weights faster than cuBLAS does
FUSION_SEARCH = "xla_gpu_experimental_enable_fusion_autotuner"
SEARCH_LEVEL, UNCHECKED = "xla_gpu_autotune_level", 2  # cuBLAS is timed; its results are trusted
WHOLE, LOGITS = PartitionSpec(), spec_of((None, "vocab"))


@dataclass(frozen=True)
class Program:
    """A function before it is compiled. `donated` is the argument whose memory it may reuse."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # shapes
    result: Any  # how the tree that it returns is split, a PartitionSpec a leaf
    donated: int | tuple[()]
    options: dict[str, Any]  # of XLA
    mesh: Mesh | None

    def lower(self) -> Any:
        return self.jitted().lower(*self.arguments)

    def jitted(self) -> Any:
        """On a mesh, the function sees one device's share of everything."""
        function = self.function
        if self.mesh is not None:
            specs = jax.tree.map(_spec, self.arguments)
            # that results agree on all devices is the function's affair, and tests'
            function = jax.shard_map(
                function, mesh=self.mesh, in_specs=specs, out_specs=self.result, check_vma=False
            )
        return jax.jit(function, donate_argnums=self.donated)

    def compile(self, lowered: Any = None) -> Any:
        """Compile it, from what another process lowered if that is given."""
        lowered = self.lower() if lowered is None else lowered
        return lowered.compile(compiler_options=(_common_options() | self.options) or None)


class ProgramSource:
    """Says what each program computes, on which shapes.

    Args:
        params: arrays, or their shapes.
        model: `max_len` is the longest sequence.
        num_pages: of the pool, the null page included.
        num_local_pages: likewise of layers with a window; 0 where they use the others' pages.
        dtype: of the KV.
        swaps: pages may go to host memory.
        logprobs_mode: what is told where logprobs are wanted.
        mesh: the devices that share each layer, for which `params` and `model` are laid out.
        num_scheduler_steps: that a program of several decode steps takes; 1: there is none.
        stage: of a model cut into stages; `graphdef`, `params` and `model` have its layers alone.
        has_local_table: layers with a window have a page table of their own, of another stage too.
        draft: guesses tokens; `params` has its weights too.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Params,
        model: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        dtype: DTypeLike,
        processors: tuple[LogitsProcessor, ...] = (),
        swaps: bool = False,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        mesh: Mesh | None = None,
        num_local_pages: int = 0,
        num_scheduler_steps: int = 1,
        stage: StageKind = "whole",
        has_local_table: bool = False,
        draft: DraftModel | None = None,
    ):
        self._graphdef, self._processors, self.mesh = graphdef, processors, mesh
        self._stage: StageKind = stage
        self._logprobs_mode: LogprobsMode = logprobs_mode
        has_local, self._draft = num_local_pages > 0, draft
        is_local = [has_local and kind.window is not None for kind in model.layer_kinds]
        self.page_kinds = PageKinds(
            tuple(is_local + [False] * (draft.config.num_layers if draft else 0))
        )
        self.layout = partial(
            PackedLayout,
            pages_per_seq=-(-model.max_len // page_size),
            vocab=model.vocab - model.vocab_padding,
            has_local_table=has_local_table or self.page_kinds.has_both,
        )
        self._params = shapes_of(params)
        sizes = num_pages, page_size, max_num_seqs, dtype, mesh, num_local_pages
        self._state = device_state_shapes(model, *sizes)
        if draft is not None:
            more = device_state_shapes(draft.config, *sizes[:-1]).kv_pages
            self._state = replace(self._state, kv_pages=self._state.kv_pages + more)
        self._page_programs = [("copy", width) for width in COPY_WIDTHS]
        if swaps:
            self._page_programs += itertools.product(("fetch", "store"), MOVE_WIDTHS)
        self.reset_lengths = [*(n for n in RESET_LENGTHS if n < model.max_len), model.max_len]
        self._model = model
        self._chain_length = num_scheduler_steps

    def identity(self) -> str:
        """All that the programs depend on besides their names."""
        split = jax.tree.leaves(jax.tree.map(_spec, (self._params, self._state)))
        devices = self.mesh and [device.id for device in self.mesh.devices.flat]
        named = (self._model, self._stage, self._logprobs_mode, devices, split)
        return programs_identity((*named, *self._draft_identity()), self._params, self._state)

    @property
    def is_last(self) -> bool:
        """Whether the programs make logits and sample."""
        return self._stage in ("whole", "last")

    def _draft_identity(self) -> tuple[object, ...]:
        draft = self._draft
        return () if draft is None else (draft.config, draft.settings.num_speculative_tokens)

    def make_state(self) -> DeviceState:
        """An empty page pool and the slots of sequences."""
        return empty_like(self._state)

    def make_pages(self) -> tuple[KVPages, ...]:
        """An empty page pool alone."""
        return empty_like(self._state.kv_pages)

    def make_token_ids(self) -> jax.Array:
        """`last_token_ids` before anything was sampled."""
        return empty_like(self._state.last_token_ids)

    def forward(self, bucket: Bucket) -> Program:
        layout = self.layout(bucket)
        arguments = (self._params, self._state, self._int32(layout.forward_size))
        result, name, options = (self._state, LOGITS, WHOLE), bucket.forward_name, _options(bucket)
        if self._stage == "whole":
            function = make_forward(self._graphdef, layout, self._draft)
            return self._program(name, function, arguments, result, 1, options)
        given = self._state.last_token_ids
        if self._stage != "first":
            shape, dtype = (bucket.num_tokens, self._model.embed), self._state.kv_pages[0].k.dtype
            given = jax.ShapeDtypeStruct(shape, dtype, sharding=given.sharding)
        if self._stage == "last":
            function = make_last(self._graphdef, layout)
            return self._program(name, function, (*arguments, given), result, 1, options)
        pages, function = self._state.kv_pages, make_inner(self._graphdef, layout)
        arguments = (self._params, pages, arguments[2], given)
        return self._program(name, function, arguments, (WHOLE, pages), 1, options)

    def chain(self, bucket: Bucket, num_steps: int) -> Program:
        """Several whole steps in a row."""
        layout, name = self.layout(bucket), bucket.chain_name(num_steps)
        sample = make_sample(layout, self._processors, self._logprobs_mode)
        forward = make_forward(self._graphdef, layout, self._draft)
        function = make_chain(forward, sample if bucket.needs_sampling else None, layout)
        arguments = (self._params, self._state, self._int32(num_steps, layout.chained_size))
        return self._program(name, function, arguments, (self._state, WHOLE), 1, _options(bucket))

    def sample(self, bucket: Bucket) -> Program:
        layout = self.layout(bucket)
        counts = self._state.output_counts
        state = SamplerState(self._state.last_token_ids, self._state.output_counts)
        shape = (bucket.num_logits, counts.shape[1])
        logits = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=counts.sharding)
        arguments = (state, logits, self._int32(layout.sample_size))
        function = make_sample(layout, self._processors, self._logprobs_mode)
        return self._program(bucket.sample_name, function, arguments, (state, WHOLE), 0)

    def reset(self, length: int) -> Program:
        counts, int32 = self._state.output_counts, self._int32
        arguments = (counts, int32(), int32(length), int32(), int32())
        return self._program(f"reset {length}", reset_counts, arguments, counts, 0)

    def page(self, kind: str, width: int) -> Program:
        """What moves `width` pages: copy, fetch or store."""
        pool, kinds, name = self._state.kv_pages, self.page_kinds, f"{kind} {width}"
        both = (2,) if kinds.has_both else ()
        rows, page_ids = page_rows(pool, width), self._int32(*both, width)
        if kind == "copy":
            arguments = (pool, self._int32(*both, 2, width))
            return self._program(name, partial(copy_pages, kinds=kinds), arguments, pool, 0)
        if kind == "fetch":
            function = partial(fetch_pages, kinds=kinds)
            return self._program(name, function, (pool, page_ids), rows, ())
        function = partial(store_pages, kinds=kinds)
        return self._program(name, function, (pool, rows, page_ids), pool, 0)

    def all_programs(self, ladder: BucketLadder) -> dict[str, Callable[[], Program]]:
        """What makes each program that these buckets need, by name; what takes longest first."""
        programs: dict[str, Callable[[], Program]] = {}
        for bucket in ladder.chained_buckets() if self._chain_length > 1 else ():
            make = partial(self.chain, bucket, self._chain_length)
            programs[bucket.chain_name(self._chain_length)] = make
        buckets = ladder.all_buckets()
        searched = [bucket for bucket in buckets if bucket.num_tokens <= FEW_TOKENS]
        # samplers are lowered in a third of a forward program's time: they give every core work
        # while the first forward programs are lowered, and the small ones leave none idle at last
        large = [bucket for bucket in buckets if bucket.sampler in ("full", "scored")]
        for forwards, samplers in ((searched, large), (buckets, buckets)):
            for bucket in forwards:
                programs[bucket.forward_name] = partial(self.forward, bucket)
            for bucket in samplers:
                if bucket.needs_sampling and self.is_last:
                    programs[bucket.sample_name] = partial(self.sample, bucket)
        for length in self.reset_lengths if self.is_last else ():
            programs[f"reset {length}"] = partial(self.reset, length)
        for kind, width in self._page_programs:
            programs[f"{kind} {width}"] = partial(self.page, kind, width)
        return programs

    def largest_words(self, ladder: BucketLadder) -> int:
        """Bytes of the largest buffer that a step of any bucket is sent in."""
        layouts = [self.layout(bucket) for bucket in ladder.all_buckets()]
        words = [max(one.forward_size, one.sample_size) for one in layouts]
        if self._chain_length > 1:
            chained = [self.layout(bucket).chained_size for bucket in ladder.chained_buckets()]
            words += [self._chain_length * size for size in chained]
        return 4 * max(words, default=0)

    def _program(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        result: Any,
        donated: int | tuple[()],
        options: dict[str, Any] | None = None,
    ) -> Program:
        """`result` has arrays that it is split like, or specs."""
        split = jax.tree.map(_spec, result)
        return Program(name, function, arguments, split, donated, options or {}, self.mesh)

    def _int32(self, *shape: int) -> jax.ShapeDtypeStruct:
        sharding = None if self.mesh is None else NamedSharding(self.mesh, WHOLE)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)


@cache
def _common_options() -> dict[str, Any]:
    """XLA's, of every program: it compiles each small fusion once, instead of timing two ways."""
    options = {FUSION_SEARCH: False}
    if jax.default_backend() != "gpu":
        return {}
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError:
        return {}  # this XLA does not have it
    return options


def _options(bucket: Bucket) -> dict[str, Any]:
    """XLA's, of a program that multiplies by the weights."""
    if jax.default_backend() != "gpu":
        return {}
    if bucket.num_tokens <= FEW_TOKENS:
        return {"xla_gpu_enable_triton_gemm": True}
    return {"xla_gpu_enable_triton_gemm": False, SEARCH_LEVEL: UNCHECKED}


def shapes_of(tree: Any) -> Any:
    """Arrays as their shapes, with their places."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(shape, tree)


def _spec(x: Any) -> PartitionSpec:
    """How an array or its shape is split, or what already says so."""
    if isinstance(x, PartitionSpec):
        return x
    sharding = getattr(x, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else WHOLE
