"""Settings: five frozen groups in one EngineConfig. A field has its flag's name and its unit.

Checked when made, never repaired. What is found out later (the page count, the context that fits)
goes into a new object by `dataclasses.replace`. None means: not set, the model or the planner says.
"""

# pyright: reportUnnecessaryIsInstance=false

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxpaged.config.speculation import Speculation, speculation_from
from jaxpaged.errors import ConfigError

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]

MOST_DEVICES = 64
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def setting(default: Any, help: str, *, flag: str = "", aliases: tuple[str, ...] = ()) -> Any:
    """A field with what its flag needs: help text, another flag name, older names."""
    metadata = {"help": help, "flag": flag, "aliases": aliases}
    if default == {}:
        return field(default_factory=dict[str, Any], metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and how it is read."""

    model: str = setting("", "directory, GGUF file or hub id of the model")
    served_model_name: tuple[str, ...] = setting((), "names in the API (default: the model)")
    tokenizer: str | None = setting(None, "directory of another tokenizer (default: the model's)")
    tokenizer_mode: Literal["auto", "hf"] = setting(
        "auto", "both read tokenizer.json, or make one of what the model has instead"
    )
    skip_tokenizer_init: bool = setting(False, "load no tokenizer: prompts are token ids only")
    revision: str | None = setting(None, "commit or tag on the hub")
    download_dir: str | None = setting(None, "for models of the hub (default: its own cache)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "type of weights and activations; auto is bfloat16 on a GPU, float32 on a CPU"
    )
    max_model_len: int | None = setting(
        None, "longest sequence in tokens (default: the model's; -1: the longest that fits)"
    )
    load_format: Literal["auto", "orbax", "safetensors", "gguf", "dummy"] = setting(
        "auto", "dummy takes random weights of the configuration's shape"
    )
    trust_remote_code: bool = setting(False, "known and refused: no code of a model folder is run")
    seed: int = setting(0, "of requests without a seed, and of dummy weights")
    generation_config: str = setting(
        "auto", "auto: the model's default sampling parameters; vllm: vLLM's neutral ones"
    )
    override_generation_config: dict[str, Any] = setting({}, "default sampling parameters, JSON")
    hf_overrides: dict[str, Any] = setting({}, "values put over the model's configuration, JSON")
    max_logprobs: int = setting(20, "logprobs of a place that a request may ask for, 0 to 20")
    logprobs_mode: LogprobsMode = setting(
        "raw_logprobs",
        "what is told as logprobs: the model's, or those after penalties, temperature and filters; "
        "or logits in their place",
    )
    chat_template: str | None = setting(None, "file with another Jinja chat template")
    trust_request_chat_template: bool = setting(
        False, "take chat_template from requests; it is run in a sandbox with limits"
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = setting(
        "auto",
        "content of messages for the template: text, or OpenAI's parts; auto: as it reads it",
    )
    default_chat_template_kwargs: dict[str, Any] = setting(
        {}, "values for the chat template where a request gives none, JSON"
    )
    enable_auto_tool_choice: bool = setting(
        False, "let the model decide about calls of tools; needs --tool-call-parser"
    )
    tool_call_parser: (
        Literal["hermes", "llama3_json", "mistral", "pythonic", "qwen3", "qwen3_coder", "qwen3_xml"]
        | None
    ) = setting(None, "the form in which the model writes calls of tools")
    reasoning_parser: Literal["deepseek_r1", "qwen3"] | None = setting(
        None, "the form of the model's reasoning, which is then told apart from its answer"
    )
    structured_outputs_backend: Literal["auto", "guidance"] = setting(
        "auto",
        "both hold answers to their grammar with llguidance",
        flag="--structured-outputs-config.backend",
    )
    runner: Literal["auto", "generate", "pooling"] = setting(
        "auto",
        "what the model is for; pooling: embeddings and scores, as auto takes encoders and models "
        "with a modules.json",
    )

    def __post_init__(self):
        if self.trust_remote_code:
            raise ConfigError(
                "trust_remote_code is refused: code of a model folder is never run; leave it out"
            )
        if self.max_model_len is not None and self.max_model_len != -1:
            _check("max_model_len", self.max_model_len, 1, 2**24)
        _check("seed", self.seed, 0, 2**63 - 1)
        _check("max_logprobs", self.max_logprobs, 0, 20)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "--enable-auto-tool-choice needs --tool-call-parser: say how the model writes calls"
            )


@dataclass(frozen=True)
class CacheSettings:
    """The KV page pool."""

    page_size: int = setting(16, "tokens a page", flag="--block-size")
    gpu_memory_utilization: float = setting(0.92, "share of the free device memory to use, 0 to 1")
    kv_cache_memory_bytes: int | None = setting(None, "bytes of the pool, instead of the share")
    num_gpu_blocks_override: int | None = setting(None, "pages of the pool, instead of both")
    enable_prefix_caching: bool = setting(True, "share pages of equal prefixes")
    cpu_kvcache_space: float = setting(1.0, "GiB of the page pool where there is no GPU")
    swap_space: float = setting(
        0.0,
        "GiB of host memory for pages of preempted sequences and evicted prefixes",
        aliases=("--kv-offloading-size",),
    )

    def __post_init__(self):
        if self.page_size not in PAGE_SIZES:
            raise ConfigError(
                f"--block-size is {self.page_size}, allowed are {', '.join(map(str, PAGE_SIZES))}"
            )
        _check("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        _check("cpu_kvcache_space", self.cpu_kvcache_space, 1e-6, 1e6)
        _check("swap_space", self.swap_space, 0, 1e6)
        if self.kv_cache_memory_bytes is not None:
            _check("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, 2**50)
        if self.num_gpu_blocks_override is not None:
            _check("num_gpu_blocks_override", self.num_gpu_blocks_override, 2, 2**31 - 1)


@dataclass(frozen=True)
class SchedulerSettings:
    """Who computes how much in a step."""

    max_num_seqs: int | None = setting(
        None,
        "running sequences (default: 256 on a GPU, 8 on a CPU)",
        aliases=("--max-seqs-per-batch",),
    )
    max_num_batched_tokens: int | None = setting(
        None, "tokens a step (default: 8192 on a GPU, 256 on a CPU)"
    )
    long_prefill_token_threshold: int = setting(0, "tokens a step that one prompt may take; 0: all")
    max_num_queued_reqs: int | None = setting(None, "waiting requests before new ones get a 503")
    max_num_queued_tokens: int | None = setting(None, "waiting prompt tokens before a 503")
    scheduling_policy: Literal["fcfs", "priority", "fair", "sjf"] = setting(
        "fcfs",
        "who is admitted next and who gives way: first come, the request's priority, fair between "
        "API keys, or fewest prompt tokens to compute",
    )
    priority_mode: Literal["NONE", "FAST_FIRST"] = setting("NONE", "FAST_FIRST is the policy sjf")
    preemption_mode: Literal["auto", "recompute", "swap"] = setting(
        "auto",
        "what becomes of a preempted sequence's KV; auto: to host memory, if there is --swap-space "
        "and it is estimated cheaper than computing it again",
    )
    admission: Literal["auto", "foresee", "evict", "no-evict"] = setting(
        "auto",
        "when a sequence is admitted; foresee: when, as far as lengths can be foretold, pages "
        "suffice until all have ended; evict: when its prompt fits; no-evict: when all of its "
        "max_tokens fit, too; auto: foresee, or evict where --preemption-mode says how to preempt",
    )
    record: str | None = setting(
        None, "file for all that the scheduler is asked, token ids included, for `jaxpaged replay`"
    )
    scheduler_reserve_full_isl: bool = setting(True, "admit a prompt only when all of it fits")
    enable_chunked_prefill: bool = setting(True, "let a prompt take several steps")
    async_scheduling: bool = setting(True, "plan the next step while one runs")
    num_scheduler_steps: int | None = setting(
        None,
        "decode steps that one program takes while nobody waits (default: 8 where a GPU reads the "
        "weights faster than its host starts a program, otherwise 1)",
    )
    speculative_config: dict[str, Any] = setting(
        {},
        'guess tokens and check them, JSON: {"method": "ngram", "num_speculative_tokens": 15}, or '
        '{"model": "DIRECTORY", "num_speculative_tokens": 5} for a draft model',
    )

    @property
    def speculation(self) -> Speculation | None:
        return speculation_from(self.speculative_config)

    def __post_init__(self):
        speculation_from(self.speculative_config)
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
        ):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), 1, 2**24)
        if self.num_scheduler_steps is not None:
            _check("num_scheduler_steps", self.num_scheduler_steps, 1, 64)
        _check("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, 2**24)
        if self.priority_mode == "FAST_FIRST" and self.scheduling_policy not in ("fcfs", "sjf"):
            raise ConfigError(
                f"priority_mode FAST_FIRST is the policy sjf, scheduling_policy is "
                f"{self.scheduling_policy}: give one of them"
            )
        if not self.enable_chunked_prefill:
            raise ConfigError(
                "enable_chunked_prefill cannot be off: a prompt over --max-num-batched-tokens "
                "takes several steps; raise that number for whole prompts"
            )

    @property
    def policy(self) -> Literal["fcfs", "priority", "fair", "sjf"]:
        """The scheduling policy that the two flags name."""
        return "sjf" if self.priority_mode == "FAST_FIRST" else self.scheduling_policy

    @property
    def admission_mode(self) -> Literal["foresee", "evict", "no-evict"]:
        """The mode that is meant: who says how to preempt wants rows at the price of it."""
        if self.admission == "auto":
            return "foresee" if self.preemption_mode == "auto" else "evict"
        return self.admission


@dataclass(frozen=True)
class ParallelSettings:
    """How the model is spread over devices."""

    tensor_parallel_size: int = setting(1, "devices that share each layer", aliases=("-tp",))
    pipeline_parallel_size: int = setting(
        1, "groups of devices that take the layers in order", aliases=("-pp",)
    )
    data_parallel_size: int = setting(
        1, "replicas of the whole, each a process with devices of its own", aliases=("-dp",)
    )
    data_parallel_rank: int = setting(
        0, "number of the (first) replica: the label `engine` of its metrics"
    )
    device_ids: tuple[int, ...] = setting(
        (), "GPUs to use, as JAX numbers them (default: as many of the first as are needed)"
    )

    def __post_init__(self):
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            _check(name, getattr(self, name), 1, MOST_DEVICES)
        _check("data_parallel_rank", self.data_parallel_rank, 0, 2**16)
        self._check_device_ids()

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def replica(self, index: int) -> "ParallelSettings":
        """The settings of one replica: its share of the devices, in their order."""
        num, total = self.num_devices, self.num_devices * self.data_parallel_size
        ids = (self.device_ids or tuple(range(total)))[index * num : (index + 1) * num]
        rank = self.data_parallel_rank + index
        return replace(self, data_parallel_size=1, data_parallel_rank=rank, device_ids=ids)

    def _check_device_ids(self) -> None:
        ids, total = self.device_ids, self.num_devices * self.data_parallel_size
        if not ids:
            return
        for device_id in ids:
            _check("device_ids", device_id, 0, 2**16)
        if len(set(ids)) != len(ids) or len(ids) != total:
            raise ConfigError(
                f"device_ids are {','.join(map(str, ids))}: {total} different ones are needed, for "
                f"tensor {self.tensor_parallel_size} x pipeline {self.pipeline_parallel_size} x "
                f"data parallel {self.data_parallel_size}"
            )


@dataclass(frozen=True)
class CompileSettings:
    """Which programs are compiled, and when."""

    warmup: Literal["auto", "all", "lazy"] = setting(
        "auto",
        "compile all buckets before ready, or each when first met; auto: all on a GPU server",
    )
    compile_cache_dir: str | None = setting(
        None, "where finished programs are kept (default: ~/.cache/jaxpaged; empty: nowhere)"
    )
    batch_buckets: tuple[int, ...] = setting((), "padded rows of decode steps (default: ours)")
    token_buckets: tuple[int, ...] = setting((), "padded tokens of mixed steps (default: ours)")


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine is started with."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    compile: CompileSettings = field(default_factory=CompileSettings)


GROUPS = {
    "model": ModelSettings,
    "cache": CacheSettings,
    "scheduler": SchedulerSettings,
    "parallel": ParallelSettings,
    "compile": CompileSettings,
}


def _check(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}, allowed are {low} to {high}")
