"""What is asked of an optimization, and what it decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from speedkit_jupyter.catalog.base.options import Fields

Source = Literal["auto", "user", "env", "measured"]
Switch = Literal["auto", True, False]


class Effect(Enum):
    """What an optimization does to the numbers."""

    EXACT = "bit-equal results"
    ROUNDING = "lower precision or another order of summation"
    CHANGES_MODEL = "other arithmetic"


@dataclass(frozen=True)
class Decision:
    """One optimization's outcome. A reason is there: `rule`, `asked` or `measured`."""

    name: str
    value: Any  # in the config's own words
    rule: str  # the rule or the fact that decided
    source: Source = "auto"
    active: bool = False  # applying changes something
    declined: bool = False  # asked for and not granted, or replaced by the nearest that works
    worth_measuring: Any = None  # the value that may pay here and may cost: no rule turns it on
    details: Mapping[str, Any] = field(default_factory=dict)
    asked: bool = False  # done as it was asked
    measured: str = ""  # the number that decided
    variable: str | None = None  # the environment variable that decided
    hint: str = ""  # what follows for the user

    @property
    def why(self) -> str:
        """Return the reason without its hint; never empty."""
        first = self.measured or ("as asked" if self.asked else "")
        variable = f" (the environment variable {self.variable} decides)" if self.variable else ""
        return "; ".join(filter(None, (first, self.rule))) + variable

    @property
    def reason(self) -> str:
        """Return the reason with its hint; never empty."""
        return "; ".join(filter(None, (self.why, self.hint)))


@dataclass(frozen=True)
class Request:
    """What is asked of one optimization, from where, and the number that it was measured by."""

    name: str
    value: Any
    source: Source = "auto"
    variable: str | None = None
    measured: str = ""

    @property
    def word(self) -> Any:
        """Return the value, of options with fields that of the first one."""
        value = self.value
        return next(iter(dict(value).values())) if isinstance(value, Fields) else value

    @property
    def explicit(self) -> bool:
        """Return whether something definite was asked for, rather than left to SpeedKit."""
        return self.source != "auto" and self.word != "auto"

    def on_request(self, obstacle: str, otherwise: str, rule: str = "", **more: Any) -> Decision:
        """Do it where it was asked for and nothing is in the way; `auto` leaves it, `otherwise`."""
        if self.word is False:
            return self.leave(False, asked=True)
        if obstacle:
            return self.decline(False, obstacle)
        if self.word == "auto":
            return self.leave(False, otherwise)
        return self.obey(self.word, rule, **more)

    def apply(self, value: Any, rule: str, **more: Any) -> Decision:
        """Do it, by this rule."""
        return self._decision(value, rule, active=True, **more)

    def obey(self, value: Any, rule: str = "", **more: Any) -> Decision:
        """Do it, since it was asked for."""
        return self._decision(value, rule, active=True, asked=True, **more)

    def leave(self, value: Any, rule: str = "", **more: Any) -> Decision:
        """Change nothing; `value` is what is in force without SpeedKit."""
        return self._decision(value, rule, **more)

    def offer(self, value: Any, worth_measuring: Any, rule: str, **more: Any) -> Decision:
        """Change nothing: what may pay and may cost waits until it is measured."""
        return self._decision(value, rule, worth_measuring=worth_measuring, **more)

    def decline(self, value: Any, rule: str, **more: Any) -> Decision:
        """Change nothing, although it was asked for."""
        return self._decision(value, rule, declined=self.explicit, **more)

    def _decision(self, value: Any, rule: str, **more: Any) -> Decision:
        more |= {"measured": self.measured, "variable": self.variable}
        return Decision(self.name, value, rule, source=self.source, **more)
