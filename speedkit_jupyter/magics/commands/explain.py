"""%speedkit explain: what one optimization does, where it helps, its risk, how it is undone."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.namespace import find_function
from speedkit_jupyter.magics.options import MODEL, add_model, offer
from speedkit_jupyter.magics.planned import planned_or_plain
from speedkit_jupyter.magics.progress import ProgressLine
from speedkit_jupyter.session import Session
from speedkit_jupyter.support.exceptions import did_you_mean
from speedkit_jupyter.support.tracebacks import lets_go

if TYPE_CHECKING:
    from speedkit_jupyter.optimizations.attention.timings import Call, Measured
    from speedkit_jupyter.optimizations.base.optimization import Optimization


@lets_go
def run(names: Names, session: Session, arguments: Namespace) -> None:
    """In general, and for one model; with a step, what was measured on its own calls."""
    __tracebackhide__ = True
    from speedkit_jupyter.optimizations import find
    from speedkit_jupyter.report.catalog_report import explain_report

    optimization = find(arguments.optimization)
    if optimization is None:
        hint = did_you_mean(arguments.optimization, suggestions.optimizations(names))
        raise UsageError(f"%speedkit explain: no {arguments.optimization!r} in the catalog.{hint}")
    rows = () if arguments.step is None else _measured(names, optimization, arguments.step)
    plan, name = planned_or_plain(names, session, arguments.model)
    decision = plan[optimization.name]
    if rows:  # which a plan that is in force does not know of
        decision = replace(decision, evidence=rows)
    display(explain_report(optimization, decision, name))


def _measured(names: Names, optimization: Optimization, name: str) -> tuple[Measured, ...]:
    """Kept beside the models, where plans find it."""
    __tracebackhide__ = True
    from speedkit_jupyter.machines.hardware import Hardware
    from speedkit_jupyter.measure.subject.from_function import step_of
    from speedkit_jupyter.report.attention_table import describe
    from speedkit_jupyter.tuning.attention import of_step

    step = step_of(find_function(names, name, "%speedkit explain"))
    if optimization.name != "sdpa":
        raise UsageError(
            f"%speedkit explain: --step is for sdpa: nothing of {optimization.name} depends on the "
            "calls of a step"
        )
    if not step.models:
        raise UsageError(f"%speedkit explain: {step.why_no_model('explain')}")
    left_out: list[Call] = []
    with ProgressLine(f"measuring the attention kernels on the calls of {name}"):
        rows = of_step(step, Hardware.current(), left_out=left_out)
    for call in dict.fromkeys(left_out):
        print(f"left out, since measuring it takes too long: {describe(call)}")
    if not rows and not left_out:
        print(
            f"{name} makes no call of scaled_dot_product_attention that more than one kernel takes."
        )
    return rows


def _arguments(parser: Parser) -> None:
    which = "a name of the catalog, as gemm"
    offer(
        parser.add_argument("optimization", metavar="NAME", help=which), suggestions.optimizations
    )
    add_model(parser, MODEL)
    step = "sdpa: measure the kernels on the calls that this function makes"
    parser.add_argument("--step", metavar="NAME", help=step)


COMMAND = Command(
    "explain", "what one optimization does, where it helps, its risk", run, _arguments
)
