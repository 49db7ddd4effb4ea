"""Objects that extras and other packages provide, found by name."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

from speedkit_jupyter.support import extras


def test_another_package_provides_an_object_by_an_entry_point(monkeypatch):
    points = [EntryPoint(name, f"json:{name}", extras.EXTRAS) for name in ("dumps", "loads")]
    monkeypatch.setattr(extras, "entry_points", lambda group: points)
    assert extras.provided("loads") == [json.loads]


def test_folders_of_extras_provide_switches():
    names = {entry.name for switches in extras.provided("SWITCHES") for entry in switches}
    assert {"distributed", "int8"} <= names
