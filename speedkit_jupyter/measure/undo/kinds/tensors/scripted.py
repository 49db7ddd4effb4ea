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

    def children(self, instance: Any) -> Iterable[Any]:
        """The tensors."""
        import torch

        return [tensor for tensor in _held(instance).values() if isinstance(tensor, torch.Tensor)]

    def copy(self, instance: Any, copies: Copies) -> dict[str, Any]:
        """By name; tensors themselves."""
        return _held(instance)

    def same(self, instance: Any, memory: dict[str, Any]) -> bool:
        """Tensors by identity."""
        now = _held(instance)
        return all(_is_the_same(now.get(name), value) for name, value in memory.items())

    def put_back(self, instance: Any, memory: dict[str, Any]) -> None:
        """What was rebound."""
        now = _held(instance)
        for name, value in memory.items():
            if not _is_the_same(now.get(name), value):
                instance._c.setattr(name, value)


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
        value = inner.getattr(name) if inner.hasattr(name) else None
        if isinstance(value, (torch.Tensor, *PLAIN)):
            held[name] = value
    return held


def _is_the_same(now: Any, saved: Any) -> bool:
    return now is saved or (type(now) in PLAIN and type(now) is type(saved) and now == saved)
