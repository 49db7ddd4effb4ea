"""How a model is called in training, by the signature of its own forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Kind = Literal["inputs", "several", "batch", "loss", "outputs"]
# As transformers' Trainer takes the loss from whatever a model with labels returns.
TRAINERS_RULE = 'loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]'


@dataclass(frozen=True)
class Call:
    """`inputs`: `model(x)`; `several`: `model(src, tgt)`; `batch`: `model(**batch)`, all with a
    loss function; `loss` and `outputs` compute it themselves, from labels in the batch.

    `parameters` are the names of the inputs.
    """

    kind: Kind = "inputs"
    parameters: tuple[str, ...] = ("x",)

    @property
    def takes_batch(self) -> bool:
        """Whether a batch is a mapping."""
        return self.kind in ("batch", "loss", "outputs")

    @property
    def arguments(self) -> str:
        """What a training step is given."""
        if self.kind in ("loss", "outputs"):
            return "batch"
        return f"{'batch' if self.takes_batch else 'inputs'}, targets, loss_fn"

    def of(self, model: str, inputs: str | None = None) -> str:
        """The call; `inputs` in place of the names that generated code has."""
        if self.takes_batch:
            return f"{model}(**batch)"
        if inputs is None:
            inputs = "*inputs" if self.kind == "several" else "inputs"
        return f"{model}({inputs})"

    def loss(self, model: str, inputs: str | None = None, targets: str = "targets") -> list[str]:
        """The lines that compute `loss`."""
        if self.kind == "loss":
            return [f"loss = {self.of(model)}.loss"]
        if self.kind == "outputs":
            return [f"outputs = {self.of(model)}", TRAINERS_RULE]
        return [f"loss = loss_fn({self.of(model, inputs)}, {targets})"]

    def moved(self, move: str, trains: bool) -> list[str]:
        """The line that moves a batch; `move` is a method call, or nothing."""
        if not move:
            return []
        if self.takes_batch:
            batch = f"batch = {{name: one{move} for name, one in batch.items()}}"
            own = self.kind in ("loss", "outputs") or not trains
            return [batch] if own else [batch, f"targets = targets{move}"]
        if self.kind == "several":
            inputs = f"inputs = [one{move} for one in inputs]"
            return [inputs, f"targets = targets{move}"] if trains else [inputs]
        if trains:
            return [f"inputs, targets = inputs{move}, targets{move}"]
        return [f"inputs = inputs{move}"]


def call_of(model: torch.nn.Module | None) -> Call:
    """How this model is called; as `model(inputs)` where nothing tells."""
    parameters = _parameters(model)
    if "labels" in parameters:
        return Call("loss" if _is_transformers(model) else "outputs")
    if _is_transformers(model):
        return Call("batch")
    required = [
        parameter for parameter in parameters.values() if parameter.default is parameter.empty
    ]
    plain = [
        parameter.name
        for parameter in required
        if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD
    ]
    if any(parameter.kind is parameter.KEYWORD_ONLY for parameter in required):
        return Call("batch")
    if len(plain) > 1 or (model is not None and parameters is not UNKNOWN and not parameters):
        return Call("several", tuple(plain))
    return Call()


UNKNOWN: Mapping[str, inspect.Parameter] = {}


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """Those of forward; of a wrapper that passes everything on, those of what it wraps."""
    for _ in range(5):
        try:
            parameters = inspect.signature(model.forward).parameters
        except (AttributeError, TypeError, ValueError):
            return UNKNOWN
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        passes_on = all(
            parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            for parameter in parameters.values()
        )
        if not (parameters and passes_on):
            return parameters
        if inner is None:
            return UNKNOWN
        model = inner
    return UNKNOWN


def _is_transformers(model: Any) -> bool:
    """Whether it is a model of transformers, which need not be installed to ask."""
    inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    classes = (*type(model).__mro__, *type(inner).__mro__)
    return any(base.__name__ == "PreTrainedModel" for base in classes)


def needs_closure(optimizer: torch.optim.Optimizer | None, name: str) -> bool:
    """Whether its step can't do without a function that computes the loss; `name` is its class."""
    if optimizer is None:
        return name == "LBFGS"
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is closure.empty
