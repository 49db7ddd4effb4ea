"""%speedkit code, and the plan that a model has or would get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter import lookup
from speedkit_jupyter.config import SpeedConfig
from speedkit_jupyter.context import SpeedContext
from speedkit_jupyter.exceptions import SpeedKitError
from speedkit_jupyter.facts import Facts
from speedkit_jupyter.magics import parsing
from speedkit_jupyter.magics.namespace import find_model, find_optimizers
from speedkit_jupyter.magics.namespace import optimizers as all_optimizers
from speedkit_jupyter.magics.wishes import or_learned
from speedkit_jupyter.planning import Plan, plan
from speedkit_jupyter.report.code import as_of_now, code_report
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.wrappers import unwrapped

if TYPE_CHECKING:
    from speedkit_jupyter.session import Session


def code(names: Mapping[str, Any], session: Session, line: str) -> None:
    """The plan in force, or what apply would do now, as code without SpeedKit."""
    arguments = parsing.code_parser().parse_line(line)
    applied = dict(session.applied(names))
    name = named(names, applied, arguments.model)
    context = applied.get(name)
    if context is None:
        model = find_model(names, name)[1]
        optimizers = find_optimizers(names, arguments.optimizer, model)
        found = planned(names, session.config, name, optimizers)
    else:
        model = context.model
        asked = arguments.optimizer and find_optimizers(names, arguments.optimizer, model)
        found, listed = as_of_now(context, asked or {})
        optimizers = _with_names(names, listed)
    optimizers = {word: _own(names, word, one) for word, one in optimizers.items()}
    name = name if name.isidentifier() else plain_name(names, model, name)
    document = code_report(found, arguments.form, optimizers, name, model)
    if arguments.save is None:
        display(document)
        return
    _write(arguments.save, document.data["code"], arguments.force)
    display(Document(f"Saved to {arguments.save}", (), document.to_dict()))


def _own(names: Mapping[str, Any], name: str, optimizer: Any) -> Any:
    """What the name stands for, a framework's wrapper perhaps."""
    try:
        value = lookup.value_of(names, name)
    except SpeedKitError:
        return optimizer
    return value if unwrapped(value) is optimizer else optimizer


def plain_name(names: Mapping[str, Any], model: Any, name: str) -> str:
    """A variable that is the model: one is there before `trainer.model` is."""
    every = (word for word, one in list(names.items()) if one is model and word[:1] != "_")
    return next(every, name)


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
    found = find_optimizers(names, None, model) if optimizers is None else optimizers
    listed = list(found.values())
    return plan(or_learned(config, model, listed), facts=Facts.read(model, listed))


def _with_names(names: Mapping[str, Any], optimizers: Sequence[Any]) -> dict[str, Any]:
    """The optimizers of an applied plan, by the names that they have in the notebook."""
    known = {id(one): name for name, one in all_optimizers(names).items()}
    return {
        known.get(id(one), f"optimizer_{number}"): one for number, one in enumerate(optimizers, 1)
    }


def _write(file: str, text: str, force: bool) -> None:
    """A new file; raises UsageError where one is there already, or can't be written."""
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise UsageError(f"{file} is there already: --force writes over it") from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
