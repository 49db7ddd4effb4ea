"""Rules about lines of the user's own."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from speedkit_jupyter.extras.advise import trials
from speedkit_jupyter.extras.advise.advice import Opportunity, Remedy, amdahl
from speedkit_jupyter.extras.advise.observed_call import FunctionCode, dotted, is_called
from speedkit_jupyter.extras.advise.situation import Situation
from speedkit_jupyter.extras.profile.split import Part
from speedkit_jupyter.support.source_lines import Spot, source
from speedkit_jupyter.support.units import share
from speedkit_jupyter.torchglue.private import MULTIPLY_ALL


class CostlyCall(NamedTuple):
    """A call that is slow wherever its line takes a share of the step."""

    names: tuple[str, ...]  # the dotted ends of the functions' names
    title: str
    least: float  # times as fast as the line gets, at least
    remedy: str
    risk: str
    trial: Remedy | None = None


CALLS = {
    "cleaning": CostlyCall(
        ("gc.collect", "empty_cache"),
        "leave {code} out of the step", 5.0,
        "once after the training, if at all",
        "circular garbage stays in memory a little longer", trials.nothing_collected,
    ),
    "copied_state": CostlyCall(
        ("deepcopy", "torch.save", "load_state_dict"),
        "copy or save the model once an epoch, not in each step", 4.0,
        "under `if` a validation loss got better, or every N steps",
        "the copy is up to an epoch older",
    ),
    "tensor_of_list": CostlyCall(
        ("torch.tensor", "torch.as_tensor", "torch.FloatTensor", "torch.LongTensor"),
        "make this tensor once, or of a whole array", 1.8,
        "torch.from_numpy(array), or make the tensor once, before the loop",
        "a tensor of an array shares its memory",
    ),
    "writing": CostlyCall(
        ("print", "display", "savefig", "imshow", "plot", "add_scalar", "add_scalars", "add_image",
         "add_histogram", "to_csv", "to_json", "dump", "write", "flush", "fsync", "savez", "info",
         "set_postfix", "clear_output", "np.save", "numpy.save", "wandb.log", "mlflow.log_metric"),
        "{name}() every N steps only", 5.0,
        "if step % 50 == 0: around it, with values that were collected until then",
        "fewer entries in the log",
    ),
}  # fmt: skip


class CostlyLine(NamedTuple):
    """A statement of the user's with its share of the step."""

    place: str
    node: ast.AST
    spots: tuple[Spot, ...]
    share: float

    @property
    def evidence(self) -> str:
        text = ast.unparse(self.node).partition("\n")[0]
        return f"{self.place}: `{text}`, {share(self.share)} of the step"


def _costly(seen: Situation, nodes: Iterable[tuple[FunctionCode, ast.AST]]) -> Iterator[CostlyLine]:
    """Yield statements that take 3 % of the step or more, each once."""
    known = set[tuple[Spot, ...]]()
    for code, node in nodes:
        taken, spots = seen.line_share(code, node), code.spots(code.statement(node))
        if taken >= 0.03 and spots not in known:
            known.add(spots)
            yield CostlyLine(seen.profile.place(code.spots(node)[0]), node, spots, taken)


def costly_calls(rule: str, seen: Situation) -> Iterator[Opportunity]:
    """Find the calls that are listed in CALLS under the rule's name."""
    kind = CALLS[rule]
    for line in _costly(seen, seen.observed.code_calls(*kind.names)):
        assert isinstance(line.node, ast.Call)
        words = {"code": ast.unparse(line.node), "name": dotted(line.node.func).rpartition(".")[2]}
        title, gain = kind.title.format_map(words), amdahl(line.share, kind.least)
        yield Opportunity(title, line.evidence, gain, kind.remedy, kind.risk,
                          trial=kind.trial, spots=line.spots)  # fmt: skip


def growing_copies(seen: Situation) -> Iterator[Opportunity]:
    """Find `memory = torch.cat([memory, row])`: each row costs a copy of all rows before it."""
    nodes = ((code, node) for code, node in seen.observed.nodes(ast.Assign) if _grows(node))
    for line in _costly(seen, nodes):
        yield Opportunity(
            f"write into memory that exists already: {line.place}",
            f"{line.evidence}, copies all rows for each new row",
            amdahl(line.share, 3.0),  # a row in place costs next to nothing
            "a list that is joined once; or torch.empty(capacity, …) and memory[at] = row",
            spots=line.spots,
        )


def _grows(node: ast.Assign) -> bool:
    """Return whether a statement joins its own target with something."""
    target, call = dotted(node.targets[0]), node.value
    joining = ("cat", "concat", "concatenate", "append", "hstack", "vstack", "insert")
    if len(node.targets) > 1 or "?" in target or not is_called(call, *joining):
        return False
    return any(dotted(one) == target for one in ast.walk(call))


def parameter_loops(seen: Situation) -> Iterator[Opportunity]:
    """Find `for p in model.parameters(): …`: an operator for each, where one could do all."""
    loops = seen.observed.nodes(ast.For, ast.ListComp, ast.GeneratorExp)
    for line in _costly(seen, (found for found in loops if _is_over_all(found[1]))):
        yield Opportunity(
            f"one call for all parameters in place of {line.place}",
            f"{line.evidence}, goes through them in Python",
            amdahl(line.share, 1.0, 8.0),  # large tensors gain nothing
            "clip_grad_norm_ or get_total_norm of torch.nn.utils; an optimizer of torch.optim; for "
            f"averages torch.optim.swa_utils.AveragedModel; {MULTIPLY_ALL} and its like on lists",
            "sums are added up in another order",
            spots=line.spots,
        )


def _is_over_all(node: Any) -> bool:
    """Return whether a loop or comprehension goes through parameters, and not for NumPy, which has
    no call for all.
    """
    iterated = node.iter if isinstance(node, ast.For) else node.generators[0].iter
    every = ("parameters", "named_parameters", "buffers")
    if not any(is_called(one, *every) for one in ast.walk(iterated)):
        return False
    calls = (dotted(one.func) for one in ast.walk(node) if isinstance(one, ast.Call))
    return not any(one.startswith(("np.", "numpy.")) or one.endswith(".numpy") for one in calls)


def synchronizations(seen: Situation) -> Iterator[Opportunity]:
    """Find lines that wait for the device: `.item()`, `print(loss)`, `if loss > 0`.

    On a CPU they wait for nothing: there many in one step count, with the loop around them.
    """
    own = seen.profile.lines.own.items()
    for wait in seen.profile.waits():
        spot = Spot(wait.line.file, wait.line.number)
        waiting = min(wait.seconds / seen.step_s, 1.0) if seen.step_s else 0.0
        if waiting < 0.02 or (seen.on_cpu and wait.times < 16):
            continue
        asking = sum(each for (at, part), each in own if at == spot and part in ("rest", "data"))
        busy = 1.0 if seen.profile.costs is None else seen.profile.costs.busy or 0.0
        taken = min(waiting + asking, 1.0) if seen.on_cpu else waiting
        yield Opportunity(
            f"ask for values less often: {seen.profile.place(spot)}",
            f"synchronizations: {wait.times:.3g} in a step at `{source(*spot) or wait.line.call}`, "
            f"{share(taken)} of it",
            amdahl(taken if seen.on_cpu else min(taken, 1 - busy), 1.5, 20.0),
            "keep tensors (`loss.detach()`) and ask once for all of them, every N steps",
            "values are known later",
            spots=(spot,),
        )


def slow_lines(seen: Situation) -> Iterator[Opportunity]:
    """Find lines of Python that take much of the step, and that no other rule is about."""
    known = {spot for one in seen.found for spot in one.spots}
    parts: list[Part] = ["rest"]
    if not any(one.part == "data" for one in seen.found):
        parts.append("data")
    for part in parts:
        lines = [line for line in seen.profile.lines.costliest(part) if line[0] not in known]
        while lines:
            # The costliest line, with the three lines before and after it.
            (file, number), _ = lines[0]
            near = [one for one in lines if one[0].file == file and abs(one[0].number - number) < 4]
            lines = [one for one in lines if one not in near]
            spots, taken = [spot for spot, _ in near], sum(each for _, each in near)
            python = sum(seen.profile.lines.python.get(spot, 0.0) for spot in spots)
            if taken < 0.15 or python < 0.3 * taken:  # large tensors need no advice
                continue
            yield Opportunity(
                f"write {seen.profile.place(spots[0])} with less Python, or run it less often",
                f"{'Python' if part == 'rest' else 'loading'}: {share(taken)} of the step at "
                f"`{source(*spots[0])}`",
                amdahl(taken, 1.3),  # the gain depends on what the user writes
                "operations on whole tensors, every tenth step only, or once at the end",
                "depends on what you write",
                spots=tuple(spots),
            )
