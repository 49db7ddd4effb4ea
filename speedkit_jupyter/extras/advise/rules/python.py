"""Rules about Python, between and instead of torch's operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from speedkit_jupyter.extras.advise.advice import Gain, Opportunity, amdahl, without
from speedkit_jupyter.extras.advise.observed_call import ModelCall
from speedkit_jupyter.extras.advise.situation import Situation
from speedkit_jupyter.extras.profile.split import Part
from speedkit_jupyter.support.source_lines import Spot, source
from speedkit_jupyter.support.units import share


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
        busy = 1.0 if seen.profile.costs is None else seen.profile.costs.busy or 0.0
        taken = min(waiting + asking, 1.0) if seen.on_cpu else waiting
        yield Opportunity(
            f"ask for values less often: {seen.profile.place(spot)}",
            f"synchronizations: {wait.times:.3g} in a step at `{source(*spot) or wait.line.call}`, "
            f"{share(taken)} of it",
            amdahl(taken if seen.on_cpu else min(taken, 1 - busy), 1.5, 20.0),
            "keep tensors (`loss.detach()`) and ask once, for all of them, every so many steps",
            "values are known later",
            spots=(spot,),
        )


# So many calls with one row each, of which so many are tried at once.
LEAST_CALLS, MOST_TRIED = 4, 64


def one_by_one(seen: Situation) -> Iterator[Opportunity]:
    """Find a model that is asked sample by sample, none made of another's result, by trying."""
    groups = defaultdict[tuple[int, int], list[ModelCall]](list)
    for call in seen.calls:
        groups[id(call.module), call.step].append(call)
    many = max(groups.values(), key=len, default=[])
    shapes = {tuple(tuple(one.shape) for one in call.inputs) for call in many}
    if len(many) < LEAST_CALLS or len(shapes) > 1 or not any(shapes):
        return
    if any(len(shape) > 1 and shape[0] > 1 for shape in min(shapes)):
        return  # more than one row
    names = [type(one).__name__ for one in many[0].module.modules()]
    if many[0].training and any("BatchNorm" in name for name in names):
        return
    if any(one.grad_fn is not None for call in many[1:] for one in call.inputs):
        return  # a call gets what an earlier one gave
    rows = min(len(many), MOST_TRIED)
    times = (seen.ratio(many[0], many[0].with_rows(rows)) or 0.0) * rows
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


def recurrent_cells(seen: Situation) -> Iterator[Opportunity]:
    """Find recurrent cells in a loop of Python's, where torch has the whole layer."""
    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        calls = seen.watched.times[kind] / seen.steps
        names = {seen.name(one, "") for one in seen.modules if type(one) is kind}
        taken, every = seen.module_share(names), seen.module_share()
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
    calls, keys, again = seen.calls, set[object](), list[ModelCall]()
    for call in calls:
        if call.key in keys and call.inputs and not _has_dropout(call):
            again.append(call)
        keys.add(call.key)
    for call in {id(one.module): one for one in again}.values():
        twice = len(again) / len(calls)
        taken = seen.share("forward") * twice
        if taken < 0.03:
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
    dropouts = [one for one in call.module.modules() if "Dropout" in type(one).__name__]
    return any(getattr(one, "training", False) and getattr(one, "p", 1) for one in dropouts)


# Lines this near each other are one matter, which takes at least this share of the step, and this
# share of its own time is Python's: large tensors need no advice.
NEAR, LEAST_SLOW, PYTHON = 3, 0.15, 0.3


def slow_lines(seen: Situation) -> Iterator[Opportunity]:
    """Find lines of Python that take much of the step, of which no other rule has spoken."""
    said = {spot for one in seen.said for spot in one.spots}
    parts: list[Part] = ["rest"]
    if not any(one.part == "data" for one in seen.said):
        parts.append("data")
    for part in parts:
        lines = [line for line in seen.profile.lines.costliest(part) if line[0] not in said]
        while lines:
            # The costliest line, with those near it.
            (file, number), _ = lines[0]
            near = [one for one in lines
                    if one[0].file == file and abs(one[0].number - number) <= NEAR]  # fmt: skip
            lines = [one for one in lines if one not in near]
            spots, taken = [spot for spot, _ in near], sum(each for _, each in near)
            python = sum(seen.profile.lines.python.get(spot, 0.0) for spot in spots)
            if taken < LEAST_SLOW or python < PYTHON * taken:
                continue
            yield Opportunity(
                f"write {seen.profile.place(spots[0])} with less Python, or run it less often",
                f"{'Python' if part == 'rest' else 'loading'}: {share(taken)} of the step at "
                f"`{source(*spots[0])}`",
                amdahl(taken, 1.3),  # nobody knows what it is worth when it is written otherwise
                "operations on whole tensors, every tenth step only, or once at the end",
                "depends on what you write",
                spots=tuple(spots),
            )
