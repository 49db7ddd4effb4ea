"""What refers to another object without keeping it alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import Kind

PROXIES = frozenset((weakref.ProxyType, weakref.CallableProxyType))


class Weak(Kind):
    """Weak references and proxies lead to what they refer to, as long as that lives.

    So do those that dicts and sets of weak references consist of.
    """

    has_state = False
    anywhere = True

    def recognizes(self, cls: type) -> bool:
        """Also to methods, and with keys."""
        return issubclass(cls, weakref.ref) or cls in PROXIES

    def children(self, instance: Any) -> Iterable[Any]:
        """The object; a proxy gives it away as what a method of its own is bound to."""
        if type(instance) in PROXIES:
            referent = instance.__reduce_ex__.__self__
        else:
            referent = weakref.ref.__call__(instance)
        return () if referent is None else (referent,)
