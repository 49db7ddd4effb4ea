"""The calls of an attention, queries and keys rotated by one kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.facts.fusible import ROTATE
from speedkit_jupyter.optimizations.fusing import liger
from speedkit_jupyter.optimizations.fusing.fused_calls import Fused, keep_nothing

if TYPE_CHECKING:
    import torch


class FusedRotation(Fused):
    """An attention whose queries and keys are rotated by one kernel.

    Its own forward runs, in which one global name means something else.
    """

    kind = "rope"

    def __init__(
        self, module: torch.nn.Module, functional: Any, how: Any, notes: dict[str, str]
    ) -> None:
        super().__init__(module, functional, how, notes)
        self._known = self._own.__globals__[ROTATE]
        self._forward = with_other(self._own, {ROTATE: self._rotated})
        self._halves_are_alike: bool | None = None

    def _suits(self, args: Any, kwargs: Any) -> bool:
        is_known = self._own.__globals__.get(ROTATE) is self._known
        return is_known and keep_nothing([self.module])

    def _fused(self, args: Any, kwargs: Any) -> Any:
        return self._forward(self.module, *args, **kwargs)

    def _rotated(self, q: Any, k: Any, cos: Any, sin: Any, *more: Any, **named: Any) -> Any:
        if more or named or not self._fits(q, k, cos, sin):
            return self._known(q, k, cos, sin, *more, **named)
        dtype = liger.promoted(q, cos)
        q, k = self._functional.liger_rope(q, k, cos, sin)[:2]
        liger.once(self.kind, q, writes=False)
        return q.to(dtype), k.to(dtype)

    def _fits(self, q: Any, k: Any, cos: Any, sin: Any) -> bool:
        if not liger.takes(q, k, cos, sin) or [t.dim() for t in (q, k, cos, sin)] != [4, 4, 3, 3]:
            return False
        batch, _, rows, width = q.shape
        fits = (
            rows > 1  # the stride of a single one means nothing, and the kernel goes by it
            and (k.shape[0], *k.shape[2:]) == (batch, rows, width)
            and cos.shape == sin.shape == (cos.shape[0], rows, width)
            and cos.shape[0] in (1, batch)
            and width % 2 == 0
            and (q.dtype, cos.dtype) == (k.dtype, sin.dtype)
            and not (cos.requires_grad or sin.requires_grad)
        )
        return fits and liger.are_nobodys(q, k) and self._has_twice_the_same(cos, sin)

    def _has_twice_the_same(self, cos: Any, sin: Any) -> bool:
        """The kernel reads the first half of the angles only. Asked once: it waits for the GPU."""
        import torch

        if self._halves_are_alike is None:
            self._halves_are_alike = all(torch.equal(*t.chunk(2, -1)) for t in (cos, sin))
        return self._halves_are_alike


class _Names(dict[str, Any]):
    """The global names of a function, some of which mean something else."""

    def __init__(self, names: dict[str, Any], others: dict[str, Any]) -> None:
        # Python itself reads these without asking for what is missing.
        super().__init__({name: names[name] for name in names if name.startswith("__")} | others)
        self._names = names

    def __missing__(self, name: str) -> Any:
        return self._names[name]


def with_other(function: FunctionType, others: dict[str, Any]) -> Callable[..., Any]:
    """The same function, for which these global names mean these; all else is as it is, live."""
    names = _Names(function.__globals__, others)
    same = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    same.__kwdefaults__ = function.__kwdefaults__
    return same
