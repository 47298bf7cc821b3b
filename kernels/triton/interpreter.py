"""Mends Triton's interpreter (TRITON_INTERPRET=1, which must be set before triton is imported) for numpy 2 and bf16.

Two faults of triton 3.6: loop bounds are one-element arrays, which numpy no longer turns into integers; and tl.dot
multiplies the bits of bf16 numbers as integers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import triton
import triton.language as tl


def is_interpreting() -> bool:
    """Whether kernels run in the interpreter in this process."""
    return bool(triton.knobs.runtime.interpret)


@cache
def mend() -> None:
    """Once a process; nothing where kernels are compiled."""
    if not is_interpreting():
        return
    import triton.runtime.interpreter as interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widen(operand: Any) -> np.ndarray:
        if operand.dtype.scalar == tl.bfloat16:
            return (operand.data.astype(np.uint32) << 16).view(np.float32)
        return operand.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(widen(a), widen(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = create_dot
