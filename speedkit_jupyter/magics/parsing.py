"""Arguments of the magics; the options come from the catalog."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from speedkit_jupyter.config import choices, from_word, paths_of
from speedkit_jupyter.magics.line import Parser as Parser
from speedkit_jupyter.magics.line import options as options
from speedkit_jupyter.magics.line import split as split
from speedkit_jupyter.magics.line import split_setup as split_setup
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.report.code import FORMS

SUBCOMMANDS = {
    "status": "hardware, what is on, what is left on the table",
    "report": "each decision with its reason, and the flags before and after",
    "apply": "plan for a model and apply the plan",
    "restore": "put everything back",
    "verify": "train with and without a plan, and compare the loss curves",
    "tuned": "the plans that tuning has learned; tuned forget NUMBER drops one",
    "code": "the plan as code without SpeedKit: --as torch, yaml, accelerate, fabric, transformers",
    "panel": "see, toggle and measure a model's plan with buttons",
    "history": "saved benchmarks, and how the newest compares with those before it",
    "config": "show, load or save the session's config",
    "repair": "make torch's two TF32 APIs agree again after they were mixed",
    "help": "this page",
}

MODEL = "the model: `net`, `trainer.model`, `models['lm']`; without it the only one"
OPTIMIZER = "its optimizers, with commas; without it those that hold the model's parameters"


@lru_cache(maxsize=1)
def apply_parser() -> Parser:
    """`%speedkit apply`; each config field is an option, each further field `--field-part`."""
    parser = Parser("%speedkit apply")
    _model(parser)
    parser.add_argument("--ctx", metavar="NAME", help="the variable that the context gets (ctx)")
    parser.add_argument("--config", metavar="FILE", help="a YAML file to start from")
    by_rules = "by rules, although tuning has learned a plan"
    parser.add_argument("--rules", action="store_true", help=by_rules)
    for option, destination, annotation, summary in config_options():
        words = choices(annotation)
        bare = {"nargs": "?", "const": "true"} if "true" in words else {}
        action = parser.add_argument(
            *dict.fromkeys((option, option.replace("_", "-"))),
            dest=destination,
            default=None,
            help=summary,
            metavar="WORD" if len(words) > 1 else "VALUE",
            **bare,  # type: ignore[arg-type]
        )
        action.words = words  # type: ignore[attr-defined]
    return parser


def config_options() -> list[tuple[str, str, Any, str]]:
    """Option, path of the config key, annotation and summary, for every field in the catalog."""
    found = []
    for one in CATALOG:
        for number, (path, annotation) in enumerate(paths_of(one).items()):
            option = f"--{path.replace('.', '-')}" if number else f"--{one.name}"
            field = path.partition(".")[2] if number else ""
            about = f"{one.summary}: its {field}" if field else one.summary
            found.append((option, path, annotation, about))
    return found


def config_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The config values among parsed arguments, nested as in YAML."""
    values: dict[str, Any] = {}
    for _, path, annotation, _ in config_options():
        text = getattr(arguments, path)
        if text is None:
            continue
        name, _, field = path.partition(".")
        value = from_word(text, choices(annotation))
        if field:
            values.setdefault(name, {})[field] = value
        else:
            values[name] = value
    return values


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _model(parser: Parser) -> None:
    """What most subcommands take."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL)
    parser.add_argument(
        "--optimizer", type=_names, action="extend", metavar="NAMES", help=OPTIMIZER
    )


def report_parser() -> Parser:
    """`%speedkit report`."""
    parser = Parser("%speedkit report")
    about = f"{MODEL}, or all that have a plan"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=about)
    parser.add_argument("--json", action="store_true", help="one JSON document in place of tables")
    return parser


def code_parser() -> Parser:
    """`%speedkit code`."""
    parser = Parser("%speedkit code")
    _model(parser)
    form = "what it is written for (torch)"
    action = parser.add_argument("--as", dest="form", default="torch", metavar="FORM", help=form)
    action.words = FORMS  # type: ignore[attr-defined]
    parser.add_argument("--save", metavar="FILE", help="write it to a file")
    parser.add_argument("--force", action="store_true", help="write over an existing FILE")
    return parser


def panel_parser() -> Parser:
    """`%speedkit panel`."""
    parser = Parser("%speedkit panel")
    _model(parser)
    step = "the function to measure; without it the last %%speedbench cell"
    parser.add_argument("--step", metavar="NAME", help=step)
    return parser


def config_parser() -> Parser:
    """`%speedkit config`."""
    parser = Parser("%speedkit config")
    actions = ("show", "load", "save", "reset")
    what = "what to do with what apply starts from (show)"
    parser.add_argument(
        "action", nargs="?", choices=actions, default="show", metavar="ACTION", help=what
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a YAML file, for load and save")
    return parser


def history_parser() -> Parser:
    """`%speedkit history`."""
    parser = Parser("%speedkit history")
    name = "what was given to %%speedbench --save; without it all names"
    parser.add_argument("name", nargs="?", metavar="NAME", help=name)
    parser.add_argument("--forget", action="store_true", help="delete what has this name")
    return parser


def verify_parser() -> Parser:
    """`%speedkit verify`."""
    parser = Parser("%speedkit verify")
    parser.add_argument(
        "--steps", type=_whole_number, default=50, metavar="NUMBER", help="steps of each curve (50)"
    )
    step = "the function that trains; without it the last %%speedbench cell"
    parser.add_argument("--step", metavar="NAME", help=step)
    plan = "a plan as for --compare; without it what is applied, learned, or by rules"
    parser.add_argument("--plan", metavar="NAME", help=plan)
    parser.add_argument("-v", metavar="NAME", help="the variable that the result gets")
    return parser


def tuned_parser() -> Parser:
    """`%speedkit tuned`."""
    parser = Parser("%speedkit tuned")
    what = "show them or drop one (list)"
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "forget"),
        default="list",
        metavar="ACTION",
        help=what,
    )
    parser.add_argument("which", nargs="?", metavar="NUMBER", help="for forget: its number, or all")
    return parser


@lru_cache(maxsize=1)
def speedbench_parser() -> Parser:
    """`%%speedbench`: options of `%%timeit`, and those of a comparison."""
    parser = Parser("%%speedbench")
    plans = "compare plans: baseline, current, auto, words as bf16+compile, YAML files, saved names"
    parser.add_argument("--compare", metavar="NAMES", help=plans)
    budget = "for all but compiling (10, for a search 20, or more where a step is long)"
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=budget)
    models = "the models that get the plans; without it those that the cell uses"
    parser.add_argument("--model", type=_names, action="extend", metavar="NAMES", help=models)
    optimizers = "their optimizers; without it those that the cell uses"
    parser.add_argument(
        "--optimizer", type=_names, action="extend", metavar="NAMES", help=optimizers
    )
    check = "what the cell leaves, to compare in place of what backward ran on"
    parser.add_argument("--check", type=_names, action="extend", metavar="NAMES", help=check)
    save = "keep the result for %speedkit history and --compare"
    parser.add_argument("--save", metavar="NAME", help=save)
    for option, what in SWITCHES.items():
        parser.add_argument(option, action="store_true", help=what)
    aim = "with --tune: what to make less of (time)"
    parser.add_argument("--objective", choices=("time", "memory"), help=aim)
    steps = "with --tune: the least total time for so many steps, compiling included"
    parser.add_argument("--steps", type=_whole_number, metavar="NUMBER", help=steps)
    loops = "timing: loops in a run; 0 or none: until a run takes 0.2 s"
    parser.add_argument("-n", type=int, metavar="LOOPS", help=loops)
    parser.add_argument("-r", type=_whole_number, metavar="RUNS", help="timing: how many runs (7)")
    parser.add_argument("-p", type=_digits, metavar="DIGITS", help="timing: digits to show (3)")
    parser.add_argument("-v", metavar="NAME", help="the variable that the result gets")
    return parser


SWITCHES = {
    "--tune": "search the fastest safe plan for this cell",
    "--apply": "with --tune: put it into force, a plan that is known at once",
    "--fresh": "with --tune: search although a plan is known",
    "--throughput": "await the device only after blocks of steps",
    "-q": "show nothing",
    "-o": "return the result",
    "-t": "timing: by the wall clock (time.time)",
    "-c": "timing: by CPU time",
}


def help_parser() -> Parser:
    """`%speedkit help`."""
    parser = Parser("%speedkit help")
    topics = (*SUBCOMMANDS, "speedbench")
    action = parser.add_argument(
        "topic", nargs="?", choices=topics, metavar="TOPIC", help="one of them; without it all"
    )
    action.words = topics  # type: ignore[attr-defined]
    return parser


# What has options, in the order of help.
PARSERS: dict[str, Callable[[], Parser]] = {
    "speedbench": speedbench_parser,
    "apply": apply_parser,
    "report": report_parser,
    "verify": verify_parser,
    "tuned": tuned_parser,
    "code": code_parser,
    "panel": panel_parser,
    "history": history_parser,
    "config": config_parser,
    "help": help_parser,
}


def _digits(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 15:
        raise argparse.ArgumentTypeError(f"{text} is no number of digits: give 0 to 15")
    return number


def _whole_number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of times: give 1 or more")
    return number
