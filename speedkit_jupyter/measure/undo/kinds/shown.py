"""What is looked at: pictures, and widgets in the notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind, attribute_dict

PLAIN = (bool, int, float, str, bytes, type(None))


class Images(Kind):
    """Pillow's pictures: their pixels, which lie in C."""

    bulky = True

    def recognizes(self, cls: type) -> bool:
        """Where the user has loaded Pillow."""
        image = sys.modules.get("PIL.Image")
        return image is not None and cls is type(image.new("L", (1, 1)).im)

    def copy(self, found: Any, copies: Copies) -> Any:
        """Another of the same pixels."""
        width, height = found.size
        return found.copy() if copies.fits(found, width * height * found.bands) else None

    def glance(self, found: Any) -> Any:
        """Nothing: values are compared apart."""
        return None

    def same(self, found: Any, memory: Any) -> bool:
        """Pixel by pixel."""
        return memory is None or _pixels(found) == _pixels(memory)

    def put_back(self, found: Any, memory: Any) -> None:
        """Into its own memory."""
        found.paste(memory, (0, 0, *memory.size))


def _pixels(core: Any) -> bytes:
    image = sys.modules["PIL.Image"].Image()
    return bytes(image._new(core).tobytes())


class Widgets(Kind):
    """ipywidgets: plain values of theirs, in the notebook as well. Who observes is not called."""

    anywhere = True

    def recognizes(self, cls: type) -> bool:
        """Where the user has loaded them."""
        widget = getattr(sys.modules.get("ipywidgets"), "Widget", None)
        return widget is not None and issubclass(cls, widget)

    def children(self, found: Any) -> Iterable[Any]:
        """The widgets in it, and who observes it."""
        notifiers = (attribute_dict(found) or {}).get("_trait_notifiers", {})
        yield notifiers
        for one in _traits(found).values():
            if isinstance(one, tuple):
                yield from one

    def copy(self, found: Any, copies: Copies) -> dict[str, Any]:
        """What can't change itself."""
        return {
            name: one
            for name, one in _traits(found).items()
            if isinstance(one, PLAIN) and name[:1] != "_"
        }

    def same(self, found: Any, memory: dict[str, Any]) -> bool:
        """By value."""
        return self.copy(found, Copies()) == memory

    def put_back(self, found: Any, memory: dict[str, Any]) -> None:
        """Told to the notebook, too."""
        now = _traits(found)
        changed = {name: one for name, one in memory.items() if now.get(name) != one}
        now.update(changed)
        found.send_state([name for name in changed if name in found.keys])


def _traits(widget: Any) -> dict[str, Any]:
    values: dict[str, Any] = (attribute_dict(widget) or {}).get("_trait_values", {})
    return values
