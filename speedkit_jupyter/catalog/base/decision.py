"""A request for a switch, the decision about it with its reason, and its plain code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel

Source = Literal["auto", "user", "env", "measured"]
Switch = Literal["auto", True, False]
Form = Literal["torch", "transformers"]


class Effect(Enum):
    """The effect of an optimization on numbers."""

    EXACT = "bit-equal results"
    ROUNDING = "lower precision or another order of summation"
    CHANGES_MODEL = "other arithmetic"


@dataclass(frozen=True)
class Decision:
    """The decision about one optimization, with its reason.

    At least one of `rule`, `asked` and `measured` is set.
    """

    name: str
    value: Any  # the config's value: True, "bf16"
    rule: str  # the rule or the fact that decided
    source: Source = "auto"  # who set the value
    active: bool = False  # applying changes something
    declined: bool = False  # the requested value was refused, or replaced by a similar one
    worth_measuring: Any = None  # a value about which only a measurement can decide
    details: Mapping[str, Any] = field(default_factory=dict)
    asked: bool = False  # the user requested this value and gets it
    measured: str = ""  # the measured number behind the decision
    variable: str | None = None  # the environment variable that decided
    hint: str = ""  # the consequence for the user

    @property
    def why(self) -> str:
        """Return the reason without the hint; never empty."""
        first = self.measured or ("as asked" if self.asked else "")
        variable = f" (the environment variable {self.variable} decides)" if self.variable else ""
        return "; ".join(filter(None, (first, self.rule))) + variable

    @property
    def reason(self) -> str:
        """Return the reason with the hint; never empty."""
        return "; ".join(filter(None, (self.why, self.hint)))


@dataclass(frozen=True)
class Request:
    """The requested value of one optimization, its source, and the measured number behind it."""

    name: str
    value: Any
    source: Source = "auto"
    variable: str | None = None
    measured: str = ""

    @property
    def word(self) -> Any:
        """Return the value; for options with several fields, the first field's value."""
        value = self.value
        return next(iter(dict(value).values())) if isinstance(value, BaseModel) else value

    @property
    def explicit(self) -> bool:
        """Return whether the user requested a definite value, not `auto`."""
        return self.source != "auto" and self.word != "auto"

    def on_request(self, obstacle: str, otherwise: str, rule: str = "", **more: Any) -> Decision:
        """Apply the value only if the user asked for it.

        Args:
            obstacle: the reason to decline; empty if the value is possible.
            otherwise: the reason of a decision that leaves `auto` off.
            rule: the rule of an applied decision; `more` are further fields of the Decision.
        """
        if self.word is False:
            return self.leave(False, asked=True)
        if obstacle:
            return self.decline(False, obstacle)
        if self.word == "auto":
            return self.leave(False, otherwise)
        return self.obey(self.word, rule, **more)

    def apply(self, value: Any, rule: str, **more: Any) -> Decision:
        """Return a decision that applies the value by this rule."""
        return self._decision(value, rule, active=True, **more)

    def obey(self, value: Any, rule: str = "", **more: Any) -> Decision:
        """Return a decision that applies the value on the user's request."""
        return self._decision(value, rule, active=True, asked=True, **more)

    def leave(self, value: Any, rule: str = "", **more: Any) -> Decision:
        """Return a decision that changes nothing; `value` is in force without SpeedKit."""
        return self._decision(value, rule, **more)

    def offer(self, value: Any, worth_measuring: Any, rule: str, **more: Any) -> Decision:
        """Return a decision that changes nothing, and names a value to measure."""
        return self._decision(value, rule, worth_measuring=worth_measuring, **more)

    def decline(self, value: Any, rule: str, **more: Any) -> Decision:
        """Return a decision that refuses the requested value and changes nothing."""
        return self._decision(value, rule, declined=self.explicit, **more)

    def _decision(self, value: Any, rule: str, **more: Any) -> Decision:
        more |= {"measured": self.measured, "variable": self.variable}
        return Decision(self.name, value, rule, source=self.source, **more)


@dataclass(frozen=True)
class Snippet:
    """Python source of a decision, by location in a script.

    The source uses the names `model`, `loss` and (in braces) `{optimizer}`.
    """

    comment: str = ""  # a comment instead of the decision's reason
    imports: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # process-wide switches, once, at the top
    compiling: tuple[str, ...] = ()  # further switches if the model is compiled
    model: tuple[str, ...] = ()  # lines for the model, before the optimizer is created
    replaces_parameters: bool = False  # the lines in `model` replace parameters
    batch: str = ""  # a method call for each tensor of a batch
    optimizers: tuple[Mapping[str, str], ...] = ()  # keyword arguments for each optimizer
    training: tuple[str, ...] = ()  # once, after the optimizer is created
    compiled: str = ""  # an expression for the compiled model
    around_calls: str = ""  # the name of a function that wraps a `forward`
    forward: tuple[str, ...] = ()  # context managers around forward pass and loss
    loss: str = "loss"  # the tensor that calls backward()
    step: str = "{optimizer}.step()"
    after_step: tuple[str, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)  # a framework's, replacing lines
