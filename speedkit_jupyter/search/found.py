"""What the searches of this process found: the last one, and the newest plan of each model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.support.weak import Listeners
from speedkit_jupyter.support.wrappers import unwrapped


@dataclass
class FoundPlan:
    """What tuning found last for a model: the config that `%speedkit apply WORDS` puts into force.

    `proof` says what it brings, if anything; `is_newer` until a plan is applied to the model.
    """

    config: SpeedConfig
    proof: str
    words: str = ""
    is_newer: bool = True

    @property
    def line(self) -> str:
        """The magic that puts it into force."""
        return f"`%speedkit apply {self.words}".rstrip() + "`"


class SearchMemory:
    """`last` is the last `Tuning`; `listeners` are told of each plan that a search found."""

    def __init__(self) -> None:
        self.listeners = Listeners()
        self.forget()

    def forget(self) -> None:
        self.last: Any = None
        # By the id of a model, since a model may have no hash.
        self._by_model: dict[int, tuple[ref[torch.nn.Module], FoundPlan]] = {}

    def keep(self, models: Iterable[torch.nn.Module], found: FoundPlan) -> None:
        """Remember what a search has found for these models."""
        for model in models:
            self._by_model[id(unwrapped(model))] = (ref(unwrapped(model)), found)
        self.listeners.tell()

    def of(self, model: torch.nn.Module | None) -> FoundPlan | None:
        """Return what the last search for this model found; None without one."""
        whole = None if model is None else unwrapped(model)
        reference, found = self._by_model.get(id(whole), (None, None))
        return found if reference is not None and reference() is whole else None


# State at module level, on purpose: as plans and flags, it belongs to the process.
MEMORY = SearchMemory()
