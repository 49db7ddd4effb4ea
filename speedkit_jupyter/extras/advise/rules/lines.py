"""Rules of advice about lines of the user's code: slow calls, waits for the device."""

from __future__ import annotations

import ast
import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from speedkit_jupyter.extras.advise import situation
from speedkit_jupyter.extras.advise.advice import EXACT, Opportunity, Remedy, Subject, amdahl
from speedkit_jupyter.extras.advise.situation import FunctionCode, ObservedCall, Situation
from speedkit_jupyter.extras.profile.profile import Part
from speedkit_jupyter.support.source_lines import Spot, place, source
from speedkit_jupyter.support.units import share
from speedkit_jupyter.torchglue.confinement import patched
from speedkit_jupyter.torchglue.private import MULTIPLY_ALL


@contextmanager
def nothing_collected(_: Subject) -> Iterator[None]:
    nothing = lambda original: lambda *args, **kwargs: None  # noqa: E731
    with patched(gc, "collect", nothing), patched(torch.cuda, "empty_cache", nothing):
        yield


class CostlyCode(NamedTuple):
    """A kind of slow statement, and its remedy.

    `nodes` finds such statements in the code that ran. They count if they take at least the share
    `taken` of the step. The remedy makes them `least` to `most` times as fast. `title` may contain
    {place}, {code} and {name}, which stands for the called function.
    """

    nodes: Callable[[ObservedCall], Iterable[tuple[FunctionCode, ast.AST]]]
    title: str
    least: float
    remedy: str
    risk: str = EXACT
    because: str = ""
    most: float = math.inf
    taken: float = 0.03
    trial: Remedy | None = None


def _calls(*names: str) -> Callable[[ObservedCall], Iterable[tuple[FunctionCode, ast.AST]]]:
    return lambda seen: (one for one in seen.nodes(ast.Call) if situation.is_called(one[1], *names))


def _growing(seen: ObservedCall) -> Iterator[tuple[FunctionCode, ast.AST]]:
    """Find `memory = torch.cat([memory, row])`, which copies all earlier rows for each new row."""
    joining = ("cat", "concat", "concatenate", "append", "hstack", "vstack", "insert")
    for code, node in seen.nodes(ast.Assign):
        target, call = situation.dotted(node.targets[0]), node.value
        is_plain = (
            len(node.targets) == 1 and "?" not in target and situation.is_called(call, *joining)
        )
        if is_plain and any(situation.dotted(one) == target for one in ast.walk(call)):
            yield code, node


def _over_parameters(seen: ObservedCall) -> Iterator[tuple[FunctionCode, ast.AST]]:
    """Find loops over parameters, except loops that call NumPy: it has no foreach functions."""
    every = ("parameters", "named_parameters", "buffers")
    loops: Any = seen.nodes(ast.For, ast.ListComp, ast.GeneratorExp)
    for code, node in loops:
        iterated = node.iter if isinstance(node, ast.For) else node.generators[0].iter
        calls = [situation.dotted(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)]
        to_numpy = any(one.startswith(("np.", "numpy.")) or one.endswith(".numpy") for one in calls)
        if not to_numpy and any(situation.is_called(one, *every) for one in ast.walk(iterated)):
            yield code, node


def _keeping_logits(seen: ObservedCall) -> Iterator[tuple[FunctionCode, ast.AST]]:
    """Find `kept.append(output.logits)` in evaluation: logits have a number per vocabulary word."""
    small = ("argmax", "topk", "max", "gather", "mean", "sum")
    for code, node in () if seen.has_backward else _calls("append", "extend")(seen):
        inside = [*ast.walk(node)]
        has_logits = any(isinstance(one, ast.Attribute) and one.attr == "logits" for one in inside)
        if has_logits and not any(situation.is_called(one, *small) for one in inside):
            yield code, node


COSTLY = {
    "cleaning": CostlyCode(
        _calls("gc.collect", "empty_cache"),
        "leave {code} out of the step", 5.0,
        "once after the training, if at all",
        "circular garbage stays in memory a little longer", trial=nothing_collected,
    ),
    "copied_state": CostlyCode(
        _calls("deepcopy", "torch.save", "load_state_dict"),
        "copy or save the model once an epoch, not in each step", 4.0,
        "under `if` a validation loss got better, or every N steps",
        "the copy is up to an epoch older",
    ),
    "tensor_of_list": CostlyCode(
        _calls("torch.tensor", "torch.as_tensor", "torch.FloatTensor", "torch.LongTensor"),
        "make this tensor once, or from a whole array", 1.8,
        "torch.from_numpy(array), or make the tensor once, before the loop",
        "the tensor shares the array's memory",
    ),
    "writing": CostlyCode(
        _calls(
            "print", "display", "savefig", "imshow", "plot", "add_scalar", "add_scalars",
            "add_image", "add_histogram", "to_csv", "to_json", "dump", "write", "flush", "fsync",
            "savez", "info", "set_postfix", "clear_output", "np.save", "numpy.save", "wandb.log",
            "mlflow.log_metric",
        ),
        "{name}() every N steps only", 5.0,
        "if step % 50 == 0: around it, with values that were collected until then",
        "fewer entries in the log",
    ),
    "growing_copies": CostlyCode(
        _growing,
        "write into preallocated memory: {place}", 3.0,  # writing in place costs almost nothing
        "collect rows in a list and join it once; or torch.empty(capacity, …) and memory[at] = row",
        because=", copies all rows for each new row",
    ),
    "parameter_loops": CostlyCode(
        _over_parameters,
        "one call for all parameters instead of {place}", 1.0,  # large tensors gain nothing
        "clip_grad_norm_ or get_total_norm of torch.nn.utils; an optimizer of torch.optim; for "
        f"averages torch.optim.swa_utils.AveragedModel; {MULTIPLY_ALL} and its like on lists",
        "sums are added up in another order",
        because=", loops over them in Python", most=8.0,
    ),
    "kept_logits": CostlyCode(
        _keeping_logits,
        "keep predictions instead of logits", 1.0,
        "logits.argmax(-1), or preprocess_logits_for_metrics=… of a Trainer",
        "metrics of probabilities need the logits",
        because=", keeps the logits of all batches in memory", most=20.0, taken=0.0,
    ),
}  # fmt: skip


def costly_code(rule: str, seen: Situation) -> Iterator[Opportunity]:
    """Find statements of kind `COSTLY[rule]` that take at least the share `taken` of the step."""
    kind, known = COSTLY[rule], set[tuple[Spot, ...]]()
    for code, node in kind.nodes(seen.observed):
        taken, spots = seen.line_share(code, node), code.lines_of(node)
        if taken < kind.taken or spots in known:
            continue
        known.add(spots)
        text, where = ast.unparse(node), place(spots[0])
        name = situation.dotted(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        first = text.partition("\n")[0]
        yield Opportunity(
            kind.title.format(place=where, code=text, name=name),
            f"{where}: `{first}`, {share(taken)} of the step{kind.because}",
            amdahl(taken, kind.least, kind.most),
            kind.remedy,
            kind.risk,
            trial=kind.trial,
            spots=spots,
        )


def synchronizations(seen: Situation) -> Iterator[Opportunity]:
    """Find lines that wait for the device: `.item()`, `print(loss)`, `if loss > 0`.

    On a CPU, where no line waits, find lines that read 16 or more values in a step.
    """
    own = seen.profile.lines.own.items()
    for wait in seen.profile.waits():
        spot, call = wait.spot, wait.call
        waiting = min(wait.seconds_per_step / seen.step_s, 1.0) if seen.step_s else 0.0
        if waiting < 0.02 or (seen.on_cpu and wait.times_per_step < 16):
            continue
        asking = sum(each for (at, part), each in own if at == spot and part in ("rest", "data"))
        busy = 1.0 if seen.profile.costs is None else seen.profile.costs.busy or 0.0
        taken = min(waiting + asking, 1.0) if seen.on_cpu else waiting
        yield Opportunity(
            f"ask for values less often: {place(spot)}",
            f"synchronizations: {wait.times_per_step:.3g} in a step at `{source(*spot) or call}`, "
            f"{share(taken)} of it",
            amdahl(taken if seen.on_cpu else min(taken, 1 - busy), 1.5, 20.0),
            "keep tensors (`loss.detach()`) and ask once for all of them, every N steps",
            "values are known later",
            spots=(spot,),
        )


def slow_lines(seen: Situation) -> Iterator[Opportunity]:
    """Find nearby Python lines that together take 15 % of the step and that no other rule found."""
    known = {spot for one in seen.found for spot in one.spots}
    parts: list[Part] = ["rest"]
    if not any(one.part == "data" for one in seen.found):
        parts.append("data")
    for part in parts:
        lines = [line for line in seen.profile.lines.costliest(part) if line[0] not in known]
        while lines:
            # Group the costliest line with the lines up to three above or below it.
            (file, number), _ = lines[0]
            near = [one for one in lines if one[0].file == file and abs(one[0].number - number) < 4]
            lines = [one for one in lines if one not in near]
            spots, taken = [spot for spot, _ in near], sum(each for _, each in near)
            python = sum(seen.profile.lines.python.get(spot, 0.0) for spot in spots)
            if taken < 0.15 or python < 0.3 * taken:  # small, or mostly inside torch
                continue
            yield Opportunity(
                f"write {place(spots[0])} with less Python, or run it less often",
                f"{'Python' if part == 'rest' else 'loading'}: {share(taken)} of the step at "
                f"`{source(*spots[0])}`",
                amdahl(taken, 1.3),  # the gain depends on the user's new code
                "operations on whole tensors, every tenth step only, or once at the end",
                "depends on the new code",
                spots=tuple(spots),
            )
