"""The one config tree: what options there are (sections.py), read as data (options.py), built from values (build.py),
and shown (table.py). Resolved once, logged once, handed down in slices."""

from octavo.config.build import make_bench_config, make_engine_config, make_server_config
from octavo.config.options import Option, changed, check_value, engine_options, nearest, section_options
from octavo.config.sections import (
    ENGINE_SECTIONS,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    WIDE_ATTENTION,
    WIDE_MLP,
    BenchConfig,
    CacheConfig,
    EngineConfig,
    ExecutionConfig,
    MediaConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)

__all__ = [
    "ENGINE_SECTIONS",
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "WIDE_ATTENTION",
    "WIDE_MLP",
    "BenchConfig",
    "CacheConfig",
    "EngineConfig",
    "ExecutionConfig",
    "MediaConfig",
    "ModelConfig",
    "Option",
    "ParallelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "changed",
    "check_value",
    "engine_options",
    "make_bench_config",
    "make_engine_config",
    "make_server_config",
    "nearest",
    "section_options",
]
