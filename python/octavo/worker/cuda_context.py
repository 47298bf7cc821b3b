"""Has the CUDA driver make the context of the first device while torch is being imported, which takes seconds: torch
uses the same one. Without a driver or a device nothing happens; torch tells what is wrong.
"""

from __future__ import annotations

import ctypes
from threading import Thread


def start_context() -> Thread:
    """The thread that makes it. The context lives as long as the process, as one of torch's would."""
    thread = Thread(target=_retain, name="cuda-context", daemon=True)
    thread.start()
    return thread


def _retain() -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")  # its calls run without the interpreter's lock
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
