"""Source of a model's call, from the signature of its `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from speedkit_jupyter.support.wrappers import layers

Block = list[str]
INDENT = "    "
PASSED_ON = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
# Inputs of a call: one tensor, several positional tensors, or a mapping by name.
ONE, SEVERAL, BATCH = "inputs", "*inputs", "**batch"
LIGHTNING = ("loss = {model}.training_step(batch, 0)",)
# Models with labels return a dict, or an output of transformers, which supports the same access.
LABELS = ('loss = {call}["loss"]',)
# torch's optimizer that needs a closure, in which it calls the model.
BY_CLOSURE = "LBFGS"


def indented(lines: Iterable[str]) -> Block:
    return [f"{INDENT}{line}" if line else "" for line in lines]


@dataclass(frozen=True)
class ModelCall:
    """How a script calls the model: with `inputs` ONE, SEVERAL or BATCH.

    `own_loss` has the lines of a model that computes its loss from the batch. Without them, a
    loss function compares the result with `targets`.
    """

    inputs: str = ONE
    own_loss: tuple[str, ...] = ()

    @property
    def given(self) -> str:
        return self.inputs.strip("*")

    @property
    def arguments(self) -> str:
        return "batch" if self.own_loss else f"{self.given}, targets, loss_fn"

    def of(self, model: str) -> str:
        return f"{model}({self.inputs})"

    def loss(self, model: str) -> Block:
        call = self.of(model)
        own = [line.format(model=model, call=call) for line in self.own_loss]
        return own or [f"loss = loss_fn({call}, targets)"]

    def moved(self, to: str, trains: bool) -> Block:
        """Return the line that moves a batch; `to` is a method call, or empty."""
        names = ["batch"] if trains and self.own_loss else [self.given, *["targets"] * trains]
        joined = ", ".join(names)
        if not to:
            return []
        if self.inputs == ONE and not self.own_loss:
            return [f"{joined} = {', '.join(f'{name}{to}' for name in names)}"]
        # transformers' batches are dict-like objects that torch's functions do not recognize.
        given = joined.replace("batch", "{**batch}") if self.inputs == BATCH else joined
        return [f"{joined} = tree_map_only(torch.Tensor, lambda one: one{to}, ({given}))"]


def call_of(model: torch.nn.Module | None) -> ModelCall:
    """Return the call of a model; by default `model(inputs)`."""
    parameters = _parameters(model)
    if _is_a(model, "LightningModule"):
        return ModelCall(own_loss=LIGHTNING)
    if "labels" in (parameters or ()):
        return ModelCall(BATCH, LABELS)
    required = [one for one in (parameters or {}).values() if one.default is one.empty]
    if _is_a(model, "PreTrainedModel") or any(one.kind is one.KEYWORD_ONLY for one in required):
        return ModelCall(BATCH)
    plain = [one for one in required if one.kind <= one.POSITIONAL_OR_KEYWORD]
    return ModelCall(SEVERAL if len(plain) > 1 or parameters == {} else ONE)


def _parameters(model: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of the outermost `forward` that doesn't only pass arguments on."""
    for layer in layers(model):
        try:
            parameters = dict(inspect.signature(layer.forward).parameters)
        except (AttributeError, TypeError, ValueError):
            return None
        kinds = {parameter.kind for parameter in parameters.values()}
        if not parameters or kinds - PASSED_ON:
            return parameters
    return None


def _is_a(model: Any, name: str) -> bool:
    """Return whether a base class has this name, without importing its library."""
    return any(base.__name__ == name for layer in layers(model) for base in type(layer).__mro__)
