"""The seam between the engine loop and whatever executes a step.

`EngineLoop` knows only this protocol; `--runner` picks the implementation from `RUNNERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from octavo.config import EngineConfig
from octavo.protocol import ModelFacts, Progress

if TYPE_CHECKING:
    from octavo._core import Core, StepPlan


class Runner(Protocol):
    """Executes plans, without policy. Construction loads the model and sizes the cache; nothing else is slow."""

    config: EngineConfig
    """As given, with every value resolved that depends on the model or the device."""
    facts: ModelFacts
    chores: Iterator[str]
    """What makes later steps quicker and can be done while the engine is idle, one piece (named) at a time."""

    def attach(self, core: Core) -> None:
        """Allocate arenas by the core's layouts, and a mask a slot (int32, `core.mask_words` words), and register them.
        Once, before the first launch."""

    def launch(self, plan: StepPlan) -> None:
        """Upload the plan's arena and start the forward pass; does not wait for the device."""

    def sample(self, plan: StepPlan) -> None:
        """Start sampling and the copy of the results to the host; does not wait for the device.

        Where `plan.needs_masks`, the masks of the sampled rows' slots are filled: bit i % 32 of word i // 32 says
        whether token i may be sampled (every bit is set for rows without a grammar).
        """

    def result(self, plan: StepPlan) -> int:
        """Wait for a step's results; the index of the output arena that holds them (valid until `depth` more steps)."""

    def close(self) -> None:
        """Release the device."""


RUNNERS = {
    "torch": "octavo.worker.torch_start:start_runner",
    "embedded": "octavo.worker.embedded:EmbeddedRunner",
    "fake": "octavo.worker.fake:FakeRunner",
}


def make_runner(config: EngineConfig, progress: Progress) -> Runner:
    """Build the runner that `config.execution.runner` names; where that is "auto", the runner's config says which it
    is. Errors: ConfigError, ModelError."""
    name = config.execution.runner
    if name == "auto":
        from octavo.worker.choice import choose_runner

        name = choose_runner(config, progress)
    module, attribute = RUNNERS[name].split(":")
    factory: Callable[[EngineConfig, Progress], Runner] = getattr(import_module(module), attribute)
    return factory(replace(config, execution=replace(config.execution, runner=name)), progress)
