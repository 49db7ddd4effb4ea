"""Rules about Python, between and instead of torch's operators."""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TypeVar

from speedkit_jupyter.advice import trials
from speedkit_jupyter.advice.code import Part, dotted, is_called
from speedkit_jupyter.advice.gain import Gain, amdahl, without
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.advice.watched import ModelCall
from speedkit_jupyter.profiling.lines import Spot, source
from speedkit_jupyter.profiling.split import Part as PartOfStep
from speedkit_jupyter.support.words import share

N = TypeVar("N", bound=ast.AST)

# A line that takes less of the step is not worth a word.
LEAST = 0.03


def _costly(
    seen: Situation, nodes: Iterable[tuple[Part, N]], least: float = LEAST
) -> Iterator[tuple[Part, N, float]]:
    """Yield those whose statements take part of the step, each statement once, with the share."""
    told = set[tuple[Spot, ...]]()
    for part, node in nodes:
        statement = part.statement(node)
        taken, spots = seen.line_share(part, node), part.spots(statement)
        if taken < least or spots in told:
            continue
        told.add(spots)
        yield part, node, taken


def cleaning(seen: Situation) -> Iterator[Opportunity]:
    """Find `gc.collect()` and `empty_cache()`: what they free is asked for again at once."""
    import torch

    calls = seen.code.calls("gc.collect", "empty_cache")
    for part, node, taken in _costly(seen, calls, 0.02):
        yield Opportunity(
            f"leave {ast.unparse(node.func)}() out of the step",
            f"{seen.place(part, node)}: {share(taken)} of the step",
            amdahl(taken, 5.0),
            "once after the training, if at all",
            "what refers to itself lies in memory a little longer",
            trial=partial(trials.doing_nothing, [(gc, "collect"), (torch.cuda, "empty_cache")]),
            spots=part.spots(part.statement(node)),
        )


def copied_state(seen: Situation) -> Iterator[Opportunity]:
    """Find a model that is copied or saved in every step."""
    calls = seen.code.calls("deepcopy", "torch.save", "load_state_dict")
    found = list(_costly(seen, calls))
    if not found:
        return
    taken = min(sum(each for _, _, each in found), 0.98)
    part, node, _ = found[0]
    yield Opportunity(
        "copy or save the model once an epoch, not in each step",
        f"{seen.place(part, node)}: `{ast.unparse(node)}`, {share(taken)} of the step",
        amdahl(taken, 4.0),
        "under `if` a validation loss got better, or every so many steps",
        "what is kept is up to an epoch older",
        spots=tuple(spot for where, one, _ in found for spot in where.spots(where.statement(one))),
    )


JOINING = ("cat", "concat", "concatenate", "append", "hstack", "vstack", "row_stack", "insert")


def growing_copies(seen: Situation) -> Iterator[Opportunity]:
    """Find `memory = torch.cat([memory, row])`: each row costs a copy of all before it."""
    found = defaultdict[Part, list[ast.Assign]](list)
    for part, node in seen.code.nodes(ast.Assign):
        if _grows(node):
            found[part].append(node)
    for part, nodes in found.items():
        taken = min(seen.line_share(part, *nodes), 0.95)
        if taken < 0.05:
            continue
        yield Opportunity(
            f"write into memory that is there already: {seen.place(part, nodes[0])}",
            f"`{ast.unparse(nodes[0])}` copies all of it for each new row: {share(taken)} of the "
            "step",
            # A row that is written in place costs next to nothing; the whole is copied once.
            amdahl(taken, 3.0),
            "a list that is joined once; or torch.empty(capacity, …) and memory[at] = row",
            spots=tuple(spot for node in nodes for spot in part.spots(node)),
        )


def _grows(node: ast.Assign) -> bool:
    """Return whether it joins what it is assigned to with something."""
    if len(node.targets) != 1 or not is_called(node.value, *JOINING):
        return False
    target, call = dotted(node.targets[0]), node.value
    if "?" in target or not isinstance(call, ast.Call):
        return False
    held = (one for argument in call.args for one in ast.walk(argument))
    return any(isinstance(one, ast.Name | ast.Attribute) and dotted(one) == target for one in held)


ITERATED = ("parameters", "named_parameters", "buffers")


def parameter_loops(seen: Situation) -> Iterator[Opportunity]:
    """Find `for p in model.parameters(): …`: an operator for each, where one could do all."""
    for part, node in seen.code.nodes(ast.For, ast.ListComp, ast.GeneratorExp):
        iterated = _iterated(node)
        calls = [one for one in ast.walk(iterated) if isinstance(one, ast.Call)]
        over = any(dotted(call.func).rpartition(".")[2] in ITERATED for call in calls)
        if not over or _is_for_numpy(node):
            continue
        inner = [*node.body, node.iter] if isinstance(node, ast.For) else [node]
        taken = min(seen.line_share(part, *inner), 0.9)
        if taken < LEAST:
            continue
        yield Opportunity(
            f"one call for all parameters in place of {seen.place(part, node)}",
            f"Python goes through `{ast.unparse(iterated)}`: {share(taken)} of the step",
            amdahl(taken, 1.0, 8.0),  # large tensors gain nothing
            _for_all(ast.unparse(node)),
            "sums are added up in another order",
            spots=part.spots(node),
        )


def _iterated(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        return node.generators[0].iter
    assert isinstance(node, ast.For)
    return node.iter


def _is_for_numpy(node: ast.AST) -> bool:
    """Return whether each one is given to NumPy: no call of torch's does that for all."""
    calls = [dotted(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)]
    return any(call.startswith(("np.", "numpy.")) or call.endswith(".numpy") for call in calls)


def _for_all(text: str) -> str:
    if "norm" in text:
        return "torch.nn.utils.clip_grad_norm_(model.parameters(), …), or get_total_norm(grads)"
    if ".grad" in text:
        return "an optimizer of torch.optim: it steps all of them in a few calls"
    return (
        "torch.compile around the update, which makes one kernel of all; for averages "
        "torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn"
    )


MADE = ("torch.tensor", "torch.as_tensor", "torch.FloatTensor", "torch.LongTensor", "torch.Tensor")


def tensor_of_list(seen: Situation) -> Iterator[Opportunity]:
    """Find tensors that are made from Python's lists, number by number."""
    for part, node, taken in _costly(seen, seen.code.calls(*MADE)):
        if not node.args or isinstance(node.args[0], ast.Constant):
            continue
        yield Opportunity(
            "make this tensor once, or of a whole array",
            f"{seen.place(part, node)}: `{ast.unparse(node)}`, {share(taken)} of the step",
            amdahl(taken, 1.8),
            "torch.from_numpy(array), or make the tensor once, before the loop",
            "a tensor of an array shares its memory",
            spots=part.spots(part.statement(node)),
        )


# What writes, shows or draws, by the last part of its name; `save` alone is anything.
WRITING = {
    *("print", "display", "savefig", "imshow", "plot", "add_scalar", "add_scalars", "add_image"),
    *("add_histogram", "to_csv", "to_json", "dump", "write", "flush", "fsync", "savez"),
    *("info", "set_postfix", "clear_output"),
}
SAVING = ("torch.save", "np.save", "numpy.save", "wandb.log", "mlflow.log_metric")


def writing(seen: Situation) -> Iterator[Opportunity]:
    """Find printing, drawing and saving in every step."""
    calls = (
        (part, node)
        for part, node in seen.code.nodes(ast.Call)
        if (dotted(node.func) in SAVING or dotted(node.func).rpartition(".")[2] in WRITING)
        and not isinstance(part.statement(node), ast.For | ast.While | ast.With)
    )
    for part, node, taken in _costly(seen, calls):
        called = dotted(node.func).rpartition(".")[2]
        yield Opportunity(
            f"{called}() every so many steps only",
            f"{seen.place(part, node)}: {share(taken)} of the step",
            amdahl(taken, 5.0),
            "if step % 50 == 0: around it, with values that were collected until then",
            "less often in the log",
            spots=part.spots(part.statement(node)),
        )


def synchronizations(seen: Situation) -> Iterator[Opportunity]:
    """Find lines that wait for the device: `.item()`, `print(loss)`, `if loss > 0`.

    On a CPU they wait for nothing: there many in one step count, with the loop that asks.
    """
    own = seen.profile.lines.own.items()
    for wait in seen.profile.waits():
        spot = Spot(wait.line.file, wait.line.number)
        waiting = min(wait.seconds / seen.step_s, 1.0) if seen.step_s else 0.0
        if waiting < 0.02 or (seen.on_cpu and wait.times < 16):
            continue
        asking = sum(each for (at, part), each in own if at == spot and part in ("rest", "data"))
        taken = min(waiting + asking, 1.0) if seen.on_cpu else waiting
        busy = 1.0 if seen.profile.costs is None else seen.profile.costs.busy or 0.0
        idle = taken if seen.on_cpu else min(taken, 1 - busy)
        text = source(*spot) or wait.line.call
        yield Opportunity(
            f"ask for values less often: {seen.profile.place(spot)}",
            f"synchronizations: {wait.times:.3g} in a step at `{text}`, {share(taken)} of it",
            amdahl(idle, 1.5, 20.0),
            "keep tensors (`loss.detach()`) and ask once, for all of them, every so many steps",
            "values are known later",
            spots=(spot,),
        )


# So many calls with one row each, of which so many are tried at once.
LEAST_CALLS, MOST_TRIED = 4, 64


def one_by_one(seen: Situation) -> Iterator[Opportunity]:
    """Find a model that is asked sample by sample, none made of another's result, by trying."""
    groups = defaultdict[tuple[int, int], list[ModelCall]](list)
    for call in seen.watched.of_models():
        groups[id(call.module), call.step].append(call)
    many = max(groups.values(), key=len, default=[])
    if len(many) < LEAST_CALLS or not _have_one_row(many) or _has_batch_norm(many[0]):
        return
    if any(one.grad_fn is not None for call in many[1:] for one in call.inputs):
        return  # a call gets what an earlier one gave
    rows = min(len(many), MOST_TRIED)
    ratio = seen.ratio(many[0], many[0].with_rows(rows))
    times = 0.0 if ratio is None else ratio * rows
    if times < 1.3:
        return
    # Rows that are parts of the same tensors were there before the first call.
    places = [[one.untyped_storage().data_ptr() for one in call.inputs] for call in many]
    at_hand = all(place == places[0] for place in places)
    around = seen.computing + (seen.share("rest", "synchronizations") if at_hand else 0.0)
    shape = "×".join(map(str, many[0].inputs[0].shape))
    yield Opportunity(
        f"call {seen.name(many[0].module, 'the model')} once with all rows",
        f"{len(many)} calls in a step, each with one row of shape {shape}; one call with {rows} "
        f"rows is {times:.1f} times as fast; the loop: {share(around)} of the step",
        Gain(amdahl(seen.computing, max(times * 0.5, 1.05)).low, amdahl(around, times * 2.0).low),
        "model(torch.stack(rows)) in place of the loop",
        "batch norm in training sees the whole batch"
        if at_hand
        else "only where no row is made of what an earlier call gave (a roll-out's, a text's)",
    )


def _have_one_row(calls: list[ModelCall]) -> bool:
    shapes = {tuple(tuple(one.shape) for one in call.inputs) for call in calls}
    if len(shapes) != 1:
        return False
    (inputs,) = shapes
    return bool(inputs) and all(not shape or shape[0] == 1 or len(shape) == 1 for shape in inputs)


def _has_batch_norm(call: ModelCall) -> bool:
    names = (type(one).__name__ for one in call.module.modules())
    return call.training and any("BatchNorm" in name for name in names)


def recurrent_cells(seen: Situation) -> Iterator[Opportunity]:
    """Find recurrent cells in a loop of Python's, where torch has the whole layer."""
    from torch import nn

    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        calls = seen.watched.times[kind] / seen.steps
        modules = (one for model in seen.models for one in model.modules() if type(one) is kind)
        names = {seen.name(one, "") for one in modules}
        taken, _ = seen.modules(names)
        every, _ = seen.modules()
        # Without a trace the cells count as all there is: so many calls mostly are.
        taken = seen.computing * (taken / every if every else 1.0)
        if calls < 8 or taken < 0.1:
            continue
        layer = kind.__name__.removesuffix("Cell")
        yield Opportunity(
            f"nn.{layer} over the whole sequence in place of nn.{kind.__name__}",
            f"{calls:.0f} calls of nn.{kind.__name__} in a step, {share(taken)} of it",
            amdahl(taken, 1.1, 8.0),
            f"nn.{layer}(…, batch_first=True)(sequence), where no moment's input depends on "
            "the output of the one before",
            "its weights have other names: weight_ih becomes weight_ih_l0",
        )


def same_forward_twice(seen: Situation) -> Iterator[Opportunity]:
    """Find a model that is called again on the same tensors, with the same weights."""
    calls, told = seen.watched.of_models(), set[int]()
    again = [
        any(one.is_same_as(call) for one in calls[:number]) for number, call in enumerate(calls)
    ]
    for call, is_again in zip(calls, again, strict=True):
        if not (is_again and call.inputs) or id(call.module) in told or _has_dropout(call):
            continue
        told.add(id(call.module))
        twice = sum(again) / len(calls)
        taken = seen.share("forward") * twice
        if taken < LEAST:
            continue
        # The second one's backward pass, if it has any, goes too.
        graphs = call.has_graph and len(seen.watched.backwards) >= len(calls)
        most = min(taken + (seen.share("backward") * twice if graphs else 0.0), 0.9)
        called = seen.name(call.module, "the model")
        yield Opportunity(
            f"keep the output of {called}, and use it twice",
            f"{called} is called again with the same input: about {share(most)} of the step",
            Gain(amdahl(taken, 3.0).low, without(most)),
            f"out = {called}(x) once; `out.detach()` for what needs no gradient",
        )


def _has_dropout(call: ModelCall) -> bool:
    """Return whether two passes differ on purpose."""
    from torch import nn

    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
                nn.FeatureAlphaDropout)  # fmt: skip
    modules = (one for one in call.module.modules() if isinstance(one, dropouts))
    return any(one.training and one.p > 0 for one in modules)


# Lines this near each other are one matter, which takes at least this share of the step, and this
# share of its own time is Python's: large tensors need no advice.
NEAR, LEAST_SLOW, PYTHON = 3, 0.15, 0.3


def slow_lines(seen: Situation) -> Iterator[Opportunity]:
    """Find lines of Python that take much of the step, of which no other rule has spoken."""
    said = {spot for one in seen.said for spot in one.spots}
    parts: list[PartOfStep] = ["rest"]
    if not any(one.part == "data" for one in seen.said):
        parts.append("data")
    for part in parts:
        lines = [line for line in seen.profile.lines.costliest(part) if line[0] not in said]
        for spots, taken in _together(lines):
            python = sum(seen.profile.lines.python.get(spot, 0.0) for spot in spots)
            if taken < LEAST_SLOW or python < PYTHON * taken:
                continue
            place, text = seen.profile.place(spots[0]), source(*spots[0])
            yield Opportunity(
                f"write {place} without Python's loop, or leave it out",
                f"{'Python' if part == 'rest' else 'loading'}: {share(taken)} of the step at "
                f"`{text}`",
                amdahl(taken, 1.3),  # nobody knows what it is worth when it is written otherwise
                "operations on whole tensors, every tenth step only, or once at the end",
                "depends on what you write",
                spots=tuple(spots),
            )


def _together(lines: list[tuple[Spot, float]]) -> Iterator[tuple[list[Spot], float]]:
    """Yield the costliest line with those near it; then of what is left, and so on."""
    left = list(lines)
    while left:
        first = left[0][0]
        near = [
            one
            for one in left
            if one[0].file == first.file and abs(one[0].number - first.number) <= NEAR
        ]
        left = [one for one in left if one not in near]
        yield [spot for spot, _ in near], sum(taken for _, taken in near)
