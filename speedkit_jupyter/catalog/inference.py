"""A model that only predicts: its calls record nothing for a backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.snippet import Form, Snippet
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.properties.calls import Call, around
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue.private import tree_leaves

ASKED = "an input asks for its gradient, so calls are recorded as usual"
TRAINING = "the model is in training mode by now, so calls are recorded as usual: model.eval()"


class Inference(Optimization):
    """The model has to be in eval mode: in training mode it would compute something else, and
    switching it is for the user.
    """

    name = "inference"
    effect = Effect.ROUNDING  # torch takes other kernels for some layers where nothing is recorded
    summary = "calls of the model without autograd's records"
    helps = "prediction by code without torch.no_grad()"
    risk = "no backward pass goes through the results, as under torch.no_grad()"
    undone = "calls are recorded by autograd again; weights and modes were never touched"
    page = "https://docs.pytorch.org/docs/stable/generated/torch.no_grad.html"
    refusal = "a model whose calls record nothing under `inference`"
    Options = Switch

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        offer = "the model is in eval mode; it is there on request"
        return request.on_request(_obstacle(facts), offer)

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        if not decision.value:
            return []
        return [Unrecorded(target.model, target.notes, target.only_in)]

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return torch's own context manager. Raises SpeedKitError for Trainer."""
        if form == "transformers":
            raise SpeedKitError("Trainer trains, and inference does not: take --as torch")
        return Snippet(model=("model.eval()",), forward=("torch.inference_mode()",))

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        is_on = bool(planned.value) if planned else around(target.model, Unrecorded)
        return {"model.inference": is_on}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        return () if _obstacle(facts) else (True,)


def _obstacle(facts: Facts) -> str:
    """Return why this model can't be one that only predicts; empty where it can."""
    if facts.optimizers:
        names = ", ".join(dict.fromkeys(optimizer.name for optimizer in facts.optimizers))
        return f"the step trains: {names} holds the model's parameters"
    if facts.compiled != "no":
        return "the model is compiled already: put torch.inference_mode() around your own call"
    if facts.lazy:
        return "lazy layers have no shape yet: run one forward pass before"
    if facts.training:
        return "the model is in training mode, where it computes something else: model.eval()"
    return ""


class Unrecorded(Call):
    """Calls that record nothing, and are made again in a backward pass; recorded as usual where an
    input asks for its gradient.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model does."""
        if not self._suits((args, kwargs)):
            return self.below(*args, **kwargs)
        # Reentrant: the call is made under `no_grad`, and again in the backward pass, if one comes.
        asks = torch.empty(0, requires_grad=True)
        again = lambda _: self.below(*args, **kwargs)  # noqa: E731
        return checkpoint(again, asks, use_reentrant=True, preserve_rng_state=False)

    def _suits(self, inputs: Any) -> bool:
        """Return whether this call is a prediction that autograd would record."""
        if not self.acts() or not torch.is_grad_enabled():
            return False
        asks = (isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves(inputs))
        why = TRAINING if self.module.training else ASKED if any(asks) else ""
        if why:
            self.notes["inference"] = why
        return not why
