"""Put back what some objects reach, without a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.state.walk import Walk


@contextmanager
def isolated(*roots: Any) -> Iterator[Snapshot]:
    """Undo at the end whatever the block does to what these reach."""
    snapshot = Snapshot(Walk(roots))
    try:
        yield snapshot
    finally:
        snapshot.restore()
