"""Starts the runner that executes with PyTorch. What takes long and needs no torch begins before torch is imported,
which takes seconds itself.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.config import EngineConfig
from octavo.models.sources import resolve_source
from octavo.protocol import Progress
from octavo.speculation import without_drafts
from octavo.worker import kernel_build
from octavo.worker.base import Runner
from octavo.worker.cuda_context import start_context


def start_runner(config: EngineConfig, progress: Progress) -> Runner:
    """See `octavo.worker.base.make_runner`."""
    progress("config", 0.0)
    drafts = without_drafts(config.scheduler.speculative_config, "--runner torch")
    config = replace(config, scheduler=replace(config.scheduler, speculative_config=drafts))
    source = resolve_source(config.model, progress)
    kernels = kernel_build.start(config, source.raw_config)
    if config.execution.device != "cpu":
        start_context()  # the build, which asks the driver too, is on its way
    progress("imports", 0.0)
    try:
        from octavo.worker.runner import TorchRunner  # imports torch

        return TorchRunner(config, progress, source, kernels)
    except BaseException:
        kernels.close()
        raise
