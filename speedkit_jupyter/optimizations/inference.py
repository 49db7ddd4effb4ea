"""What a model that only predicts can do without: autograd's records, and batch norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.options import Fields
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.predicting.predicted_calls import Predicting
from speedkit_jupyter.optimizations.properties.calls import CALLS, around
from speedkit_jupyter.support.exceptions import SpeedKitError

# Folded as torch.fx does it, part by part where it can't trace the whole.
FOLD = """\
# Batch norms go into the convolutions before them; train and load weights before that.
def fold(module):
    if not any("BatchNorm" in type(part).__name__ for part in module.modules()):
        return module
    try:
        return fuse(module)
    except Exception:  # torch.fx can't trace it
        for name, child in module.named_children():
            setattr(module, name, fold(child))
        return module


model = fold(model.eval())"""


class Inference(Optimization):
    """The model has to be in eval mode: in training mode it would compute something else, and
    switching it is for the user.
    """

    name = "inference"
    effect = Effect.ROUNDING  # a folded batch norm multiplies the weights, not what comes out
    summary = "inference mode, and batch norms folded into the convolutions before them"
    helps = "prediction with convolutions and batch norms, or by code without torch.no_grad()"
    risk = "weights that are written to through .data or NumPy later are not seen in folded ones"
    undone = "calls are recorded by autograd again; weights and modes were never touched"
    page = "https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.inference_mode.html"

    class Options(Fields):
        """`fold`: batch norms, where torch.fx shows that they follow a convolution; `freezing`:
        compiled code has the weights as constants.
        """

        enabled: Switch = Field("auto", description="auto, true, false")
        fold: Switch = Field("auto", description="auto, true, false")
        freezing: bool = Field(False, strict=True, description="true, false")

    default = Options()

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """For models in eval mode that nothing trains."""
        options = request.value
        if options.enabled is False:
            return request.leave(False, asked=True)
        if why := _obstacle(facts):
            return request.decline(False, why)
        if options.enabled == "auto":
            norms = f", {facts.batch_norms} batch norms" if facts.batch_norms else ""
            return request.leave(False, f"the model is in eval mode{norms}; it is there on request")
        details = {"fold": options.fold is not False and facts.batch_norms > 0}
        details["freezing"] = options.freezing and facts.compiles
        rule = f"up to {facts.batch_norms} batch norms are folded" if details["fold"] else ""
        hint = ""
        if options.freezing and not facts.compiles:
            hint = "there is nothing to freeze without compile"
        return request.obey(True, rule, hint=hint, details=details)

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """A call of the model will predict, and record nothing."""
        return {"model.inference": bool(decision.value)}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """A layer around the model's calls; in a benchmark for its own thread's alone."""
        with CALLS.wished(_layers(decision, target)):
            try:
                yield
            finally:
                if decision.value and target.memo.predicting is not None:
                    target.memo.predicting.end()

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torch's own context manager; Trainer has nothing of the kind."""
        if form == "transformers":
            raise SpeedKitError("Trainer trains, and inference does not: take --as torch")
        forward = ("torch.inference_mode()",)
        if not decision.details.get("fold"):
            return Snippet(model=("model.eval()",), forward=forward)
        imports = ("from torch.fx.experimental.optimization import fuse",)
        return Snippet(imports=imports, model=tuple(FOLD.splitlines()), forward=forward)

    def observe(self, target: Target) -> Mapping[str, Any]:
        """Whether a call of the model only predicts."""
        return {"model.inference": around(target.model, Predicting)}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """On, where nothing trains."""
        return () if _obstacle(facts) else (True,)


def _obstacle(facts: Facts) -> str:
    """Why this model can't be one that only predicts; empty where it can."""
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


def _layers(decision: Decision, target: Target) -> Iterator[Any]:
    if not decision.value:
        return
    predicting = target.memo.predicting
    if predicting is None:
        details = decision.details
        predicting = target.memo.predicting = Predicting(
            target, details.get("fold", True), details.get("freezing", False)
        )
    predicting.only_in = target.only_in
    yield from predicting.layers()
