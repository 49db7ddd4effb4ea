"""Rules about needless gradients, graphs and updates."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from speedkit_jupyter.extras.advise import trials
from speedkit_jupyter.extras.advise.advice import Gain, Opportunity, amdahl, without
from speedkit_jupyter.extras.advise.observed_call import dotted, is_called
from speedkit_jupyter.extras.advise.situation import Situation
from speedkit_jupyter.support.units import share
from speedkit_jupyter.torchglue.private import EMBEDDING_BAG_BACKWARD


def no_grad(seen: Situation) -> Iterator[Opportunity]:
    """Find a model that is called with gradients on and no backward pass."""
    calls = [call for call in seen.calls if call.has_graph]
    if seen.trains or seen.observed.steps or not calls:
        return
    called, part = seen.name(calls[0].module, "the model"), seen.share("forward")
    yield Opportunity(
        f"call {called} under torch.no_grad()",
        f"gradients are on, and no backward pass follows; forward: {share(part)} of the step",
        amdahl(part, 1.0, 1.6),  # small operators pay most for their graph; the trial measures
        "with torch.no_grad(): (or torch.inference_mode()) around it: less memory, too",
        trial=trials.no_gradients,
    )


def anomaly_mode(seen: Situation) -> Iterator[Opportunity]:
    """Find `torch.autograd.set_detect_anomaly(True)`: each operator notes its traceback."""
    if not (seen.observed.in_anomaly_mode and seen.trains):
        return
    yield Opportunity(
        "turn anomaly detection off",
        "it is on: each operator notes its traceback, and each gradient is searched for NaN; "
        f"forward and backward: {share(seen.computing)} of the step",
        amdahl(seen.computing, 1.2, 8.0),  # 25 to 90 µs an operator with torch 2.13
        "torch.autograd.set_detect_anomaly(False)",
        "a NaN is no longer traced to its operator",
        trial=trials.anomaly_mode_off,
    )


def graph_kept(seen: Situation) -> Iterator[Opportunity]:
    """Find `total += loss`, `losses.append(loss)`: every step's graph stays in memory."""
    for code in seen.observed.code:
        called = (dotted(call.func) for call in code.nodes(ast.Call))
        losses = {one.removesuffix(".backward") for one in called if one.endswith(".backward")}
        for node in code.nodes(ast.AugAssign, ast.Call):
            kept = _kept(node, losses)
            if kept is None:
                continue
            yield Opportunity(
                f"keep {kept} without its graph",
                f"{seen.profile.place(code.spots(node)[0])}: `{ast.unparse(node)}` keeps the graph "
                "of every step in memory, which grows",
                # A graph whose backward pass is done is a few objects; another keeps activations.
                Gain(0.99, 1.05) if seen.observed.backwards else Gain(1.0, 1.6),
                f"{kept}.detach() in its place (or .item(), which waits on a GPU)",
                spots=code.spots(node),
                share=seen.computing,
            )


def _kept(node: ast.AST, losses: set[str]) -> str | None:
    """Return the loss that a sum or a list keeps with its graph."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        if dotted(node.target) in losses:
            return None  # one loss of several parts
        value = node.value
    elif isinstance(node, ast.Call) and is_called(node, "append") and len(node.args) == 1:
        value = node.args[0]
    else:
        return None
    inside = [*ast.walk(value)]
    plain = ("item", "detach", "float", "tolist", "numpy", "int", "len")
    if any(is_called(one, *plain) for one in inside):
        return None
    return min({one.id for one in inside if isinstance(one, ast.Name)} & losses, default=None)


def graphs_of_graphs(seen: Situation) -> Iterator[Opportunity]:
    """Find `create_graph=True` without second derivatives, `retain_graph=True` for one pass."""
    passes = seen.observed.backwards
    if not passes or seen.observed.gradients_asked or len(passes) > max(seen.observed.steps, 1):
        return
    retains, creates = (all(each) for each in zip(*passes, strict=True))
    if not (creates or retains):
        return
    word, why = "retain_graph", "keeps its graph, and no other pass follows over it"
    gain = Gain(0.99, amdahl(seen.computing, 1.15).low)
    if creates:
        word, why = "create_graph", "makes a graph of itself, and no second derivatives follow"
        gain = Gain(amdahl(seen.share("backward"), 1.02).low, amdahl(seen.computing, 2.0).low)
    yield Opportunity(
        f"backward() without {word}",
        f"each backward pass {why}; forward and backward: {share(seen.computing)} of the step",
        gain,
        "loss.backward()",
        "no second derivatives, and no second backward pass over the same graph",
        trial=trials.graph_released,
    )


def frozen_gradients(seen: Situation) -> Iterator[Opportunity]:
    """Find parameters that require gradients, and that no optimizer steps."""
    if not (seen.observed.backwards and seen.held and seen.observed.steps):
        return
    every = [one for one in seen.parameters if id(one) in seen.observed.got_gradients]
    idle = [one for one in every if id(one) not in seen.held]
    # A convolution's few parameters take long, an embedding's many do not.
    by_size = sum(one.numel() for one in idle) / max(sum(one.numel() for one in every), 1)
    least, most = sorted([by_size, len(idle) / max(len(every), 1)])
    if most < 0.1:
        return
    # The gradient of a layer's weights is a third of its backward pass or more; under no_grad its
    # forward pass keeps nothing, which saves a quarter of that pass.
    needless = seen.share("backward") * least * 0.35
    spared = min(seen.share("backward") * most + 0.25 * seen.share("forward") * most, 0.95)
    yield Opportunity(
        "compute no gradients of parameters that are not trained",
        f"{len(idle)} parameters require gradients, and no optimizer holds them; their "
        f"backward pass and their activations take up to {share(spared)} of the step",
        Gain(without(needless), without(spared)),
        "backbone.requires_grad_(False), or the backbone under torch.no_grad()",
        "none, unless your code reads these gradients",
        trial=trials.without_gradients,
        unread=trials.not_stepped,
    )


def frozen_in_optimizer(seen: Situation) -> Iterator[Opportunity]:
    """Find frozen parameters that an optimizer goes over in each step."""
    for optimizer in seen.optimizers if seen.observed.steps else ():
        held = [one for group in optimizer.param_groups for one in group["params"]]
        frozen = [one for one in held if not one.requires_grad]
        if not 0.25 * len(held) <= len(frozen) < len(held):
            continue
        stepped = sum(one.grad is not None for one in frozen)
        part = seen.share("optimizer") * len(frozen) / len(held)
        moved = f"; {stepped} of them have an old gradient, and are still moved by it"
        yield Opportunity(
            f"give {seen.name(optimizer, 'the optimizer')} only trained parameters",
            f"{len(frozen)} of its {len(held)} parameters are frozen{moved if stepped else ''}; "
            f"optimizer: {share(seen.share('optimizer'))} of the step",
            Gain(1.0, without(part) if stepped else amdahl(part, 1.5).low),
            "Adam((p for p in model.parameters() if p.requires_grad), …)",
            "its state dict has other numbers for the parameters",
        )


def dense_embeddings(seen: Situation) -> Iterator[Opportunity]:
    """Find embedding tables whose gradient is as large as the table, for a step's few rows."""
    given = (one for call in seen.observed.calls for one in call.inputs)
    rows = (one.numel() for one in given if not (one.is_floating_point() or one.is_complex()))
    asked = sum(rows) / max(seen.observed.steps, 1)
    tables = [one for one in _tables(seen) if one.num_embeddings >= 10 * asked > 0]
    held = sum(one.numel() for one in seen.parameters if id(one) in seen.held)
    part = sum(one.weight.numel() for one in tables) / max(held, 1)
    stepped = seen.share("optimizer") * min(part, 1.0)
    dense = "aten::embedding_backward", "aten::embedding_dense_backward", *EMBEDDING_BAG_BACKWARD
    taken = min(stepped + seen.operators(*dense), 0.95)
    if not tables or not held or taken < 0.05:
        return
    # Without times of operators it can be all of the backward pass.
    most = taken if seen.profile.costs is not None else stepped + seen.share("backward")
    by_rows = all(
        isinstance(one, torch.optim.SGD)
        and not any(group["momentum"] or group["weight_decay"] for group in one.param_groups)
        for one in seen.optimizers
    )
    yield Opportunity(
        f"sparse gradients of {', '.join(seen.name(one, 'an embedding') for one in tables[:3])}",
        f"{sum(one.num_embeddings for one in tables):,} rows, of which a step asks "
        f"{asked:,.0f} at most; their dense gradients and steps: {share(most)} of the step",
        Gain(without(taken * 0.5), without(most)),
        "nn.Embedding(…, sparse=True), and torch.optim.SparseAdam for the tables alone "
        "(plain SGD takes them)",
        "none with plain SGD; else rows that no sample asks for stay as they are, where momentum "
        "or weight decay would move them: another training",
        trial=trials.sparse_tables if by_rows else None,
        share=most,
    )


def _tables(seen: Situation) -> list[torch.nn.Embedding | torch.nn.EmbeddingBag]:
    """Return tables of 100,000 numbers or more that get gradients, and that share no weight."""
    used = [id(one) for module in seen.modules for one in module.parameters(recurse=False)]
    return [
        one
        for one in seen.modules
        if isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag)
        and not (one.sparse or one.scale_grad_by_freq)
        and id(one.weight) in seen.observed.got_gradients
        and used.count(id(one.weight)) == 1
        and one.weight.numel() >= 100_000
    ]
