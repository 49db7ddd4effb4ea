"""%speedkit apply: plan for a model, apply the plan, put the context into the namespace."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from IPython.display import display

from speedkit_jupyter.codegen.training_loop import Words
from speedkit_jupyter.magics import namespace, options
from speedkit_jupyter.magics.line import Names, Option, command, switch
from speedkit_jupyter.measure.subject.discovery import holding
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base.options import choices
from speedkit_jupyter.plans.applying import apply_speedups
from speedkit_jupyter.plans.config import SpeedConfig, from_arguments
from speedkit_jupyter.plans.sources import from_word
from speedkit_jupyter.report.plan_report import applied_report
from speedkit_jupyter.session import CTX, Session
from speedkit_jupyter.support.wrappers import each_once


def _options() -> Iterator[Option]:
    """Each config field is an option, each further field `--field-part`."""
    for optimization in CATALOG:
        for number, (path, annotation) in enumerate(optimization.paths.items()):
            words, name, about = choices(annotation), optimization.name, optimization.summary
            if number:
                name, about = path.replace(".", "-"), f"{about}: its {path.partition('.')[2]}"
            bare: dict[str, Any] = {"nargs": "?", "const": "true"} if "true" in words else {}
            metavar = "WORD" if len(words) > 1 else "VALUE"
            yield Option(f"--{name}", metavar, about, words=words, dest=path, **bare)


def _typed(arguments: Namespace) -> dict[str, Any]:
    """The config values among the arguments, nested as in YAML."""
    values: dict[str, Any] = {}
    for path, annotation in (pair for one in CATALOG for pair in one.paths.items()):
        if (text := getattr(arguments, path)) is not None:
            name, _, field = path.partition(".")
            value = from_word(text, choices(annotation))
            values[name] = {**values.get(name, {}), field: value} if field else value
    return values


@command(
    "plan for a model and apply the plan",
    options.MODEL,
    options.OPTIMIZER,
    Option("--config", "FILE", "a YAML file to start from", options.configs),
    switch("--rules", "by rules, although tuning has learned a plan"),
    more=_options,
)
def apply(names: Names, session: Session, arguments: Namespace) -> None:
    """Apply; what is typed wins over the file, the file over the session's config."""
    models = namespace.find_models(names, arguments.model)
    config = SpeedConfig.from_yaml(arguments.config) if arguments.config else session.config
    typed = _typed(arguments)
    config = from_arguments(config.to_dict() | typed, "%speedkit apply", firm=typed)
    optimizers = {n: _optimizers(names, arguments, m, len(models)) for n, m in models.items()}
    if not arguments.rules:
        every = each_once([one for held in optimizers.values() for one in held.values()])
        config = namespace.or_learned(config, list(models.values()), every)
    for name, model in models.items():
        _, context = apply_speedups(model, config, optimizer=list(optimizers[name].values()))
        variable = session.keep(name, context)
        document = applied_report(context, Words(name, optimizers[name], variable, names))
        taken = f"`{CTX}` is in use: this context is `{variable}`." if variable != CTX else ""
        display(document.and_lines([taken]))


def _optimizers(names: Names, arguments: Namespace, model: Any, number: int) -> dict[str, Any]:
    """Of several models each has some of those that were named."""
    if arguments.optimizer is None or number == 1:
        return namespace.find_optimizers(names, arguments.optimizer, model)
    named = namespace.named_optimizers(names, arguments.optimizer)
    held = set(map(id, holding(named.values(), model)))
    return {name: optimizer for name, optimizer in named.items() if id(optimizer) in held}
