"""`plan()` makes a plan: an ordered set of decisions, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from speedkit_jupyter.catalog import CATALOG, named
from speedkit_jupyter.catalog.base.decision import Decision, Effect, Source
from speedkit_jupyter.catalog.base.optimization import decided
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.config import ALONE, SpeedConfig
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.tracebacks import hide_internal_frames

LEFT = "left as it is: not part of this plan"


@dataclass(frozen=True)
class Plan:
    """All decisions for one model on one machine, in the catalog's order.

    Iteration yields each Decision; `plan["compile"]` returns the decision of that name.

    Attributes:
        decisions: A Decision for each optimization.
        hardware: The machine.
        facts: The facts of the model before the plan is applied.
        config: The requested options.
    """

    decisions: tuple[Decision, ...]
    hardware: Hardware
    facts: Facts
    config: SpeedConfig

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def __getitem__(self, name: str) -> Decision:
        """Return the decision about one optimization; raises KeyError for an unknown name."""
        return {decision.name: decision for decision in self.decisions}[name]

    def __str__(self) -> str:
        return "\n".join(f"{d.name}: {d.value} [{d.source}] {d.reason}" for d in self.decisions)

    __repr__ = __str__  # a notebook shows the last value of a cell

    def to_dict(self) -> dict[str, Any]:
        """Return the decisions as plain values, for JSON."""
        keys = ("value", "active", "declined", "worth_measuring", "source", "reason")
        return {
            d.name: {key: getattr(d, key) for key in keys}
            | ({"details": dict(d.details)} if d.details else {})
            for d in self.decisions
        }

    def noted(self, notes: Mapping[str, str]) -> Plan:
        """Return the plan with the texts in `notes`, by name, as hints of its active decisions."""
        hints = {d.name: notes[d.name] for d in self.decisions if d.active and d.name in notes}
        if not hints:
            return self
        made = (replace(d, hint=hints.get(d.name, d.hint)) for d in self.decisions)
        return replace(self, decisions=tuple(made))

    def without(self, reasons: Mapping[str, str]) -> Plan:
        """Return the plan with the decisions in `reasons` (by name) declined, for these reasons."""
        made = (
            replace(d, value=False, rule=reasons[d.name], active=False, declined=True,
                    asked=False, measured="", hint="")
            if d.name in reasons else d
            for d in self.decisions
        )  # fmt: skip
        return replace(self, decisions=tuple(made))

    @property
    def worth_measuring(self) -> dict[str, Any]:
        """Return the values that only a measurement can judge, by optimization."""
        offered = {decision.name: decision.worth_measuring for decision in self.decisions}
        return {name: value for name, value in offered.items() if value is not None}

    @property
    def facts_after(self) -> Facts:
        """Return the facts of the model under the plan, such as the new device and precision."""
        facts = self.facts
        for decision in self.decisions:
            if decision.active:
                facts = named(decision.name).facts_after(decision, facts)
        return facts

    def active_values(self) -> dict[str, Any]:
        """Return the active values by name. The value of a decision with `details` is a dict."""
        values = {decision.name: decision.value for decision in self.decisions if decision.active}
        for decision in self.decisions:
            if decision.active and decision.details:
                first = next(iter(named(decision.name).fields))
                values[decision.name] = {first: decision.value, **decision.details}
        return values

    def changes_model(self) -> dict[str, Any]:
        """Return the active values that change the model's arithmetic (such as int8), by name."""
        active = self.active_values()
        return {name: active[name] for name in active if named(name).effect is Effect.CHANGES_MODEL}

    def to_config(self) -> SpeedConfig:
        """Return a config of requested and active values that leaves other options unchanged."""
        return SpeedConfig.from_dict(self.config.to_dict() | self.active_values()).alone()

    def to_yaml(self) -> str:
        """Return the plan as YAML for `SpeedConfig.from_yaml`, with reasons as comments."""
        values = self.to_config().to_dict()
        planned = f"# Planned for {self.hardware.describe(self.facts_after.device)}"
        lines = [planned, "# Options that are not named stay unchanged:", f"{ALONE}: true"]
        for decision in self.decisions:
            lines.append(f"# {decision.name}: {' '.join(decision.reason.split())}")
            if decision.name in values:
                entry = {decision.name: values[decision.name]}
                lines.append(yaml.safe_dump(entry, sort_keys=False).rstrip())
        return "\n".join(lines) + "\n"


@hide_internal_frames
def plan(
    config: SpeedConfig | None = None, hardware: Hardware | None = None, facts: Facts | None = None
) -> Plan:
    """Return a plan: a decision about every optimization. Change nothing.

    Args:
        config: The options (default: all auto).
        hardware: The machine (default: `Hardware.current()`).
        facts: The facts of the model and its optimizers (default: a float32 model on the CPU).

    Returns:
        A Plan with a Decision, and its reason, for each optimization.

    Raises:
        ArgumentError: An argument has the wrong type.
        ConfigError: SPEEDKIT_HARDWARE, or an option's environment variable, is invalid.

    Example::

        print(plan(facts=Facts.read(model, [optimizer])))
    """
    arguments.of_kind("config", config, SpeedConfig)
    arguments.of_kind("hardware", hardware, Hardware)
    arguments.of_kind("facts", facts, Facts)
    config = SpeedConfig() if config is None else config
    hardware = Hardware.current() if hardware is None else hardware
    facts = Facts() if facts is None else facts
    decisions, original = [], facts
    for optimization in CATALOG:
        request = config.request(optimization.name)
        decision = decided(optimization, request, hardware, facts)
        if config.is_alone and not request.explicit and not optimization.follows:
            # If the rules leave the option unchanged, their reason stays.
            if decision.active or decision.worth_measuring is not None:
                source: Source = "measured" if config.why_left else "auto"
                why, value = config.why_left or LEFT, optimization.as_is(facts)
                decision = Decision(decision.name, value, why, source)
        else:
            facts = optimization.facts_after(decision, facts)
        decisions.append(decision)
    return Plan(tuple(decisions), hardware, original, config)


def precision_of(plan: Plan) -> str:
    """Return the lowest precision that a plan gives matrix products; fp32 by default."""
    if plan["precision"].active:
        return str(plan["precision"].value)
    if plan["tf32"].active and plan["tf32"].value != "highest":
        return "bf16" if plan.facts.device_type == "cpu" else "tf32"
    return "fp32"


def together(plans: Sequence[Plan]) -> Plan:
    """Return one plan for several models. Prefer active decisions; avoid declined decisions."""
    ordered = sorted(plans, key=lambda plan: not plan.facts.optimizers)  # trained models first
    decisions = [
        min(of_each, key=lambda decision: (not decision.active, decision.declined))
        for of_each in zip(*ordered, strict=True)
    ]
    first = plans[0]
    return Plan(tuple(decisions), first.hardware, first.facts, first.config)
