"""Which runner `--runner auto` means: the embedded decoder where steps run on the CPU and it has the model, else torch.

No torch here: a machine without a GPU shall not wait for its import.
"""

from __future__ import annotations

import logging

from octavo.config import EngineConfig
from octavo.worker.base import Progress
from octavo.worker.device import may_have_cuda
from octavo.worker.embedded_plan import contradiction, find_model

logger = logging.getLogger(__name__)


def choose_runner(config: EngineConfig, progress: Progress) -> str:
    """A name of `RUNNERS`. Says in the log why a CPU runs torch. Errors: ModelError when there is no model."""
    if config.execution.device == "cuda" or (config.execution.device == "auto" and may_have_cuda()):
        return "torch"
    reason = contradiction(config) or find_model(config, progress).obstacle
    if reason is None:
        return "embedded"
    logger.info("steps run with PyTorch, not in the embedded decoder: %s", reason)
    return "torch"
