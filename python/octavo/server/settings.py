"""What may be changed while the server runs (PATCH /admin/settings); everything else is fixed at the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from octavo.config import ServerConfig, check_value, section_options
from octavo.errors import RequestError


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of `ServerConfig` by the same names."""

    log_level: str
    log_requests: bool
    log_prompts: bool
    drain_timeout_s: float

    @classmethod
    def of(cls, config: ServerConfig) -> Settings:
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def changed(self, values: Mapping[str, Any]) -> Settings:
        """With new values. RequestError for an unknown name, ConfigError for an impossible value."""
        options = {option.name: option for option in section_options("server")}
        known = [field.name for field in fields(self)]
        for name, value in values.items():
            if name not in known:
                raise RequestError(f"{name[:64]} can't be changed at run time; what can: {', '.join(known)}", name[:64])
            check_value(options[name], value, name)
        return replace(self, **values)
