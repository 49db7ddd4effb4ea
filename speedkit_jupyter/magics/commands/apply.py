"""%speedkit apply: plan for a model, apply the plan, put the context into the namespace."""

from __future__ import annotations

import itertools
from argparse import Namespace
from contextlib import suppress
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.codegen.training_loop import Words
from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.line import Command, Names, Parser
from speedkit_jupyter.magics.namespace import (
    find_models,
    find_optimizers,
    is_variable,
    named_optimizers,
    or_learned,
    whole_models,
)
from speedkit_jupyter.magics.namespace import optimizers as optimizers_of
from speedkit_jupyter.magics.options import add_model, add_optimizer
from speedkit_jupyter.measure.subject.discovery import holding
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base.options import choices
from speedkit_jupyter.plans.applying import apply_speedups
from speedkit_jupyter.plans.config import SpeedConfig, from_arguments
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.sources import from_word
from speedkit_jupyter.report.plan_report import applied_report
from speedkit_jupyter.session import CTX, Session, is_free
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.wrappers import each_once
from speedkit_jupyter.tuning import learning

# A fingerprint of each pair takes time.
MOST_OTHERS = 8


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Apply; what is typed wins over the file, the file over the session's config."""
    models = find_models(names, arguments.model)
    if arguments.ctx is not None and len(models) > 1:
        raise UsageError("%speedkit apply: --ctx names one context; each model gets one here")
    for model in models.values():
        _check_free(session, arguments.ctx, model)
    config = SpeedConfig.from_yaml(arguments.config) if arguments.config else session.config
    typed = _typed(arguments)
    config = from_arguments(config.to_dict() | typed, "%speedkit apply", firm=typed)
    optimizers = {n: _optimizers(names, arguments, m, len(models)) for n, m in models.items()}
    if not arguments.rules:
        every = each_once([one for held in optimizers.values() for one in held.values()])
        config = or_learned(config, list(models.values()), every)
    for name, model in models.items():
        _, context = apply_speedups(model, config, optimizer=list(optimizers[name].values()))
        variable = session.keep(name, context, arguments.ctx)
        document = applied_report(context, Words(name, optimizers[name], variable, names))
        lines = []
        if arguments.ctx is None and variable != CTX:
            lines.append(f"`{CTX}` is in use: this context is `{variable}`.")
        if config.is_auto and not arguments.rules and (words := _learned_with(names, name, model)):
            learned = (
                f"`%speedkit apply {words}` puts in force what was learned for these together."
            )
            lines.append(learned)
        display(document.and_lines(lines))


def _optimizers(names: Names, arguments: Namespace, model: Any, number: int) -> dict[str, Any]:
    """Of several models each has some of those that were named."""
    if arguments.optimizer is None or number == 1:
        return find_optimizers(names, arguments.optimizer, model)
    named = named_optimizers(names, arguments.optimizer)
    held = set(map(id, holding(named.values(), model)))
    return {name: optimizer for name, optimizer in named.items() if id(optimizer) in held}


def _learned_with(names: Names, name: str, model: Any) -> str:
    """The models with which this one has a plan, as `apply` takes them; empty without."""
    others = {n: m for n, m in whole_models(names).items() if m is not model}
    pairs = [{n: m} for n, m in itertools.islice(others.items(), MOST_OTHERS)]
    for group in (others, *pairs):
        together = {name: model, **group}
        held = holding(optimizers_of(names).values(), model)
        with suppress(SpeedKitError):  # a store that can't be read has been named
            if group and learning.tuned(list(together.values()), held) is not None:
                return ",".join(together)
    return ""


def _add_options(parser: Parser) -> None:
    """Each config field is an option, each further field `--field-part`."""
    add_model(parser)
    add_optimizer(parser)
    parser.option("--ctx", "NAME", "the variable that the context gets (ctx)", lambda names: [CTX])
    parser.option("--config", "FILE", "a YAML file to start from", suggestions.configs)
    parser.switch("--rules", "by rules, although tuning has learned a plan")
    for option, destination, annotation, summary in _fields():
        words = choices(annotation)
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if "true" in words else {}
        action = parser.add_argument(
            *dict.fromkeys((option, option.replace("_", "-"))),
            dest=destination,
            help=summary,
            metavar="WORD" if len(words) > 1 else "VALUE",
            **bare,
        )
        action.words = words  # type: ignore[attr-defined]


def _fields() -> list[tuple[str, str, Any, str]]:
    """Option, path of the config key, annotation and summary, for every field in the catalog."""
    options = []
    for optimization in CATALOG:
        for number, (path, annotation) in enumerate(optimization.paths.items()):
            option = f"--{path.replace('.', '-')}" if number else f"--{optimization.name}"
            field = path.partition(".")[2] if number else ""
            about = f"{optimization.summary}: its {field}" if field else optimization.summary
            options.append((option, path, annotation, about))
    return options


def _typed(arguments: Namespace) -> dict[str, Any]:
    """The config values among the arguments, nested as in YAML."""
    values: dict[str, Any] = {}
    for _, path, annotation, _ in _fields():
        if (text := getattr(arguments, path)) is None:
            continue
        name, _, field = path.partition(".")
        value = from_word(text, choices(annotation))
        if field:
            values.setdefault(name, {})[field] = value
        else:
            values[name] = value
    return values


def _check_free(session: Session, name: str | None, model: Any) -> None:
    """Refuse to overwrite anything but what the new context takes the place of."""
    if name is None:  # then it gets a free one
        return
    if not is_variable(name):
        raise UsageError(f"%speedkit apply: --ctx {name!r} is no name for a variable of yours")
    taken = (session.names or {}).get(name)
    if is_free(taken, model):
        return
    whose = f"your {type(taken).__name__}"
    if isinstance(taken, SpeedContext):
        of = next((n for n, context in session.contexts.items() if context is taken), "")
        whose = f"the context of {of or 'another model'}, which is in force"
    raise UsageError(f"%speedkit apply: {name} is {whose}; name this context with --ctx")


COMMAND = Command("apply", "plan for a model and apply the plan", run, _add_options)
