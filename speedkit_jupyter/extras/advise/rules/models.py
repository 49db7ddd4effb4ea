"""Rules of advice about models: calls, gradients, dtypes, attention."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from speedkit_jupyter.catalog.facts.model import attribute
from speedkit_jupyter.extras.advise import situation
from speedkit_jupyter.extras.advise.advice import EXACT, Gain, Opportunity, Subject, amdahl, without
from speedkit_jupyter.extras.advise.situation import FunctionCode, Situation
from speedkit_jupyter.extras.data.batch_sizes import free_bytes
from speedkit_jupyter.support.source_lines import place
from speedkit_jupyter.support.units import count, share, size
from speedkit_jupyter.torchglue.private import SOFTMAX


def one_by_one(seen: Situation) -> Iterator[Opportunity]:
    """Find a model that is called sample by sample; time it with many samples at once."""
    groups = defaultdict[tuple[int, int], list[situation.ObservedModelCall]](list)
    for call in seen.calls:
        groups[id(call.module), call.step].append(call)
    calls = max(groups.values(), key=len, default=[])
    shapes = {tuple(tuple(one.shape) for one in call.inputs) for call in calls}
    if len(calls) < 4 or len(shapes) > 1 or not any(shapes):
        return
    has_rows = any(len(shape) > 1 and shape[0] > 1 for shape in min(shapes))
    classes = [type(one).__name__ for one in calls[0].module.modules()]
    sees_batch = calls[0].training and any("BatchNorm" in name for name in classes)
    is_chained = any(one.grad_fn is not None for call in calls[1:] for one in call.inputs)
    if has_rows or sees_batch or is_chained:
        return
    rows = min(len(calls), 64)  # more rows hardly show a larger gain
    times = seen.ratio(calls[0], calls[0].with_rows(rows)) * rows
    if times < 1.3:
        return
    # Inputs that are views of one tensor exist before the first call, so one call is possible.
    places = [[one.untyped_storage().data_ptr() for one in call.inputs] for call in calls]
    at_hand = all(place == places[0] for place in places)
    around = seen.computing + (seen.share("rest", "synchronizations") if at_hand else 0.0)
    shape = "×".join(map(str, calls[0].inputs[0].shape))
    called = seen.name(calls[0].module, "model")
    yield Opportunity(
        f"call {called} once with all rows",
        f"{len(calls)} calls in a step, each with one row of shape {shape}; one call with {rows} "
        f"rows is {times:.1f} times as fast; the loop: {share(around)} of the step",
        Gain(amdahl(seen.computing, max(times * 0.5, 1.05)).low, amdahl(around, times * 2.0).low),
        f"{called}(torch.stack(rows)) instead of the loop",
        EXACT if at_hand else "only if no row depends on an earlier call's result",
    )


def no_grad(seen: Situation) -> Iterator[Opportunity]:
    """Find a model that is called with gradients enabled but without a backward pass."""
    calls = [call for call in seen.calls if call.has_graph]
    if seen.observed.has_backward or seen.observed.steps or not calls:
        return
    called, part = seen.name(calls[0].module, "the model"), seen.share("forward")
    yield Opportunity(
        f"call {called} under torch.no_grad()",
        f"gradients are on, and no backward pass follows; forward: {share(part)} of the step",
        amdahl(part, 1.0, 1.6),  # recording the graph slows small operators most
        f"with torch.no_grad(): y = {called}(x) (or torch.inference_mode()): less memory, too",
        trial=lambda _: torch.no_grad(),
    )


def anomaly_mode(seen: Situation) -> Iterator[Opportunity]:
    """Find `torch.autograd.set_detect_anomaly(True)`, which records a traceback per operator."""
    if not (seen.observed.in_anomaly_mode and seen.observed.has_backward):
        return
    yield Opportunity(
        "turn anomaly detection off",
        "it is on: each operator records its traceback, and each gradient is searched for NaN; "
        f"forward and backward: {share(seen.computing)} of the step",
        amdahl(seen.computing, 1.2, 8.0),  # costs 25 to 90 µs per operator in torch 2.13
        "torch.autograd.set_detect_anomaly(False)",
        "a NaN is no longer traced to its operator",
    )


def graph_kept(seen: Situation) -> Iterator[Opportunity]:
    """Find `total += loss` and `losses.append(loss)`, which keep the graphs of all steps."""
    for code in seen.observed.code:
        called = (situation.dotted(call.func) for call in code.nodes(ast.Call))
        losses = {one.removesuffix(".backward") for one in called if one.endswith(".backward")}
        for node in code.nodes(ast.AugAssign, ast.Call):
            keeper, kept = _kept(node, losses)
            if not kept or _begins_anew(seen, code, node, keeper):
                continue
            yield Opportunity(
                f"keep {kept} without its graph",
                f"{place(code.lines_of(node)[0])}: `{ast.unparse(node)}` keeps the graph "
                "of every step in memory, which grows",
                # A graph keeps activations until its backward pass, and then a few objects only.
                amdahl(seen.computing, 0.99, 1.05 if seen.observed.has_backward else 1.6),
                f"{kept}.detach() in its place (or .item(), which waits on a GPU)",
                spots=code.lines_of(node),
            )


def _begins_anew(seen: Situation, code: FunctionCode, node: ast.AST, keeper: str) -> bool:
    """Return whether the sum or list `keeper` is reset for each step."""
    # Resets count in the node's function, if it runs in each step, and in loops around the node.
    around: list[ast.AST] = [code.tree] * (seen.steps <= code.calls)
    around += (one for one in code.nodes(ast.For, ast.While) if node in ast.walk(one))
    inside = (one for tree in around for one in FunctionCode(code.code, tree).nodes(ast.Assign))
    names = (name for one in inside for target in one.targets for name in ast.walk(target))
    return any(situation.dotted(name) == keeper for name in names)


def _kept(node: ast.AST, losses: set[str]) -> tuple[str, str]:
    """Return the names of a sum or list, and of the loss that it keeps; "" for a missing name."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        keeper, value = situation.dotted(node.target), node.value
    elif isinstance(node, ast.Call) and situation.is_called(node, "append") and len(node.args) == 1:
        keeper, value = situation.dotted(node.func).removesuffix(".append"), node.args[0]
    else:
        return "", ""
    inside = [*ast.walk(value)]
    plain = ("item", "detach", "float", "tolist", "numpy", "int", "len")
    is_plain = any(situation.is_called(one, *plain) for one in inside)
    if is_plain or keeper in losses:  # `keeper` may itself be a loss, a sum of parts
        return keeper, ""
    return keeper, min({one.id for one in inside if isinstance(one, ast.Name)} & losses, default="")


@contextmanager
def without_gradients(subject: Subject) -> Iterator[None]:
    """In the block, disable gradients of parameters that belong to no optimizer."""
    idle = subject.idle
    try:
        for one in idle:
            one.requires_grad = False
        yield
    finally:
        for one in idle:
            one.requires_grad = True


def frozen_gradients(seen: Situation) -> Iterator[Opportunity]:
    """Find parameters that require gradients although no optimizer updates them."""
    if not (seen.observed.has_backward and seen.held and seen.observed.steps):
        return
    every = [one for one in seen.subject.parameters if id(one) in seen.observed.got_gradients]
    idle = [one for one in every if id(one) not in seen.held]
    # Estimate the share by elements and by tensors: a convolution is slow but has few elements.
    by_size = sum(one.numel() for one in idle) / max(sum(one.numel() for one in every), 1)
    least, most = sorted([by_size, len(idle) / max(len(every), 1)])
    if most < 0.1:
        return
    # Weight gradients take a third or more of a layer's backward pass. Under no_grad, the layer's
    # forward pass saves no activations, which makes it a quarter shorter.
    needless = seen.share("backward") * least * 0.35
    spared = min(seen.share("backward") * most + 0.25 * seen.share("forward") * most, 0.95)
    yield Opportunity(
        "compute no gradients of parameters that are not trained",
        f"{len(idle)} parameters require gradients, and no optimizer holds them; their "
        f"backward pass and their activations take up to {share(spared)} of the step",
        Gain(without(needless), without(spared)),
        f"{_outermost(seen, idle)}.requires_grad_(False), or its call under torch.no_grad()",
        "none, unless your code reads these gradients",
        trial=without_gradients,
    )


def _outermost(seen: Situation, idle: Sequence[torch.nn.Parameter]) -> str:
    """Return the name of the outermost module whose parameters are all idle, or "parameter"."""
    ids = {id(one) for one in idle}
    for module in (part for model in seen.subject.models for part in model.modules()):
        own = {id(one) for one in module.parameters()}
        if own and own <= ids:
            return re.sub(r"\.(\d+)", r"[\1]", seen.name(module, "module"))
    return "parameter"


def needless_checkpointing(seen: Situation) -> Iterator[Opportunity]:
    """Find gradient checkpointing while free memory is at least four times the model's weights."""
    # With checkpointing, the backward pass repeats the forward pass.
    most, free = min(seen.share("forward"), seen.share("backward")), free_bytes(seen.device)
    weights = sum(one.nbytes for one in seen.subject.parameters)
    every = (part for model in seen.subject.models for part in model.modules())
    is_on = any(attribute(one, "gradient_checkpointing") is True for one in every)
    # Training needs weights, gradients and Adam's two moments: four times the weights.
    if not is_on or most < 0.05 or free is None or free < 4 * weights:
        return
    yield Opportunity(
        "keep activations instead of computing them twice",
        f"gradient checkpointing is on, and {size(free)} are free; the "
        f"second forward pass: about {share(most)} of the step",
        Gain(without(most / 2), without(most)),
        "model.gradient_checkpointing_disable(), or gradient_checkpointing=False of a Trainer",
        "activations take memory: smaller batches, if it is not enough",
    )


def adapter_dropout(seen: Situation) -> Iterator[Opportunity]:
    """Find dropout in PEFT adapters: it masks a copy of each adapter's input."""
    named = [pair for model in seen.subject.models for pair in model.named_modules()]
    dropouts = [one for name, one in named if "lora_dropout" in name and attribute(one, "p")]
    layers = [one for one in dropouts if one.training]
    taken = min(seen.operators("aten::native_dropout", "aten::bernoulli", "aten::dropout"), 0.9)
    if seen.observed.has_backward and layers and taken >= 0.02:
        yield Opportunity(
            "train the adapters without dropout",
            f"{count(len(layers), 'dropout layer')} of adapters draw a mask for all of their "
            f"inputs: {share(taken)} of the step",
            Gain(1.0, without(taken)),
            "LoraConfig(…, lora_dropout=0.0)",
            "adapters without dropout may overfit sooner",
        )


def needless_float32(seen: Situation) -> Iterator[Opportunity]:
    """Find frozen float32 weights of an unquantized model whose config has a 16-bit dtype."""
    weights = dict[torch.nn.Parameter, str]()
    for part in [part for model in seen.subject.models for part in model.modules()]:
        config = attribute(part, "config")
        if getattr(config, "quantization_config", None) is not None:
            return
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        if (name := str(dtype).removeprefix("torch.")) in ("bfloat16", "float16"):
            frozen = (one for one in part.parameters() if not one.requires_grad)
            weights |= {one: name for one in frozen if one.dtype is torch.float32}
    if weights and seen.observed.has_backward:
        name = next(iter(weights.values()))
        yield Opportunity(
            f"keep the frozen weights in {name}",
            f"{count(len(weights), 'frozen weight')} of a model that was loaded in {name} are in "
            f"float32, {size(sum(one.nbytes for one in weights) // 2)} more; "
            "prepare_model_for_kbit_training() casts them, for models in 8 or 4 bits alone",
            amdahl(seen.computing, 1.0, 2.0),
            "get_peft_model() without prepare_model_for_kbit_training(): it freezes the weights",
            f"the frozen layers compute in {name}, as the model was loaded",
        )


def double_precision(seen: Situation) -> Iterator[Opportunity]:
    """Find models that compute in float64."""
    computing = seen.share("forward", "backward", "optimizer")
    calls = (one.module for one in seen.calls)
    double = (one for one in calls if any(p.dtype == torch.float64 for p in one.parameters()))
    if (model := next(double, None)) is None or computing < 0.1:
        return
    called = seen.name(model, "the model")
    yield Opportunity(
        f"compute in float32: {called} is in float64",
        f"{called}'s parameters are float64; forward, backward and optimizer: "
        f"{share(computing)} of the step",
        # float64 takes twice the bytes, and many GPUs compute it at 1/32 of float32's rate.
        amdahl(computing, 1.25, 3.0) if seen.on_cpu else amdahl(computing, 1.5, 20.0),
        f"{called}.float(), and x.float() (NumPy's numbers are float64)",
        "7 digits instead of 16; create the optimizer again",
    )


def attention_by_hand(seen: Situation) -> Iterator[Opportunity]:
    """Find a softmax and two or more matrix products in one function of the user's code."""
    names = ("bmm", "baddbmm", "einsum", "matmul", "softmax", "masked_fill", "div")
    taken = min(seen.operators(SOFTMAX, *(f"aten::{name}" for name in names)), 0.9)
    for code in seen.observed.code if taken >= 0.05 else ():
        calls = [*code.nodes(ast.Call)]
        softmax = next((call for call in calls if situation.is_called(call, "softmax")), None)
        products = sum(situation.is_called(call, "matmul", "bmm", "einsum") for call in calls)
        products += sum(isinstance(node.op, ast.MatMult) for node in code.nodes(ast.BinOp))
        if softmax is None or products < 2:
            continue
        spots = code.lines_of(softmax)
        yield Opportunity(
            "F.scaled_dot_product_attention instead of softmax(q @ k) @ v",
            f"{place(spots[0])}: softmax between two products; products of batches "
            f"and softmax: {share(taken)} of the step",
            amdahl(taken, 1.05, 3.5),
            "F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=…)",
            "rounding; the attention weights are not available",
            spots=spots,
        )
