"""The calls of an RMSNorm by one kernel."""

from __future__ import annotations

from typing import Any

from speedkit_jupyter.optimizations.facts.fusible import TORCHS, eps_of
from speedkit_jupyter.optimizations.fusing import liger
from speedkit_jupyter.optimizations.fusing.fused_calls import Fused, is_one


class FusedNorm(Fused):
    """RMSNorm in one kernel, which reads each row once."""

    kind = "rms_norm"

    def _suits(self, args: Any, kwargs: Any) -> bool:
        weight: Any = self.module._parameters.get("weight")
        if not is_one(args, kwargs) or weight is None or not liger.takes(args[0], weight):
            return False
        x = args[0]
        fits = weight.shape == x.shape[-1:]
        return fits and (self._how is not TORCHS or _is_as_torchs(self.module, x, weight))

    def _fused(self, args: Any, kwargs: Any) -> Any:
        x, weight, how = args[0], self.module._parameters["weight"], self._how
        eps = eps_of(self.module, how)
        # Not in place: what comes back may be the gradient of a residual sum, too.
        result = self._functional.liger_rms_norm(x, weight, eps, how.offset, how.casting, False)
        liger.once(self.kind, result, writes=False)
        return result.to(liger.promoted(x, weight)) if how.casting == "llama" else result


def _is_as_torchs(norm: Any, x: Any, weight: Any) -> bool:
    """Whether dtype and eps are sure to be torch's: autocast has rules for its norm, and so has
    that for an eps of None.
    """
    import torch

    has_rules = torch.is_autocast_enabled(x.device.type) or norm.eps is None
    return x.dtype == weight.dtype and (x.dtype == torch.float32 or not has_rules)
