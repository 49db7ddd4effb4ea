"""Which model a line is about, and the plan that it has or would get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics.namespace import find_model, find_optimizers, models
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan, plan
from speedkit_jupyter.session import Session
from speedkit_jupyter.support.exceptions import ConfigError, SpeedKitError
from speedkit_jupyter.tuning import learning


def named(names: Mapping[str, Any], applied: Mapping[str, SpeedContext], name: str | None) -> str:
    """The model that a line is about: the named one, the only one with a plan, or the only one."""
    if name is None and len(applied) == 1:
        return next(iter(applied))
    if name is None and len(applied) > 1:
        raise UsageError(f"which model? {', '.join(applied)}")
    if name is not None and name in applied:
        return name
    return find_model(names, name)[0]


def planned(
    names: Mapping[str, Any],
    config: SpeedConfig,
    name: str,
    optimizers: Mapping[str, Any] | None = None,
) -> Plan:
    """What apply would do to a model that has no plan yet."""
    _, model = find_model(names, name)
    mapping = find_optimizers(names, None, model) if optimizers is None else optimizers
    listed = list(mapping.values())
    return plan(or_learned(config, model, listed), facts=Facts.read(model, listed))


def planned_or_plain(
    names: Mapping[str, Any], session: Session, name: str | None
) -> tuple[Plan, str]:
    """The plan in force or to come, with its model's name; without a model, of any on this machine.

    Where there are several and none was named, of any, too.
    """
    applied = dict(session.applied(names))
    if name is None and len(applied) != 1 and len(models(names)) != 1:
        return plan(session.config), "a float32 model"
    chosen = named(names, applied, name)
    if chosen in applied:
        return applied[chosen].plan, f"`{chosen}`"
    return planned(names, session.config, chosen), f"`{chosen}`"


def or_learned(config: SpeedConfig, model: Any, optimizers: list[Any]) -> SpeedConfig:
    """As `learning.or_learned`, for one model or several; a store that can't be read is said.

    Raises ConfigError where SPEEDKIT_HARDWARE names no machine.
    """
    try:
        return learning.or_learned(config, model, optimizers)
    except ConfigError:  # no plan can be made
        raise
    except SpeedKitError as error:  # then by rules, as without a store
        print(error)
        return config
