"""%%speedbench: parse the line and the cell, drain the engine, display."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.context import SpeedContext
from speedkit_jupyter.exceptions import SpeedKitError
from speedkit_jupyter.magics import parsing
from speedkit_jupyter.magics.cell import Cell
from speedkit_jupyter.magics.namespace import find_model, named_optimizers
from speedkit_jupyter.magics.progress import ProgressLine
from speedkit_jupyter.measure.benchmark import Benchmark
from speedkit_jupyter.measure.reach import (
    bystanders_among,
    optimizers_among,
    others_among,
    outermost,
)
from speedkit_jupyter.measure.step import Step
from speedkit_jupyter.measure.variants import parse
from speedkit_jupyter.report.comparisons import comparison_report


def run(shell: Any, line: str, source: str) -> None:
    """One `%%speedbench` cell. Ctrl-C shows the results so far and then stops the notebook."""
    __tracebackhide__ = True
    arguments = parsing.speedbench_parser().parse_line(line)
    cell = Cell(shell, source)
    try:
        variants = parse(arguments.compare)
        benchmark = Benchmark(_step(shell, cell, arguments), variants, arguments.budget)
        _drain(benchmark, arguments.budget, len(variants))
    except SpeedKitError as error:
        raise UsageError(f"%%speedbench: {error}") from None


def _drain(benchmark: Benchmark, budget_s: float, variants: int) -> None:
    __tracebackhide__ = True
    with ProgressLine(f"{variants} variants, {budget_s:g} s after warm-up") as progress:
        steps = benchmark.run()
        try:
            for one in steps:
                progress.show(one.done, one.text)
        except KeyboardInterrupt:
            steps.close()
            if any(record.times_s for record in benchmark.result().records):
                progress.replace(comparison_report(benchmark.result()))
            raise
        progress.replace(comparison_report(benchmark.result()))


def _step(shell: Any, cell: Cell, arguments: Any) -> Step:
    """The cell with the models and optimizers that it uses, or those that were named."""
    names = shell.user_ns
    reached = cell.objects()
    models, optimizers = outermost(reached), optimizers_among(reached)
    if arguments.model:
        models = [find_model(names, name)[1] for name in arguments.model]
    if not models:
        raise UsageError(
            "%%speedbench: the cell uses no model that was there before: make it in an earlier "
            "cell, and name it with --model where the code hides it"
        )
    if arguments.optimizer:
        optimizers = list(named_optimizers(names, arguments.optimizer).values())
    calls_context = cell.reads("ctx")

    def step(context: SpeedContext) -> Any:
        __tracebackhide__ = True
        if calls_context:
            names["ctx"] = context
        return cell.run()

    for name in cell.beyond_undo():
        print(f"{name} is written to for real: that can't be put back")
    return Step(
        step,
        models,
        optimizers,
        bystanders_among(reached, [*models, *optimizers]),
        calls_context,
        names,
        assigned=[*cell.assigned(), *(["ctx"] if calls_context else [])],
        others=others_among(reached),
        iterators=cell.iterators(),
    )
