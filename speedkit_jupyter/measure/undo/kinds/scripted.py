"""TorchScript modules: what they hold lies in C++, not in their dictionaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind

PLAIN = (bool, int, float, str)


class Scripted(Kind):
    """Parameters, buffers and plain attributes of a scripted, traced or loaded module.

    Those of the modules in it are objects of this kind themselves.
    """

    def recognizes(self, cls: type) -> bool:
        """Whatever `torch.jit` makes of a module."""
        import torch

        return issubclass(cls, torch.jit.ScriptModule)

    def children(self, found: Any) -> Iterable[Any]:
        """The tensors."""
        import torch

        return [one for one in _held(found).values() if isinstance(one, torch.Tensor)]

    def copy(self, found: Any, copies: Copies) -> dict[str, Any]:
        """By name; tensors themselves."""
        return _held(found)

    def same(self, found: Any, memory: dict[str, Any]) -> bool:
        """Tensors by identity."""
        now = _held(found)
        return all(_is_the_same(now.get(name), one) for name, one in memory.items())

    def put_back(self, found: Any, memory: dict[str, Any]) -> None:
        """What was rebound."""
        now = _held(found)
        for name, one in memory.items():
            if not _is_the_same(now.get(name), one):
                found._c.setattr(name, one)


def _held(module: Any) -> dict[str, Any]:
    import torch

    parts: Any = torch._C  # whose types say less than there is
    inner = vars(module).get("_c")
    if inner is None:  # its constructor has not come that far
        return {}
    held = {
        **dict(parts.ParameterDict(inner).items()),
        **dict(parts.BufferDict(inner).items()),
    }
    kind = parts.ConcreteModuleType.from_jit_type(inner._type())
    for name in kind.get_attributes():
        one = inner.getattr(name) if inner.hasattr(name) else None
        if isinstance(one, (torch.Tensor, *PLAIN)):
            held[name] = one
    return held


def _is_the_same(now: Any, found: Any) -> bool:
    return now is found or (type(now) in PLAIN and type(now) is type(found) and now == found)
