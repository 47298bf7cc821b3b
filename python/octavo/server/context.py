"""What all routes share: the engine, the names it is served under, prompts, metrics, and the calls in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from octavo import envs
from octavo.chat_template import ChatTemplate
from octavo.config import ServerConfig
from octavo.errors import ConfigError, ModelError, RequestError
from octavo.pooling.inputs import InputEncoder
from octavo.prompts import PromptEncoder
from octavo.protocol import ModelFacts, PoolingFacts
from octavo.server.dialect import Dialect
from octavo.server.errors import ApiError, UnavailableError
from octavo.server.live_calls import LiveCalls
from octavo.server.logprobs import TokenNames
from octavo.server.mcp.servers import ToolServers
from octavo.server.metrics import ServerMetrics
from octavo.server.overload import Overload
from octavo.server.pulse import Pulse
from octavo.server.report import Reporter
from octavo.server.responses.store import ResponseStore
from octavo.server.settings import Settings
from octavo.server.tenants import caller
from octavo.server.tenants.keyring import Keyring
from octavo.server.tracing import Tracer

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

T = TypeVar("T")

# Bodies above this many bytes are rendered and tokenized in a thread, so that streams don't wait for them.
INLINE_BYTES = 4096
# So are small ones while the last small one took longer: a model's template may loop.
INLINE_S = 0.02
MAX_TEMPLATE_CHARS = 64 * 1024
_STATES = {
    "starting": "the model is being loaded",
    "restarting": "the engine ended unexpectedly and is being restarted",
    "dead": "the engine is dead",
    "draining": "the server is shutting down",
}
_DOES = {
    "generate": "generates text",
    "embed": "makes embeddings",
    "score": "scores pairs of texts",
    "classify": "classifies texts",
}


class ServerContext:
    """State of one server; lives as long as its app."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm = llm
        self.config = config
        self.created = int(time.time())
        if config.chat_template is not None:  # it is read again with the tokenizer: this finds mistakes before it loads
            try:
                ChatTemplate.from_folder(None, config.chat_template)
            except ModelError as error:
                raise ConfigError(f"--chat-template: {error}", "chat_template") from None
        keys = config.api_key or [key for key in [envs.api_key()] if key]
        self.keyring = Keyring(keys, config.api_keys_file)
        self.draining = False
        self.ending = False
        """The drain is one that ends with the server."""
        self.live = LiveCalls()
        self.metrics = ServerMetrics(lambda: self.names[0] if self.names else None, llm, self.keyring.all)
        self.settings = Settings.of(config)
        endpoint = config.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer.to_endpoint(endpoint)
        self.reporter = Reporter(lambda: self.settings, self.tracer)
        self.overload = Overload(llm)
        self.pulse = Pulse(llm)
        self.tool_servers = ToolServers(config.tool_server, config.tool_timeout_s)
        self.responses = ResponseStore(config.responses_store, config.responses_store_bytes)
        self._pool = ThreadPoolExecutor(2, "octavo-text")
        self._encoder: PromptEncoder | None = None
        self._input_encoder: InputEncoder | None = None
        self._dialect: Dialect | None = None
        self._token_names: TokenNames | None = None
        self._small_text_s = INLINE_S  # nothing is known of the template yet

    @classmethod
    def of(cls, request: Request) -> ServerContext:
        """The context of the app that got the request."""
        context = request.app.state.context
        assert isinstance(context, cls)
        return context

    @property
    def names(self) -> list[str]:
        """Names of the model, the first one leads; empty while the engine has not said what it loaded."""
        if self.config.served_model_name:
            return list(self.config.served_model_name)
        facts = self.llm.facts
        return [facts.model] if facts is not None else []

    def check_ready(self) -> None:
        """Raise `UnavailableError` unless requests can be taken."""
        state = self.state
        if state != "ready":
            raise UnavailableError(_STATES[state])

    def check_engine(self) -> None:
        """Raise `UnavailableError` unless the engine can be asked something; it can while the server drains."""
        if self.llm.state not in ("ready", "draining"):
            raise UnavailableError(_STATES[self.llm.state])

    @property
    def state(self) -> str:
        """ "starting", "ready", "restarting", "dead" or "draining"."""
        return "draining" if self.draining else self.llm.state

    def check_model(self, name: str | None) -> str:
        """The name to answer with; 404 for a name that is not served."""
        if not name:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist here; served: {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    @property
    def facts(self) -> ModelFacts:
        """Only after `check_ready`."""
        facts = self.llm.facts
        assert facts is not None
        return facts

    @property
    def encoder(self) -> PromptEncoder:
        """Only after the engine was ready once. Errors: ConfigError and ModelError of the chat template."""
        if self._encoder is None:
            facts = self.facts
            template = ChatTemplate.from_folder(facts.tokenizer_path, self.config.chat_template)
            self._encoder = PromptEncoder(self.llm.tokenizer, template, facts.tokenizer_path, facts.max_model_len)
        return self._encoder

    def check_task(self, *tasks: str) -> None:
        """`check_ready`, and 400 unless the model does one of these tasks ("generate", "embed", …)."""
        self.check_ready()
        task = self.facts.task
        if task not in tasks:
            raise ApiError(
                400,
                f"this route needs a model that {' or '.join(_DOES[each] for each in tasks)}; "
                f"{self.names[0]} is served as one that {_DOES[task]} (--task {task})",
                param="model",
                code="wrong_task",
            )

    @property
    def pooling(self) -> PoolingFacts:
        """Only after `check_task` of a task that is not "generate"."""
        pooling = self.facts.pooling
        assert pooling is not None
        return pooling

    def warm_inputs(self) -> None:
        """Load the tokenizer of `input_encoder` before the first request needs it."""
        if self.facts.tokenizer_path is not None:
            self._input_encoder = InputEncoder(self.facts)

    @property
    def input_encoder(self) -> InputEncoder:
        """Likewise."""
        if self._input_encoder is None:
            self._input_encoder = InputEncoder(self.facts)
        return self._input_encoder

    @property
    def dialect(self) -> Dialect:
        """How the model writes reasoning and calls; only after the engine was ready once."""
        if self._dialect is None:
            self._dialect = Dialect.of(self.config, self.encoder.template, self.llm.tokenizer)
        return self._dialect

    def encoder_of(self, chat_template: str | None) -> PromptEncoder:
        """The encoder with a request's own template, where that is allowed. `RequestError` when it is not, or when the
        template is broken. To be called in a thread when there is a template."""
        if chat_template is None:
            return self.encoder
        if not self.config.trust_request_chat_template:
            message = "chat_template in a request is not allowed: start the server with --chat-template, or with "
            raise RequestError(f"{message}--trust-request-chat-template", "chat_template", "unsupported")
        if len(chat_template) > MAX_TEMPLATE_CHARS:
            raise RequestError(f"chat_template has more than {MAX_TEMPLATE_CHARS} characters", "chat_template")
        try:
            template = ChatTemplate(chat_template, self.encoder.template.special_tokens)
        except (ModelError, RecursionError) as error:
            raise RequestError(str(error) or "chat_template is nested too deeply", "chat_template") from None
        return self.encoder.with_template(template)

    @property
    def token_names(self) -> TokenNames:
        if self._token_names is None:
            self._token_names = TokenNames(self.llm.tokenizer)
        return self._token_names

    async def admit_text(self, work: Callable[..., T], *args: Any, size_bytes: int) -> T:
        """`run_text` for a call that waits in the engine's queue. `OverloadError`, and no work, when it is full."""
        self.overload.check(caller.current(), size_bytes)
        return await self.run_text(work, *args, size_bytes=size_bytes)

    async def run_text(self, work: Callable[..., T], *args: Any, size_bytes: int, is_slow: bool = False) -> T:
        """Run text work of a size: here when it is small, in a thread when it would hold up other requests."""
        if size_bytes > INLINE_BYTES or is_slow:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
        if self._small_text_s < INLINE_S:
            return self._run_small_text(work, *args)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._run_small_text, work, *args)

    def _run_small_text(self, work: Callable[..., T], *args: Any) -> T:
        start_s = time.thread_time()  # what others do meanwhile is not this text's fault
        try:
            return work(*args)
        finally:
            self._small_text_s = time.thread_time() - start_s

    async def drain(self, timeout_s: float) -> int:
        """Admit nothing more and wait for the calls in flight, then cut those that are left; how many those were."""
        self.draining = self.ending = True
        await self.live.wait(timeout_s)
        return self.live.cut_all(UnavailableError("the server shut down before this request was finished"))

    def abort(self, request_id: str) -> int:
        """End calls by their id, or that of their answer; how many."""
        message = "the request was ended by an operator"
        return self.live.cut_one(request_id, ApiError(503, message, kind="service_unavailable", code="aborted"))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.tracer is not None:
            self.tracer.close()
