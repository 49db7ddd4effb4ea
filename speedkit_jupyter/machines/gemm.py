"""The engine of float32 matrix products on the CPU: torch's BLAS, or the oneDNN inside torch.

torch gives float32 products to its BLAS whatever the processor is, and MKL takes its AVX2 path on
processors that are not Intel's; oneDNN asks the processor. Its kernels lie on the dispatcher's CPU
key in place of torch's own, which go on for all that is small or not plain float32. Autograd,
compiled code, `inference_mode`, subclasses and `vmap` lie above that key.
"""

from __future__ import annotations

import warnings

from speedkit_jupyter.machines.gemm_kernels import Crossover, kernels
from speedkit_jupyter.support import interrupts, torch_private
from speedkit_jupyter.support.exceptions import SpeedKitError

BLAS, ONEDNN = "blas", "onednn"


class _Installed:
    """oneDNN's kernels in place of torch's."""

    def __init__(self, crossover: Crossover) -> None:
        import torch

        self.crossover = crossover
        others = torch_private.kernels_of_others()
        replacing = kernels(crossover)
        if others := others & {f"aten/{name}/CPU" for name in replacing}:
            named = ", ".join(sorted(others))
            raise SpeedKitError(f"gemm: there are other kernels than torch's own already: {named}")
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that a kernel was there: so it should
            for name, kernel in replacing.items():
                self._library.impl(name, kernel, "CPU", with_keyset=True)

    def remove(self) -> None:
        """Bring torch's own kernels back into force."""
        torch_private.remove_kernels(self._library)


class _Engine:
    """What is in force, and the crossover that was said last: it is the machine's, so that a plan
    which is in force again, once the one above is taken back, has its own.
    """

    def __init__(self) -> None:
        self.installed: _Installed | None = None
        self.crossover = Crossover()


# State at module level, on purpose: the dispatcher belongs to the whole process.
_now = _Engine()


def engine() -> str:
    """Return the one in force: `blas` or `onednn`."""
    return BLAS if _now.installed is None else ONEDNN


def use(name: str, crossover: Crossover | None = None) -> None:
    """Give products to this engine from now on: to oneDNN those from the crossover on. An interrupt
    waits until that is done. Raises SpeedKitError where somebody else has put kernels of his own in
    the place of torch's.
    """
    wanted = crossover or _now.crossover
    if name == engine() and (_now.installed is None or wanted == _now.installed.crossover):
        return
    with interrupts.uninterrupted():
        if _now.installed is not None:
            _now.installed.remove()
            _now.installed = None
        if name == ONEDNN:
            _now.installed, _now.crossover = _Installed(wanted), wanted
