"""One kernel launch as data: what would run, on what grid, with which arguments. So a launch can be run, compiled ahead
on several threads, or compiled for a device that is not here, all from the same description.

Dependent launches (PDL, from sm_90): every kernel that takes the constant `PDL` waits for the kernel before it
(`gdc_wait`) and only then lets the next one start (`gdc_launch_dependents`). So all that ran two kernels ago is
complete when a kernel starts, and what comes before its wait may read weights and anything at least that old.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octavo.kernels.triton.handles import compile_only, compiling, is_known, only_compiling


@dataclass(frozen=True, slots=True)
class Launch:
    """A Triton or Gluon kernel with everything it is called with. Tensors in `args` must outlive the launch."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    """Run-time arguments by parameter name."""
    constants: dict[str, Any]
    """Compile-time arguments by parameter name, but for `PDL`."""
    num_warps: int = 4
    num_stages: int = 1

    @property
    def variant(self) -> tuple[Any, ...]:
        """Equal for launches of one compiled kernel (whose arguments have equal types, as those of one step have)."""
        return self.kernel, *sorted(self.constants.items()), self.num_warps, self.num_stages

    def run(self, *, pdl: bool = True) -> None:
        """Start it on the current stream; `pdl` False for devices (and the interpreter) without dependent launches."""
        if only_compiling():
            dtypes = [getattr(arg, "dtype", None) for arg in self.args.values()]
            if not is_known((self.variant, pdl, *dtypes)):
                self.warm_up(pdl=pdl)
        else:
            self.kernel[self.grid](**self.args, **self.constants, PDL=pdl, **self._options(pdl))

    def warm_up(self, *, pdl: bool = True) -> None:
        """Compile it for the current device, without running it."""
        compile_only(self.kernel, **self.args, **self.constants, PDL=pdl, grid=self.grid, **self._options(pdl))

    def _options(self, pdl: bool) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options | {"launch_pdl": True} if pdl else options


def compile_together(launches: Iterable[Launch], *, pdl: bool = True) -> int:
    """Compile what is not compiled yet, on all cores, for the current device; how many kernels the launches share."""
    unique = {launch.variant: launch for launch in launches}
    with compiling():
        for launch in unique.values():
            launch.run(pdl=pdl)
    return len(unique)
