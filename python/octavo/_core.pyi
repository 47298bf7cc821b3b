"""The Rust extension. Hand-written; tests/run checks it against the module with stubtest."""

from collections.abc import Sequence
from typing import Any, final

from typing_extensions import Buffer

from octavo.speculation import Speculation

__version__: str

# --- control plane (rust/core) -------------------------------------------------------------------------------------

@final
class CoreConfig:
    """Limits and policy of the scheduler; resolved by octavo.config (engine/build.py says all of it). What is left out is
    off or without limits."""

    def __new__(
        cls,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        max_queued_requests: int = 1073741824,
        max_queued_tokens: int = 1125899906842624,
        policy: str = "fcfs",
        enable_prefix_caching: bool = False,
        long_prefill_token_threshold: int = 0,
        max_itl_ms: float | None = ...,
        depth: int = 1,
        max_logprobs: int = 0,
        hash_seed: int = 1,
        speculation: Speculation | None = None,
        groups: Sequence[tuple[str, int]] | None = None,
        step_sizes: Sequence[int] | None = None,
        plans_late: bool = False,
        output_bytes: tuple[int, int] | None = None,
    ) -> CoreConfig:
        """`groups`: what the layers of each cache group read again: ("all", 0), a ("window", tokens) before, or a
        ("chunk", tokens) from the last border on, or a ("state", 0) of one position a block, overwritten until the
        block's last; None: all of them all. `step_sizes`: tokens that steps with prompts are padded to; longer ones
        are not. `plans_late`: `step` may sleep before it plans, while the device is busy, so that whoever comes
        meanwhile is in the plan; launching a step must not wait for the device then. `output_bytes`: of what an
        encoder makes for a position of an image, and of a block; blocks keep that then, while nobody else needs
        them."""
    @property
    def num_positions(self) -> int:
        """Positions that one sequence can have when all blocks are its own."""

@final
class ArenaLayout:
    """Fixed offsets (in int32) of the step arena's regions; see rust/core/src/arena.rs."""

    num_ints: int
    max_rows: int
    max_tokens: int
    max_block_updates: int
    max_block_copies: int
    max_new_rows: int
    num_groups: int
    """Slots and indices of block updates are those of one table [num_groups * (max_rows + 1), blocks]."""
    header: int
    row_slot: int
    query_start: int
    kv_len: int
    new_row: int
    block_copy: int
    block_update: int
    token_id: int
    position: int
    """Of each row: how many of its last tokens are drafted. It is sampled behind each of them too, up to the first that is
    not what was sampled."""
    num_drafted: int

@final
class OutputLayout:
    """Fixed offsets (in int32) of the output arena: sampled [R, S], count [R], rank [R, S], then logprob ids and
    values [R, S, 1 + max_logprobs] (values are float32 bits)."""

    num_ints: int
    max_rows: int
    max_sampled: int
    max_logprobs: int
    sampled: int
    count: int
    rank: int
    logprob_id: int
    logprob_value: int

@final
class NewRow:
    """A sequence that got its slot in this step: everything that the worker must know of it."""

    slot: int
    """Sampling parameters as `SamplingParams.to_wire` wrote them."""
    params: bytes
    """Which of the request's n sequences."""
    index: int
    """int32 little-endian: prompt, then what was generated before a preemption."""
    token_ids: bytes
    num_prompt_tokens: int
    """As `encode_add` got it."""
    media_data: bytes

@final
class PromptLogprobRow:
    """A row whose prompt tokens' logprobs are wanted: hidden rows [token_start, token_start + num_tokens) of the step
    predict prompt positions position + 1 ..; only the targets inside the prompt are given (target_ids)."""

    row: int
    slot: int
    token_start: int
    num_tokens: int
    num_top: int
    """int32 little-endian, one a token."""
    target_ids: bytes

@final
class PlacedOutputs:
    """Where an encoder's outputs for an image are that a row reads."""

    digest: bytes
    """16 bytes, little-endian."""
    blocks: list[int]
    is_filled: bool
    """They are there; else this step makes them and puts them there."""

@final
class StepPlan:
    """What to run in one step; the arrays are already in `arena`."""

    step_id: int
    arena: int
    num_rows: int
    num_decode_rows: int
    num_sampled: int
    num_tokens: int
    max_query_len: int
    max_kv_len: int
    num_block_updates: int
    num_block_copies: int
    num_new_rows: int
    """Of all rows."""
    num_draft_tokens: int
    """Some sampled row asked for logprobs."""
    needs_logprobs: bool
    new_rows: list[NewRow]
    prompt_logprob_rows: list[PromptLogprobRow]
    outputs: list[PlacedOutputs]
    """Of images that rows reach; the step makes those of others itself."""
    """Calls wait in `Core.take_calls`."""
    has_calls: bool
    """Sampled rows are constrained: `Core.fill_masks` comes between launching and sampling."""
    needs_masks: bool

@final
class Core:
    """The control plane of one engine. Not thread-safe but for `add`, `wait` and `close`."""

    arena_layout: ArenaLayout
    output_layout: OutputLayout

    def __new__(cls, config: CoreConfig) -> Core: ...
    def register(self, arenas: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        """Hand over int32 host buffers, at least depth + 1 of each; kept alive by the Core. ValueError on wrong sizes."""
    def step(self, output: int | None) -> StepPlan:
        """Commit the oldest step in flight from outputs[output] (None: nothing to commit) and plan the next one.

        A plan with num_rows 0 is not in flight and must not be launched.
        """
    mask_words: int
    """Words of 32 tokens that a mask has."""

    def register_masks(self, masks: Buffer) -> None:
        """Hand over an int32 host buffer [max_num_seqs, max_sampled, mask_words]; kept alive by the Core. ValueError on a wrong size."""
    def fill_masks(self, outputs: Sequence[int]) -> None:
        """Write which tokens the sampled rows of the newest planned step may get, one row of words a slot (bit i % 32 of
        word i // 32: token i). `outputs`: output arenas of the steps in flight before it, the oldest first. Parallel,
        without the GIL."""
    def use_tokenizer(self, path: str, eos_token_ids: Sequence[int]) -> None:
        """Serve constrained requests from now on. The tokenizer.json is read in the background when `wait` finds the
        engine idle, or when the first one comes."""
    def put_prompt_logprobs(self, slot: int, ids: Buffer, values: Buffer, ranks: Buffer) -> None:
        """Append prompt logprobs of a row: ids int32 [T, 1+k] (target first), values float32 [T, 1+k], ranks int32 [T]."""
    def add(self, frame: bytes) -> None:
        """A client frame (encode_*) of the in-process client."""
    def take_frames(self) -> list[bytes]:
        """Outbound frames of the in-process client since the last call."""
    def has_work(self) -> bool:
        """Requests run or wait, or the inbox is not empty."""
    def wait(self, timeout_s: float) -> bool:
        """Sleep without the GIL until the inbox is not empty; False on timeout."""
    def take_calls(self) -> list[tuple[int, int, bytes]]:
        """(client, call_id, body) of the calls received."""
    def reply(self, client: int, call_id: int, body: bytes) -> None: ...
    def drain(self) -> None:
        """Refuse requests from now on; those that run or wait go on."""
    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False when some are in use (those stay)."""
    def stats(self) -> dict[str, int]: ...
    def check(self) -> None:
        """Verify every invariant of blocks and sequences; RuntimeError names the broken one. For tests: O(blocks)."""
    def dump(self) -> str:
        """State and the last plan, for a crash report."""
    def serve(self, path: str, hello: bytes) -> None:
        """Listen on a unix socket; a Rust thread moves frames between it and the Core. OSError when it can't bind."""
    def close(self) -> None:
        """Stop the IO thread and remove the socket."""

# --- embedded decoder (rust/cpu) ------------------------------------------------------------------------------------

@final
class EmbeddedDecoder:
    """A decoder that runs in Rust: weights are loaded one by one (packed by `num_threads`), then `build`,
    `register`, then steps."""

    def __new__(cls, num_threads: int = 1) -> EmbeddedDecoder: ...
    def load_matrix(
        self, layer: int, role: str, format: str, data: Buffer, n: int, k: int, *, keep: str | None = None
    ) -> None:
        """A matrix [n, k] in a format of GGUF, kept so or, if it is one of floats or `keep` is F32, in the format `keep`.
        ValueError: unknown format, wrong size."""
    def load_vector(self, layer: int, role: str, data: Buffer) -> None:
        """float32."""
    def build(
        self,
        description: object,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        max_length: int,
        max_tokens: int,
        cache_dtype: str,
        num_threads: int,
        cpus: Sequence[int] | None = None,
        layer_groups: Sequence[int] | None = None,
    ) -> None:
        """`description` has the attributes of octavo.models.description.Description; `cpus`: a processor for each thread to
        be kept on (but for the caller's, the first); `layer_groups`: each layer's cache group, None: all are in the
        first. ValueError: weights are missing or do not fit."""
    def weight_bytes(self) -> int:
        """Of packed matrices."""
    def register(
        self,
        arenas: Sequence[Buffer],
        outputs: Sequence[Buffer],
        layout: ArenaLayout,
        output_layout: OutputLayout,
        masks: Buffer,
        mask_words: int,
    ) -> None:
        """The same buffers as the Core's. ValueError on wrong sizes."""
    def admit(self, row: NewRow, sampling: object) -> None:
        """`sampling` has the attributes of octavo.worker.embedded.RowSampling."""
    def forward(self, plan: StepPlan) -> None:
        """Run a step's tokens through the layers, the last one for those that are sampled or scored behind. RuntimeError
        when the arena breaks the contract."""
    def forward_lists(
        self,
        *,
        row_slot: Sequence[int],
        query_start: Sequence[int],
        kv_len: Sequence[int],
        token_id: Sequence[int],
        position: Sequence[int],
        block_updates: Sequence[int],
        num_drafted: Sequence[int] | None = None,
    ) -> None:
        """The same for all tokens of a step given as lists, without arenas: for tests and comparisons."""
    def sample(self, plan: StepPlan) -> None:
        """Choose the tokens of the sampled rows, as far as drafts are right, into the step's output arena."""
    def score(self, start: int, targets: bytes, num_top: int) -> tuple[bytes, bytes, bytes]:
        """Logprobs of int32 targets behind the last step's tokens from `start` on: ids and values [t, 1 + top], ranks."""
    def logits(self) -> bytes:
        """float32 [t, vocab_size] of the last step's tokens that passed the last layer: for tests and comparisons."""

# --- frames (rust/core/src/frames.rs) ------------------------------------------------------------------------------
# Every frame is u32 little-endian length, then the body; the functions below return and take bodies.

def encode_add(
    *,
    request_id: int,
    prompt_token_ids: Sequence[int],
    n: int,
    max_tokens: int,
    min_tokens: int,
    stop_token_ids: Sequence[int],
    priority: int,
    cache_salt: bytes,
    deadline_s: float,
    logprobs: int,
    prompt_logprobs: int,
    params: bytes,
    tenant: int = 0,
    weight: int = 1000,
    grammar: bytes | None = None,
    media: Sequence[tuple[int, int, int, bool]] = ...,
    media_data: bytes | None = None,
) -> bytes:
    """`media`: (start, length, 128-bit digest, whether it must be computed in one step) of each image in the prompt;
    `media_data` goes to the worker as it is."""

def encode_abort(request_id: int, index: int | None = None) -> bytes: ...
def encode_call(call_id: int, body: bytes) -> bytes: ...

# --- text (rust/core/src/tokenizer.rs, detokenizer.rs, stop.rs) ----------------------------------------------------

@final
class Tokenizer:
    """A tokenizer.json, run by the `tokenizers` crate without the GIL."""

    vocab_size: int
    """The highest id plus one."""
    @staticmethod
    def from_file(path: str) -> Tokenizer: ...
    @staticmethod
    def from_json(body: bytes) -> Tokenizer: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...
    def id_to_token(self, token_id: int) -> str | None: ...
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for (half characters included); b"" for an unknown id."""
    def special_token_ids(self) -> list[int]: ...

@final
class EngineStats:
    num_steps: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_finished: int
    num_aborted: int
    num_refused: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int

@final
class Delta:
    """What one sequence gained: text that is safe to show, and ids. Text may lag behind ids (half characters,
    possible stop strings); the last delta (finish_reason set) flushes it."""

    request_id: int
    index: int
    text: str
    token_ids: list[int]
    """One a token: (rank, [(token_id, logprob), …]) with the token itself first; None when not asked for."""
    logprobs: list[tuple[int, list[tuple[int, float]]]] | None
    """One per prompt token but the first, like logprobs; on the first delta of a request that asked."""
    prompt_logprobs: list[tuple[int, list[tuple[int, float]]]] | None
    finish_reason: str | None
    """The stop string or stop token id; None for EOS, length, abort."""
    stop_reason: int | str | None
    num_cached_tokens: int | None
    queue_s: float | None
    """A stop string ended this sequence here: the engine must be told (encode_abort(request_id, index))."""
    must_abort: bool

@final
class Refusal:
    request_id: int
    """"invalid", "queue_full", "deadline" or "draining"."""
    kind: str
    message: str
    retry_after_s: float

@final
class Frame:
    """A decoded engine frame; `kind` is "hello", "output" or "reply" and says which fields are filled."""

    kind: str
    body: bytes
    call_id: int
    stats: EngineStats | None
    deltas: list[Delta]
    refusals: list[Refusal]

@final
class OutputProcessor:
    """Turns engine frames into text, one call a frame: incremental detokenization and stop strings.

    A request is forgotten by itself when its last sequence ends or when it is refused.
    """

    def __new__(cls, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> OutputProcessor: ...
    def add(
        self,
        request_id: int,
        *,
        n: int,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str],
        include_stop_str_in_output: bool,
        skip_special_tokens: bool,
        detokenize: bool,
        min_tokens: int = 0,
    ) -> None:
        """Get ready for a request. A stop string that is complete before `min_tokens` tokens doesn't count."""
    def process(self, body: bytes) -> Frame:
        """Decode one frame body. Outputs of unknown (removed) requests are dropped. ValueError on a malformed frame."""
    def remove(self, request_id: int) -> None: ...
    def __len__(self) -> int: ...

# --- CPU kernels (rust/cpu) ----------------------------------------------------------------------------------------

def cpu_features() -> list[str]:
    """Instruction sets that the kernels may use here, best first."""

def cpu_restrict(name: str) -> None:
    """Have all kernels of the process use one of `cpu_features`, before the first runs. ValueError where it is none, or
    another was chosen."""

def cpu_limits(num_threads: int) -> tuple[float, float, float]:
    """(bytes read, int8 multiply-adds, f32 multiply-adds) a second of so many threads, measured in half a second."""

def cpu_paged_attention(
    *,
    q: int,
    q_stride: int,
    kv_cache: int,
    out: int,
    dtype: str,
    row_slot: int,
    query_start: int,
    kv_len: int,
    block_table: int,
    num_rows: int,
    num_tokens: int,
    num_slots: int,
    max_blocks_per_slot: int,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    soft_cap: float,
    num_threads: int,
) -> None:
    """Attention of every row over its paged KV (see octavo.kernels.reference.paged_attention); pointers are addresses,
    strides count elements between tokens. ValueError when a size is impossible or an index read from the arrays is out
    of range; `out` is then unchanged."""

def cpu_write_kv(
    *,
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    kv_cache: int,
    dtype: str,
    slot_mapping: int,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Store K and V of every token at its place (see octavo.kernels.reference.kv_write). Errors: as above."""

def __getattr__(name: str) -> Any: ...
