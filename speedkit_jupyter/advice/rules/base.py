"""What every rule is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.situation import Situation


class Rule(ABC):
    """One known reason why steps are slow. `name` is how a report and a test call it.

    A rule whose matter `is_no_speed` speaks also where hardly any time is to be gained.
    """

    name: ClassVar[str]
    is_no_speed: ClassVar[bool] = False

    @abstractmethod
    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Whatever it finds in a step; nothing where it does not apply."""
