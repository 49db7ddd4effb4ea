"""What Tab offers of the notebook and of what is saved: models, functions, plans, files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from speedkit_jupyter.support.exceptions import SpeedKitError

Names = Mapping[str, Any]


def models(names: Names) -> list[str]:
    """Return the notebook's models, or those that its lists and objects hold."""
    return _found(names, "models") or _found(names, "inside_others")


def optimizers(names: Names) -> list[str]:
    """Return the notebook's optimizers."""
    return _found(names, "optimizers")


def loaders(names: Names) -> list[str]:
    """Return the notebook's DataLoaders."""
    return _found(names, "loaders")


def functions(names: Names) -> list[str]:
    """Return the notebook's own functions."""
    return _found(names, "functions")


def _found(names: Names, what: str) -> list[str]:
    """Without torch there is nothing to name, and a key press must not wait for its import."""
    from speedkit_jupyter.magics import namespace

    return list(getattr(namespace, what)(names)) if "torch" in sys.modules else []


def plans(names: Names) -> list[str]:
    """Return what `--plan` takes: words of the catalog, and saved names."""
    from speedkit_jupyter.measure.subject.variants import AUTO, CURRENT, words

    return [CURRENT, AUTO, *words(), *saved(names)]


def variants(names: Names) -> list[str]:
    """Return what `--compare` takes."""
    return ["baseline", *plans(names)]


def optimizations(names: Names) -> list[str]:
    """Return the names of the catalog."""
    from speedkit_jupyter.optimizations import CATALOG

    return [optimization.name for optimization in CATALOG]


def saved(names: Names) -> list[str]:
    """Return the names of saved benchmarks."""
    from speedkit_jupyter.support import database

    with suppress(SpeedKitError):  # a store that can't be used is told where it is asked for
        return sorted({entry.name for entry in database.saved()})
    return []


def learned(names: Names) -> list[str]:
    """Return the numbers of learned plans."""
    from speedkit_jupyter.support import database

    with suppress(SpeedKitError):
        return ["all", *(str(entry.number) for entry in database.learned())]
    return ["all"]


def configs(names: Names) -> list[str]:
    """Return the YAML files here and one folder below."""
    return sorted(str(p) for pattern in ("*.y*ml", "*/*.y*ml") for p in Path().glob(pattern))
