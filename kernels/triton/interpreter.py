"""Mends Triton's interpreter (TRITON_INTERPRET=1, which must be set before triton is imported) for numpy 2 and bf16.

Two faults of triton 3.6: loop bounds are one-element arrays, which numpy no longer turns into integers; and tl.dot
multiplies the bits of bf16 numbers as integers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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

    np = interpreter.np
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    plain_dot = interpreter.InterpreterBuilder.create_dot

    def widen(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        return plain_dot(self, widen(a), widen(b), d, input_precision, max_num_imprecise_acc)

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = create_dot
