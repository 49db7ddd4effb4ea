"""What a data set is set to: an epoch, a switch, a size."""

from __future__ import annotations

from collections.abc import Iterator

from speedkit_jupyter.support.lookup import attributes_of

# Objects within a data set within a data set (Subset, transforms): so far settings are looked for.
DEPTH, MOST = 4, 1000


def plain(value: object, depth: int = DEPTH) -> Iterator[tuple[str, object]]:
    """What numbers, words and choices an object and those in it hold, and by which names."""
    for name, held in sorted(attributes_of(value).items()) if depth else ():
        if held is None or type(held) in (bool, int, float, str):
            yield name, held
        elif type(held) in (list, tuple):
            for part in held[:DEPTH]:
                yield from plain(part, depth - 1)
        else:
            yield from plain(held, depth - 1)
