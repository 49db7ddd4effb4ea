"""Static caches of transformers under autocast.

A static cache has one dtype, but rotary embeddings give keys in float32 next to values in bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

# The plans that lower precision; module state, because they share one patch of the class.
_PLANS: list[object] = []


@contextmanager
def caches_in_one_dtype() -> Iterator[None]:
    """Store keys in the dtype of their values, in the block, where a static cache would fail."""
    kind: Any = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    if kind is None or not hasattr(kind, "is_compileable"):
        yield
        return
    original, plan = kind.update, object()

    @wraps(original)
    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        is_mixed = keys.dtype != values.dtype and self.is_compileable
        return original(self, keys.to(values.dtype) if is_mixed else keys, values, *args, **kwargs)

    if not _PLANS:
        update.stands_in_for = original  # type: ignore[attr-defined]
        kind.update = update
    _PLANS.append(plan)
    try:
        yield
    finally:
        _PLANS.remove(plan)
        if not _PLANS and hasattr(kind.update, "stands_in_for"):
            kind.update = kind.update.stands_in_for
