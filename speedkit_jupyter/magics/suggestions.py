"""What Tab offers: models, optimizers, files, and what is saved."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from speedkit_jupyter.support.exceptions import SpeedKitError

Names = Mapping[str, Any]


def models(names: Names) -> list[str]:
    """The notebook's models, or those that its lists and objects hold."""
    from speedkit_jupyter.magics import namespace

    if not _torch_is_loaded():
        return []
    return list(namespace.models(names)) or list(namespace.inside_others(names))


def optimizers(names: Names) -> list[str]:
    """The notebook's optimizers."""
    from speedkit_jupyter.magics import namespace

    return list(namespace.optimizers(names)) if _torch_is_loaded() else []


def loaders(names: Names) -> list[str]:
    """The notebook's DataLoaders."""
    from speedkit_jupyter.magics import namespace

    return list(namespace.loaders(names)) if _torch_is_loaded() else []


def plans(names: Names) -> list[str]:
    """What `--plan` takes: words of the catalog, and saved names."""
    from speedkit_jupyter.measure.subject.variants import AUTO, CURRENT, words

    return [CURRENT, AUTO, *words(), *saved(names)]


def variants(names: Names) -> list[str]:
    """What `--compare` takes."""
    from speedkit_jupyter.measure.subject.variants import BASELINE

    return [BASELINE, *plans(names)]


def optimizations(names: Names) -> list[str]:
    """The names of the catalog."""
    from speedkit_jupyter.optimizations import CATALOG

    return [optimization.name for optimization in CATALOG]


def functions(names: Names) -> list[str]:
    """The notebook's own functions."""
    from types import FunctionType

    public = [(name, value) for name, value in names.items() if name[:1] != "_"]
    return [
        name
        for name, value in public
        if type(value) is FunctionType
        and not str(value.__globals__.get("__name__", "")).startswith("IPython")
    ]


def saved(names: Names) -> list[str]:
    """The names of saved benchmarks."""
    from speedkit_jupyter.support import database

    with suppress(SpeedKitError):  # a store that can't be used is told where it is asked for
        return sorted({entry.name for entry in database.saved()})
    return []


def learned(names: Names) -> list[str]:
    """The numbers of learned plans."""
    from speedkit_jupyter.support import database

    with suppress(SpeedKitError):
        return ["all", *(str(entry.number) for entry in database.learned())]
    return ["all"]


def configs(names: Names) -> list[str]:
    """YAML files here and one folder below."""
    here = Path()
    return sorted(str(p) for pattern in ("*.y*ml", "*/*.y*ml") for p in here.glob(pattern))


def _torch_is_loaded() -> bool:
    """Without torch there is no model to name, and a key press must not wait for its import."""
    return "torch" in sys.modules
