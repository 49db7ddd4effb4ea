"""What a newer torch has moved: some of what we stand on is not part of its public interface."""

from __future__ import annotations


def moved(error: BaseException) -> str:
    """What torch does not have (any more), if that is what the error says; else empty."""
    name = str(getattr(error, "name", None) or "")
    if isinstance(error, ImportError):
        asked = getattr(error, "name_from", None)
        return ".".join(filter(None, (name, asked))) if _is_torchs(name) else ""
    if not isinstance(error, AttributeError) or error.obj is None:
        return ""
    owner = error.obj if hasattr(error.obj, "__name__") else type(error.obj)
    module = getattr(owner, "__module__", None) or owner.__name__
    return f"{owner.__name__}.{name}" if _is_torchs(module) else ""


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] == "torch"
