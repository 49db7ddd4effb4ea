"""Dataclasses for a request, for the decision about it, and for equivalent torch code."""

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
    """The effect of an optimization on the numerical results of a step."""

    EXACT = "bit-equal results"
    ROUNDING = "lower precision or another order of summation"
    CHANGES_MODEL = "other arithmetic"


@dataclass(frozen=True)
class Decision:
    """The decision about one optimization, with its reason.

    At least one of `rule`, `asked` and `measured` is set.
    """

    name: str
    value: Any  # a value of the config field: True, "bf16"
    rule: str  # the rule or fact that decided; may be empty
    source: Source = "auto"  # the origin of the request
    active: bool = False  # True if a plan applies the value
    declined: bool = False  # True if a request was refused or replaced, or applying changed nothing
    worth_measuring: Any = None  # a value that may be faster, for a measurement to decide
    details: Mapping[str, Any] = field(default_factory=dict)
    asked: bool = False  # True if an explicit request decided
    measured: str = ""  # the measurement behind the decision, in words
    variable: str | None = None  # name of the environment variable that decided, if any
    hint: str = ""  # a consequence or advice for the user

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
    """A requested value for one optimization, with its origin and any measurement behind it."""

    name: str
    value: Any
    source: Source = "auto"
    variable: str | None = None
    measured: str = ""

    @property
    def word(self) -> Any:
        """Return the value; for options with fields, the first field's value."""
        value = self.value
        return next(iter(dict(value).values())) if isinstance(value, BaseModel) else value

    @property
    def explicit(self) -> bool:
        """Return whether a value other than `auto` was requested, in the first or only field."""
        return self.source != "auto" and self.word != "auto"

    def on_request(self, obstacle: str, otherwise: str, rule: str = "", **more: Any) -> Decision:
        """Return a decision that applies the value only on explicit request.

        Args:
            obstacle: the reason why the optimization must stay off; empty if there is none.
            otherwise: the reason why `auto` leaves the optimization off if there is no obstacle.
            rule: the rule of an active decision; `more` are further fields of that Decision.
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
        """Return a decision that applies the requested value."""
        return self._decision(value, rule, active=True, asked=True, **more)

    def leave(self, value: Any, rule: str = "", **more: Any) -> Decision:
        """Return an inactive decision with this value: the plan changes nothing."""
        return self._decision(value, rule, **more)

    def offer(self, value: Any, worth_measuring: Any, rule: str, **more: Any) -> Decision:
        """Return an inactive decision with this value, and with a value that is worth measuring."""
        return self._decision(value, rule, worth_measuring=worth_measuring, **more)

    def decline(self, value: Any, rule: str, **more: Any) -> Decision:
        """Return an inactive decision with this value; an explicit request counts as declined."""
        return self._decision(value, rule, declined=self.explicit, **more)

    def _decision(self, value: Any, rule: str, **more: Any) -> Decision:
        more |= {"measured": self.measured, "variable": self.variable}
        return Decision(self.name, value, rule, source=self.source, **more)


@dataclass(frozen=True)
class Snippet:
    """Python source code that applies a decision, in parts for different places in a script.

    The source uses the names `model` and `loss`, and the placeholder `{optimizer}`.
    """

    comment: str = ""  # the comment in the script; by default the decision's reason
    imports: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # process-wide flags and functions, at the top
    compiling: tuple[str, ...] = ()  # further flags if the model is compiled
    model: tuple[str, ...] = ()  # lines for the model, before the optimizer is created
    replaces_parameters: bool = False  # True if the lines in `model` replace parameters
    batch: str = ""  # a method call for each tensor of a batch
    optimizers: tuple[Mapping[str, str], ...] = ()  # keyword arguments for each optimizer
    training: tuple[str, ...] = ()  # lines that run once, after the optimizer is created
    compiled: str = ""  # an expression for the compiled model
    changes_forward: str = ""  # the name of a function that replaces a module's `forward`
    forward: tuple[str, ...] = ()  # context managers around forward pass and loss
    loss: str = "loss"  # the expression on which backward() is called
    step: str = "{optimizer}.step()"
    after_step: tuple[str, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)  # arguments for TrainingArguments
