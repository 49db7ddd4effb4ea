"""Rules about lines of the user's own, found by what they call."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from speedkit_jupyter.extras.advise import trials
from speedkit_jupyter.extras.advise.advice import EXACT, Gain, Opportunity, amdahl
from speedkit_jupyter.extras.advise.code import CodePart, dotted, is_called
from speedkit_jupyter.extras.advise.situation import Situation
from speedkit_jupyter.support.source_lines import Spot
from speedkit_jupyter.support.units import share
from speedkit_jupyter.torchglue.private import MULTIPLY_ALL

Nodes = Iterable[tuple[CodePart, ast.AST]]
# A line that takes less of the step is not worth a word.
LEAST = 0.03


class _Line(NamedTuple):
    """A statement that takes its share of the step."""

    place: str
    node: ast.AST
    spots: tuple[Spot, ...]
    taken: float

    def says(
        self, title: str, gain: Gain, remedy: str, risk: str, words: str = "", **more: Any
    ) -> Opportunity:
        """Return what is to be said of it; `words` tell what it does."""
        evidence = f"{self.place}: {words}{share(self.taken)} of the step"
        return Opportunity(title, evidence, gain, remedy, risk, spots=self.spots, **more)


def _costly(seen: Situation, nodes: Nodes, least: float = LEAST) -> Iterator[_Line]:
    """Yield those whose statements take part of the step, each statement once."""
    told = set[tuple[Spot, ...]]()
    for part, node in nodes:
        taken, spots = seen.line_share(part, node), part.spots(part.statement(node))
        if taken >= least and spots not in told:
            told.add(spots)
            yield _Line(seen.place(part, node), node, spots, taken)


def cleaning(seen: Situation) -> Iterator[Opportunity]:
    """Find `gc.collect()` and `empty_cache()`: what they free is asked for again at once."""
    for line in _costly(seen, seen.code.calls("gc.collect", "empty_cache"), 0.02):
        yield line.says(
            f"leave {ast.unparse(line.node)} out of the step",
            amdahl(line.taken, 5.0),
            "once after the training, if at all",
            "what refers to itself lies in memory a little longer",
            trial=trials.nothing_collected,
        )


def copied_state(seen: Situation) -> Iterator[Opportunity]:
    """Find a model that is copied or saved in every step."""
    for line in _costly(seen, seen.code.calls("deepcopy", "torch.save", "load_state_dict")):
        yield line.says(
            "copy or save the model once an epoch, not in each step",
            amdahl(line.taken, 4.0),
            "under `if` a validation loss got better, or every so many steps",
            "what is kept is up to an epoch older",
            f"`{ast.unparse(line.node)}`, ",
        )


JOINING = ("cat", "concat", "concatenate", "append", "hstack", "vstack", "row_stack", "insert")


def growing_copies(seen: Situation) -> Iterator[Opportunity]:
    """Find `memory = torch.cat([memory, row])`: each row costs a copy of all before it."""
    nodes = ((part, node) for part, node in seen.code.nodes(ast.Assign) if _grows(node))
    for line in _costly(seen, nodes, 0.05):
        yield line.says(
            f"write into memory that is there already: {line.place}",
            amdahl(line.taken, 3.0),  # a row in place costs next to nothing
            "a list that is joined once; or torch.empty(capacity, …) and memory[at] = row",
            EXACT,
            f"`{ast.unparse(line.node)}` copies all of it for each new row: ",
        )


def _grows(node: ast.Assign) -> bool:
    """Return whether it joins what it is assigned to with something."""
    target, call = dotted(node.targets[0]), node.value
    if len(node.targets) > 1 or "?" in target or not is_called(call, *JOINING):
        return False
    return any(dotted(one) == target for one in ast.walk(call))


ITERATED = ("parameters", "named_parameters", "buffers")


def parameter_loops(seen: Situation) -> Iterator[Opportunity]:
    """Find `for p in model.parameters(): …`: an operator for each, where one could do all."""
    nodes = seen.code.nodes(ast.For, ast.ListComp, ast.GeneratorExp)
    for line in _costly(seen, ((part, node) for part, node in nodes if _is_over_all(node))):
        yield line.says(
            f"one call for all parameters in place of {line.place}",
            amdahl(line.taken, 1.0, 8.0),  # large tensors gain nothing
            "clip_grad_norm_ or get_total_norm of torch.nn.utils; an optimizer of torch.optim; for "
            f"averages torch.optim.swa_utils.AveragedModel; {MULTIPLY_ALL} and its like on lists",
            "sums are added up in another order",
            f"Python goes through `{ast.unparse(_iterated(line.node))}`: ",
        )


def _iterated(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        return node.generators[0].iter
    assert isinstance(node, ast.For)
    return node.iter


def _is_over_all(node: ast.AST) -> bool:
    """Return whether it goes through parameters, and not for NumPy, which has no call for all."""
    every = (dotted(call.func) for call in ast.walk(node) if isinstance(call, ast.Call))
    for_numpy = any(call.startswith(("np.", "numpy.")) or call.endswith(".numpy") for call in every)
    is_over = any(is_called(one, *ITERATED) for one in ast.walk(_iterated(node)))
    return is_over and not for_numpy


MADE = ("torch.tensor", "torch.as_tensor", "torch.FloatTensor", "torch.LongTensor", "torch.Tensor")


def tensor_of_list(seen: Situation) -> Iterator[Opportunity]:
    """Find tensors that are made from Python's lists, number by number."""
    calls = seen.code.calls(*MADE)
    of_lists = ((p, c) for p, c in calls if c.args and not isinstance(c.args[0], ast.Constant))
    for line in _costly(seen, of_lists):
        yield line.says(
            "make this tensor once, or of a whole array",
            amdahl(line.taken, 1.8),
            "torch.from_numpy(array), or make the tensor once, before the loop",
            "a tensor of an array shares its memory",
            f"`{ast.unparse(line.node)}`, ",
        )


# What writes, shows or draws, by the last part of its name; `save` alone is anything.
WRITING = (
    *("print", "display", "savefig", "imshow", "plot", "add_scalar", "add_scalars", "add_image"),
    *("add_histogram", "to_csv", "to_json", "dump", "write", "flush", "fsync", "savez"),
    *("info", "set_postfix", "clear_output"),
    *("torch.save", "np.save", "numpy.save", "wandb.log", "mlflow.log_metric"),
)


def writing(seen: Situation) -> Iterator[Opportunity]:
    """Find printing, drawing and saving in every step."""
    calls = (
        (part, node)
        for part, node in seen.code.calls(*WRITING)
        if not isinstance(part.statement(node), ast.For | ast.While | ast.With)
    )
    for line in _costly(seen, calls):
        assert isinstance(line.node, ast.Call)
        yield line.says(
            f"{dotted(line.node.func).rpartition('.')[2]}() every so many steps only",
            amdahl(line.taken, 5.0),
            "if step % 50 == 0: around it, with values that were collected until then",
            "less often in the log",
        )
