"""The checks of gpu_check.py, where there is a GPU."""

from __future__ import annotations

import gpu_check
import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_on_the_device() -> None:
    errors = gpu_check.check_all()
    assert not {name: error for name, error in errors.items() if not error <= gpu_check.RELATIVE_ERROR}
