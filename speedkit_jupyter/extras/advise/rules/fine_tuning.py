"""Rules about fine-tuning: adapters, recomputed activations, logits of an evaluation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from speedkit_jupyter.catalog.facts.model import attribute
from speedkit_jupyter.extras.advise.advice import Gain, Opportunity, Subject, amdahl, without
from speedkit_jupyter.extras.advise.situation import Situation, is_called
from speedkit_jupyter.extras.data.batch_sizes import free_bytes
from speedkit_jupyter.support.source_lines import place
from speedkit_jupyter.support.units import count, share, size

# The word in the names of peft's dropout layers.
OF_ADAPTERS = "lora_dropout"


def _dropouts(subject: Subject) -> list[torch.nn.Dropout]:
    named = (pair for model in subject.models for pair in model.named_modules())
    every = (one for name, one in named if OF_ADAPTERS in name)
    return [one for one in every if isinstance(one, torch.nn.Dropout) and one.training and one.p]


@contextmanager
def without_adapter_dropout(subject: Subject) -> Iterator[None]:
    """Set the probability of adapters' dropout to zero in the block."""
    before = [(one, one.p) for one in _dropouts(subject)]
    try:
        for one, _ in before:
            one.p = 0.0
        yield
    finally:
        for one, p in before:
            one.p = p


def adapter_dropout(seen: Situation) -> Iterator[Opportunity]:
    """Find dropout in adapters, which copies and masks each layer's input once more."""
    layers = _dropouts(seen.subject)
    taken = min(seen.operators("aten::native_dropout", "aten::bernoulli", "aten::dropout"), 0.9)
    if not layers or not seen.observed.has_backward or taken < 0.02:
        return
    yield Opportunity(
        "train the adapters without dropout",
        f"{count(len(layers), 'dropout layer')} of adapters draw a mask for all of their inputs: "
        f"{share(taken)} of the step",
        Gain(1.0, without(taken)),
        "LoraConfig(…, lora_dropout=0.0)",
        "adapters without dropout may overfit sooner",
        trial=without_adapter_dropout,
    )


def _checkpointing(subject: Subject) -> list[torch.nn.Module]:
    every = (part for model in subject.models for part in model.modules())
    return [one for one in every if attribute(one, "gradient_checkpointing") is True]


@contextmanager
def without_checkpointing(subject: Subject) -> Iterator[None]:
    """Keep the activations of Hugging Face models in the block."""
    modules = _checkpointing(subject)
    try:
        for one in modules:
            one.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for one in modules:
            one.gradient_checkpointing = True  # type: ignore[assignment]


def needless_checkpointing(seen: Situation) -> Iterator[Opportunity]:
    """Find gradient checkpointing where as much memory is free as the model takes for training."""
    # The backward pass repeats the forward pass.
    most, free = min(seen.share("forward"), seen.share("backward")), free_bytes(seen.device)
    weights = sum(one.nbytes for one in seen.subject.parameters)
    # Training needs weights, gradients and Adam's two moments.
    if not _checkpointing(seen.subject) or most < 0.05 or free is None or free < 4 * weights:
        return
    yield Opportunity(
        "keep activations instead of computing them twice",
        f"gradient checkpointing is on, and {size(free)} are free; the "
        f"second forward pass: about {share(most)} of the step",
        Gain(without(most / 2), without(most)),
        "model.gradient_checkpointing_disable(), or gradient_checkpointing=False of a Trainer",
        "activations take memory: smaller batches, if it is not enough",
        trial=without_checkpointing,
    )


def _cast_up(subject: Subject) -> dict[torch.nn.Parameter, torch.dtype]:
    """Return frozen weights in float32 with the dtype that they were loaded in, if it is lower."""
    found: dict[torch.nn.Parameter, torch.dtype] = {}
    parts = [part for model in subject.models for part in model.modules()]
    configs = [attribute(part, "config") for part in parts]
    if any(getattr(config, "quantization_config", None) is not None for config in configs):
        return found
    for part, config in zip(parts, configs, strict=True):
        name = str(getattr(config, "dtype", None) or getattr(config, "torch_dtype", None))
        dtype = getattr(torch, name.removeprefix("torch."), None)
        if dtype not in (torch.bfloat16, torch.float16):
            continue
        frozen = (one for one in part.parameters() if not one.requires_grad)
        found |= {one: dtype for one in frozen if one.dtype is torch.float32}
    return found


@contextmanager
def in_loaded_dtype(subject: Subject) -> Iterator[None]:
    """Keep frozen weights in the dtype that they were loaded in, in the block."""
    before = [(one, one.data, dtype) for one, dtype in _cast_up(subject).items()]
    try:
        for one, data, dtype in before:
            one.data = data.to(dtype)
        yield
    finally:
        for one, data, _ in before:
            one.data = data


def needless_float32(seen: Situation) -> Iterator[Opportunity]:
    """Find frozen weights in float32 that were loaded in 16 bits, as for a quantized model."""
    weights = _cast_up(seen.subject)
    if not weights or not seen.observed.has_backward:
        return
    name = str(next(iter(weights.values()))).removeprefix("torch.")
    more = sum(one.nbytes for one in weights) // 2
    yield Opportunity(
        f"keep the frozen weights in {name}",
        f"{count(len(weights), 'frozen weight')} of a model that was loaded in {name} are in "
        f"float32, {size(more)} more; prepare_model_for_kbit_training() casts them, which only a "
        "model in 8 or 4 bits needs",
        amdahl(seen.computing, 1.0, 2.0),
        "leave prepare_model_for_kbit_training() out; get_peft_model() freezes the weights itself",
        f"the frozen layers compute in {name}, as the model was loaded",
        trial=in_loaded_dtype,
    )


def kept_logits(seen: Situation) -> Iterator[Opportunity]:
    """Find `all_logits.append(output.logits)`, which keeps a number for each word and token."""
    small = ("argmax", "topk", "max", "gather", "mean", "sum")
    for code, node in () if seen.observed.has_backward else seen.observed.nodes(ast.Call):
        if not is_called(node, "append", "extend") or len(node.args) != 1:
            continue
        inside = [*ast.walk(node.args[0])]
        has_logits = any(isinstance(one, ast.Attribute) and one.attr == "logits" for one in inside)
        if not has_logits or any(is_called(one, *small) for one in inside):
            continue
        spots = code.spots(node)
        yield Opportunity(
            "keep predictions instead of logits",
            f"{place(spots[0])}: `{ast.unparse(node)}` keeps the logits of all batches in memory, "
            "which grows",
            amdahl(seen.line_share(code, node), 1.0, 20.0),
            "logits.argmax(-1), or preprocess_logits_for_metrics=… of a Trainer",
            "metrics of probabilities need the logits",
            spots=spots,
        )
