"""The start of `octavo serve`: takes the addresses, sends the engine's process on its way, and only then imports the
server, which takes a second on some machines.

Not here: serving (service.py).
"""

from __future__ import annotations

import logging
import sys

from octavo import envs, logs
from octavo.config import EngineConfig, ServerConfig, changed
from octavo.engine.spawn import EngineProcess
from octavo.errors import ConfigError, OctavoError
from octavo.server import early_signals
from octavo.server.listening import listen_as_asked

log = logging.getLogger("octavo.server")

NEEDED_BY = {
    "batch_dir": ("batch_concurrency", "batch_max_requests", "batch_max_file_bytes", "batch_storage_bytes"),
    "responses_store": ("responses_store_bytes",),
    "tool_server": ("tool_timeout_s", "tool_loop_timeout_s", "max_tool_turns"),
}
"""Options, and those that say more about them."""


def check_admin(config: ServerConfig) -> None:
    """ConfigError for options of the /admin routes when there are none."""
    if (config.admin_key or envs.admin_key()) is not None:
        return
    for flag, value in (("--admin-port", config.admin_port), ("--profile-dir", config.profile_dir)):
        if value is not None:
            raise ConfigError(f"{flag} needs --admin-key (or OCTAVO_ADMIN_KEY)", flag[2:].replace("-", "_"))


def check_needs(config: ServerConfig) -> None:
    """Warn of options that do nothing without another one."""
    given = changed(config)
    for needed, names in NEEDED_BY.items():
        for name in names:
            if name in given and needed not in given:
                log.warning("--%s does nothing without --%s", name.replace("_", "-"), needed.replace("_", "-"))


def run(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Serve; the exit code. Problems of starting are one line on stderr."""
    logs.configure(config.log_level.upper(), config.log_format)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(config.log_level.upper())))
    try:
        return _run(engine_config, config)
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return error.exit_code


def _run(engine_config: EngineConfig, config: ServerConfig) -> int:
    check_admin(config)
    check_needs(config)
    listener = listen_as_asked(config.host, config.port, "--port")
    admin_listener = None
    if config.admin_port is not None:
        admin_listener = listen_as_asked(config.host, config.admin_port, "--admin-port")
    with early_signals.held():
        process = EngineProcess(engine_config)
        try:
            from octavo.server import service

            return service.run(service.Service(engine_config, config, listener, admin_listener, process))
        finally:
            process.end()
