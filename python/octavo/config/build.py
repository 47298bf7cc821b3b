"""Flat option values -> the frozen tree; unknown names, bad values and contradictions are `ConfigError`s."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from octavo import envs
from octavo.config.options import Option, check_value, engine_options, nearest, section_options
from octavo.config.sections import ENGINE_SECTIONS, BenchConfig, EngineConfig, ServerConfig
from octavo.errors import ConfigError
from octavo.speculation import read_speculation

_ORIGIN = re.compile(r"null|[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9._\[\]:-]+|\*")
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]+")


def make_engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """Build the tree from flat option names. Unknown, badly typed or contradictory values raise `ConfigError`."""
    options = {o.name: o for o in engine_options()}
    sections: dict[str, dict[str, Any]] = {name: {} for name in ENGINE_SECTIONS}
    for name, value in values.items():
        opt = options.get(name)
        if opt is None:
            raise ConfigError(f"unknown option {name!r}{nearest(name, list(options))}", name)
        value = _plain(opt, value)
        check_value(opt, value)
        sections[opt.section][name] = value
    config = EngineConfig(**{name: ENGINE_SECTIONS[name](**kw) for name, kw in sections.items()})
    _check_engine(config)
    return config


def _plain(opt: Option, value: Any) -> Any:
    """A value that Python has another type for, as the command line would give it: a path, an object in place of JSON,
    an integer of NumPy."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and opt.name in ("model", "tokenizer") and value.startswith("~"):
        return os.path.expanduser(value)
    if isinstance(value, Mapping) and opt.type is str:
        return json.dumps(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _check_values(section: str, values: Mapping[str, Any]) -> None:
    options = {o.name: o for o in section_options(section)}
    for name, value in values.items():
        if name not in options:
            raise ConfigError(f"unknown option {name!r}{nearest(name, list(options))}", name)
        check_value(options[name], value)


def make_bench_config(values: Mapping[str, Any]) -> BenchConfig:
    """The same for the options of `octavo bench`."""
    _check_values("bench", values)
    return BenchConfig(**values)


def make_server_config(values: Mapping[str, Any]) -> ServerConfig:
    """The same for the server's own options."""
    _check_values("server", values)
    level = envs.log_level()
    config = ServerConfig(**{**({} if level is None else {"log_level": level}), **values})
    _check_server(config)
    return config


def _check_server(config: ServerConfig) -> None:
    if config.log_prompts and not config.log_requests:
        raise ConfigError("--log-prompts needs --log-requests: prompts are part of those lines", "log_prompts")
    no_origin = next((one for one in config.allowed_origins if not _ORIGIN.fullmatch(one)), None)
    if no_origin is not None:
        raise ConfigError(
            f"--allowed-origins: {no_origin!r} is no origin: give SCHEME://HOST[:PORT], such as https://chat.example.com",
            "allowed_origins",
        )
    if config.admin_port is not None and config.admin_port == config.port != 0:
        raise ConfigError(f"--admin-port and --port are both {config.port}", "admin_port")


def _check_engine(config: EngineConfig) -> None:
    """Contradictions between options."""
    length = config.model.max_model_len
    if isinstance(length, str) and length != "auto":
        raise ConfigError(f"--max-model-len: {length!r} is neither a number nor auto", "max_model_len")
    cache, execution = config.cache, config.execution
    if cache.num_gpu_blocks_override is not None and cache.kv_cache_memory_bytes is not None:
        raise ConfigError(
            "--num-gpu-blocks-override and --kv-cache-memory-bytes both set the size of the cache: give one",
            "num_gpu_blocks_override",
        )
    if config.parallel.tensor_parallel_size > 1:
        raise ConfigError(
            f"--tensor-parallel-size {config.parallel.tensor_parallel_size}: this version runs on one device; use 1",
            "tensor_parallel_size",
        )
    if execution.attention_backend == "cpu" and execution.device == "cuda":
        raise ConfigError("--attention-backend cpu contradicts --device cuda", "attention_backend")
    if any(size < 1 for size in execution.cuda_graph_sizes):
        raise ConfigError("--cuda-graph-sizes: sizes must be at least 1", "cuda_graph_sizes")
    for name in ("fp8_wide_attention", "fp8_wide_mlp"):
        wide: list[int] = getattr(config.model, name)
        if len(wide) != 2 or min(wide) < 0:
            flag = f"--{name.replace('_', '-')}"
            given = ",".join(map(str, wide))
            raise ConfigError(f"{flag} {given}: needs two numbers, of first and of last blocks", name)
    read_speculation(config.scheduler.speculative_config)
    no_host = next((host for host in config.media.allowed_media_domains if not _HOST.fullmatch(host)), None)
    if no_host is not None:
        raise ConfigError(
            f"--allowed-media-domains: {no_host!r} is no host: give the name alone, such as images.example.com",
            "allowed_media_domains",
        )
