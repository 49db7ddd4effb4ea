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

    def copy(self, instance: Any, copies: Copies) -> Any:
        """Another of the same pixels."""
        width, height = instance.size
        return instance.copy() if copies.fits(instance, width * height * instance.bands) else None

    def glance(self, instance: Any) -> Any:
        """Nothing: values are compared apart."""
        return None

    def same(self, instance: Any, memory: Any) -> bool:
        """Pixel by pixel."""
        return memory is None or _pixels(instance) == _pixels(memory)

    def put_back(self, instance: Any, memory: Any) -> None:
        """Into its own memory."""
        instance.paste(memory, (0, 0, *memory.size))


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

    def children(self, instance: Any) -> Iterable[Any]:
        """The widgets in it, and who observes it."""
        notifiers = (attribute_dict(instance) or {}).get("_trait_notifiers", {})
        yield notifiers
        for value in _traits(instance).values():
            if isinstance(value, tuple):
                yield from value

    def copy(self, instance: Any, copies: Copies) -> dict[str, Any]:
        """What can't change itself."""
        return {
            name: value
            for name, value in _traits(instance).items()
            if isinstance(value, PLAIN) and name[:1] != "_"
        }

    def same(self, instance: Any, memory: dict[str, Any]) -> bool:
        """By value."""
        return self.copy(instance, Copies()) == memory

    def put_back(self, instance: Any, memory: dict[str, Any]) -> None:
        """Told to the notebook, too."""
        now = _traits(instance)
        changed = {name: value for name, value in memory.items() if now.get(name) != value}
        now.update(changed)
        instance.send_state([name for name in changed if name in instance.keys])


def _traits(widget: Any) -> dict[str, Any]:
    values: dict[str, Any] = (attribute_dict(widget) or {}).get("_trait_values", {})
    return values
