"""Find the objects that extras provide, so that the core imports no extra by name."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

EXTRAS = f"{__package__.partition('.')[0]}.extras"


def provided(name: str) -> list[Any]:
    """Return the objects that extras provide under a name, such as `PLUGIN` or `SWITCHES`.

    A folder of `extras` defines SWITCHES, for example, in its module `switches.py`. Another package
    has an entry point `package:SWITCHES` in the group `speedkit_jupyter.extras`.
    """
    spec = find_spec(EXTRAS)
    folders = pkgutil.iter_modules(spec.submodule_search_locations if spec else ())
    modules = [f"{EXTRAS}.{one.name}.{name.lower()}" for one in folders]
    own = [getattr(import_module(module), name) for module in modules if find_spec(module)]
    return [*own, *(point.load() for point in entry_points(group=EXTRAS) if point.attr == name)]
