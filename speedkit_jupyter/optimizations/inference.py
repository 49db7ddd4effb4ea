"""A model that only predicts: its calls record nothing for a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.properties.calls import CALLS, Call, around
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.torch_private import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    import torch

ASKED = "an input asks for its gradient, so calls are recorded as usual"
TRAINING = "the model is in training mode by now, so calls are recorded as usual: model.eval()"
IN_A_LOSS = "a backward pass went through the model, so calls are recorded as usual from then on"
OWN_OBJECTS = "the model returns objects of its own, so calls are recorded as usual"


class Inference(Optimization):
    """The model has to be in eval mode: in training mode it would compute something else, and
    switching it is for the user.
    """

    name = "inference"
    effect = Effect.ROUNDING  # torch takes other kernels for some layers where nothing is recorded
    summary = "calls of the model without autograd's records"
    helps = "prediction by code without torch.no_grad()"
    risk = "a backward pass through the model's results computes the first call again"
    undone = "calls are recorded by autograd again; weights and modes were never touched"
    page = "https://docs.pytorch.org/docs/stable/generated/torch.no_grad.html"
    Options = Annotated[Switch, Field(description="auto, true, false")]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Decide for it by request, for models in eval mode that nothing trains."""
        if request.value is False:
            return request.leave(False, asked=True)
        if why := _obstacle(facts):
            return request.decline(False, why)
        if request.value == "auto":
            return request.leave(False, "the model is in eval mode; it is there on request")
        return request.obey(True)

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Return that a call of the model will record nothing."""
        return {"model.inference": bool(decision.value)}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Put a layer around the model's calls; in a benchmark for its own thread alone."""
        memo = target.memo
        memo.unrecorded = memo.unrecorded or Unrecorded(target.model, target.notes)
        memo.unrecorded.only_in = target.only_in
        with CALLS.overriding([(target.model, memo.unrecorded)] if decision.value else []):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return torch's own context manager. Raises SpeedKitError for Trainer."""
        if form == "transformers":
            raise SpeedKitError("Trainer trains, and inference does not: take --as torch")
        return Snippet(model=("model.eval()",), forward=("torch.inference_mode()",))

    def observe(self, target: Target) -> Mapping[str, Any]:
        """Return whether a call of the model records nothing."""
        return {"model.inference": around(target.model, Unrecorded)}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """Return `true` where nothing trains."""
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


class Unrecorded(Call):
    """Calls under `torch.no_grad()`, whose results can still be differentiated.

    The first backward pass through them makes the call again, recorded. From then on calls are
    recorded as usual; `notes` says so.
    """

    def __init__(self, model: torch.nn.Module, notes: dict[str, str]) -> None:
        super().__init__(model)
        self._notes = notes
        self._records = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model does, in the same containers."""
        import torch

        model = self.module  # which its results keep, as recorded ones would keep its layers
        parameters = [p for p in model.parameters() if p.requires_grad]
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not parameters or not self._suits(inputs):
            return self.below(*args, **kwargs)
        rerun = _as_now(partial(self._again, model, args, kwargs), parameters[0].device)
        with torch.no_grad():
            leaves, structure = tree_flatten(self.below(*args, **kwargs))
        if not all(map(_is_plain, leaves)):
            self._record(OWN_OBJECTS)
            return rerun()
        places = [n for n, leaf in enumerate(leaves) if _is_differentiable(leaf)]

        def recorded() -> list[torch.Tensor]:
            self._record(IN_A_LOSS)
            results = tree_leaves(rerun())
            return [results[n] for n in places]

        results = [leaves[n] for n in places]
        sizes = len(results), len(parameters)
        given = _differentiable().apply(recorded, *sizes, *results, *parameters, *inputs)
        for n, result in zip(places, given, strict=True):
            leaves[n] = result
        return tree_unflatten(leaves, structure)

    def _again(self, model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        call = model._call_impl if self.inner is None else self.inner
        return call(*args, **kwargs)

    def _suits(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether this call is a prediction that autograd would record."""
        import torch

        if self._records or not self.is_here() or not torch.is_grad_enabled():
            return False
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return False
        if self.module.training:
            self._notes["inference"] = TRAINING
            return False
        if any(tensor.requires_grad for tensor in inputs):
            self._notes["inference"] = ASKED
            return False
        return True

    def _record(self, why: str) -> None:
        self._records, self._notes["inference"] = True, why


def _is_plain(leaf: Any) -> bool:
    """Whether a result is a tensor, or holds none."""
    import torch

    return type(leaf) is torch.Tensor or isinstance(leaf, str | bytes | int | float | None)


def _is_differentiable(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _as_now(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return the call, to be made later with this moment's autocast and random numbers."""
    import torch

    kind = device.type
    autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
    devices = [] if kind == "cpu" else [device]
    random = [
        torch.get_rng_state(),
        *(torch.get_device_module(kind).get_rng_state(one) for one in devices),
    ]

    def later() -> Any:
        with (
            torch.enable_grad(),
            autocast,
            torch.random.fork_rng(devices, device_type=kind if devices else "cuda"),
        ):
            torch.set_rng_state(random[0])
            for one, state in zip(devices, random[1:], strict=True):
                torch.get_device_module(kind).set_rng_state(state, one)
            return call()

    return later


@cache
def _differentiable() -> Any:
    """Return the autograd function that gives results a gradient after they were computed."""
    import torch

    class Differentiable(torch.autograd.Function):
        """Its arguments: what makes the call again, how many results there are, how many
        parameters, and then the tensors: results, parameters, and inputs of the call.
        """

        @staticmethod
        def forward(ctx: Any, recorded: Any, count: int, own: int, *tensors: torch.Tensor) -> Any:
            ctx.recorded, ctx.results, ctx.parameters = recorded, count, own
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*tensors[count:])  # backward fails if they were written to
            return tuple(map(_alias, tensors[:count]))

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
            parameters = ctx.saved_tensors[: ctx.parameters]
            pairs = zip(ctx.recorded(), gradients, strict=True)
            led = [(result, g) for result, g in pairs if g is not None and result.requires_grad]
            given: Any = (None,) * len(parameters)
            if led:
                results, upstream = zip(*led, strict=True)
                further = torch.is_grad_enabled()
                given = torch.autograd.grad(
                    results, parameters, upstream, create_graph=further, allow_unused=True
                )
            inputs = len(ctx.saved_tensors) - len(parameters)
            return None, None, None, *(None,) * ctx.results, *given, *(None,) * inputs

    return Differentiable


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor on the same memory, which is no view to autograd."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    empty: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor)  # type: ignore[no-any-return]
