"""Which runner `--runner auto` means: the embedded decoder where steps run on the CPU and it has the model, else torch;
and the memory plan of the one that is chosen.

No torch here: a machine without a GPU shall not wait for its import.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.protocol import Progress, unwatched
from octavo.worker.device import may_have_cuda
from octavo.worker.embedded_plan import contradiction, find_model, make_plan

if TYPE_CHECKING:
    from octavo.worker.memory import MemoryPlan

logger = logging.getLogger(__name__)


def choose_plan(config: EngineConfig) -> MemoryPlan:
    """The memory plan of the runner that would load the model. Reads no weights. Errors: ConfigError, ModelError."""
    runner = config.execution.runner
    if runner == "auto":
        runner = choose_runner(config, unwatched)
    if runner == "embedded":
        return make_plan(config, find_model(config, unwatched)).memory
    from octavo.worker import memory

    return memory.make_plan(config)


def choose_runner(config: EngineConfig, progress: Progress) -> str:
    """A name of `RUNNERS`. Says in the log why a CPU runs torch. Errors: ModelError when there is no model."""
    if config.execution.device == "cuda" or (config.execution.device == "auto" and may_have_cuda()):
        return "torch"
    reason = contradiction(config) or find_model(config, progress).obstacle
    if reason is None:
        return "embedded"
    logger.info("steps run with PyTorch, not in the embedded decoder: %s", reason)
    return "torch"
