"""Whether a variant still computes the same: one isolated step each, against float64.

What is compared: the tensors on which backward ran (or what the step returned), all gradients
before the first optimizer step, and how far the parameters moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from speedkit_jupyter.measure.confinement import optimizer_hooks, patched

if TYPE_CHECKING:
    import torch

Verdict = Literal["exact", "rounding", "wrong", "not checked"]

# Relative errors of outputs and of gradients that rounding can bring, by the lowest precision.
# Outputs: the unit in the last place times a depth of some hundred (float32) or 16 roundings.
# Gradients have steps besides: a ReLU or a maximum that falls the other way by rounding alone
# moved whole gradients by up to 7e-4 in float32 networks of some layers.
LIMITS = {
    "fp32": (2e-4, 1e-2),
    "tf32": (2.0**-11 * 16, 5e-2),
    "fp16": (2.0**-11 * 16, 5e-2),
    "bf16": (2.0**-8 * 16, 0.25),
}
# Parameters that move less or more than this share of the baseline's step did other work.
LEAST_MOVE, MOST_MOVE = 0.2, 5.0


@dataclass
class Observation:
    """What one step computed up to its first optimizer step, on the CPU in float64, flattened.

    `moved` is how far the parameters are from where they were when the whole step is done.
    """

    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    moved: float = 0.0
    complete: bool = False


@dataclass(frozen=True)
class Accuracy:
    """Relative errors (norms) against the reference, and the baseline's own beside them."""

    verdict: Verdict
    reason: str = ""
    output_error: float | None = None
    gradient_error: float | None = None
    gradient_cosine: float | None = None
    baseline_output_error: float | None = None
    baseline_gradient_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


NOTHING_TO_COMPARE = (
    "there was no backward pass and no result to compare: end the step with its result, or name "
    "it with --check"
)


class _Enough(BaseException):
    """Ends a step at its first optimizer step, where all that is needed is known."""


@contextmanager
def observing(
    models: Sequence[torch.nn.Module],
    scale: Callable[[], float],
    loss_is_scaled: bool = False,
    stop_at_step: bool = False,
) -> Iterator[Observation]:
    """Watch one step. `scale` is the loss scale in force, 1 without a GradScaler."""
    import torch

    seen = Observation()
    parameters = [p for model in models for p in model.parameters()]
    start = [p.detach().clone() for p in parameters]
    left = _versions(parameters)
    in_closure = False

    def watching(backward: Any) -> Callable[..., None]:
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not seen.complete:
                divisor = scale() if loss_is_scaled else 1.0
                seen.outputs += [one / divisor for one in _flat(tensors)]
            backward(tensors, *args, **kwargs)
            if in_closure:  # its first evaluation comes before anything has moved
                complete(1.0)

        return watched

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal in_closure
        in_closure = any(callable(one) for one in (*args, *kwargs.values()))
        if not in_closure:
            # A fused optimizer is handed the scale, for every other it is taken out before.
            still_in = getattr(optimizer, "grad_scale", None)
            complete(1.0 if still_in is None else float(still_in))

    def complete(still_in: float) -> None:
        if not seen.complete:
            seen.gradients = _made_since(left, parameters, still_in)
            seen.complete = True
        if stop_at_step:
            raise _Enough

    with (
        patched(torch.autograd, "backward", watching),
        optimizer_hooks(before_step),
        suppress(_Enough),
    ):
        yield seen
    if not seen.complete:
        seen.gradients = _made_since(left, parameters, scale())
    moves = [
        (p.detach() - old).double().norm() ** 2 for p, old in zip(parameters, start, strict=True)
    ]
    seen.moved = float(sum(float(one) for one in moves)) ** 0.5


@contextmanager
def without_dropout(models: Sequence[torch.nn.Module]) -> Iterator[bool]:
    """Dropout layers off for the block, since each kernel draws other masks; yields if any was."""
    import torch
    from torch.nn.modules.dropout import _DropoutNd

    found: list[tuple[Any, str, float]] = []
    for module in (part for model in models for part in model.modules()):
        name = "p" if isinstance(module, _DropoutNd) else "dropout"
        kinds = (_DropoutNd, torch.nn.MultiheadAttention, torch.nn.RNNBase)
        if isinstance(module, kinds) and getattr(module, name) and module.training:
            found.append((module, name, getattr(module, name)))
            setattr(module, name, 0.0)
    try:
        yield bool(found)
    finally:
        for module, name, value in found:
            setattr(module, name, value)


@contextmanager
def in_float64(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Models in float64, and every float32 tensor that meets them promoted.

    The caller puts parameters and buffers back (their dtype comes with their values).
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_map

    def promoted(one: Any) -> Any:
        low = isinstance(one, torch.Tensor) and one.dtype is torch.float32
        return one.double() if low else one

    class Promoting(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return function(*tree_map(promoted, args), **tree_map(promoted, kwargs or {}))

    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.grad = None
            if tensor.dtype is torch.float32:
                tensor.data = tensor.data.double()
    with Promoting():
        yield


def differ(one: Observation, other: Observation) -> bool:
    """Whether two runs of the same step gave other outputs or gradients."""
    errors = (_error(one.outputs, other.outputs), _gradient_error(one, other))
    return any(error > 0 for error in errors)


def judge(
    seen: Observation,
    reference: Observation,
    baseline: Observation,
    precision: str,
    is_random: bool = False,
) -> Accuracy:
    """Exact as the baseline, rounding as its dtype brings, or wrong.

    A step that draws random numbers of its own may differ for that reason alone: where it
    `is_random`, more than rounding is no verdict, unless it is not finite.
    """
    if not reference.outputs and not any(g is not None for g in reference.gradients):
        return Accuracy("not checked", NOTHING_TO_COMPARE)
    if not _finite(baseline):
        return Accuracy("not checked", "the step itself gives numbers that are not finite")
    output, gradient = _error(seen.outputs, reference.outputs), _gradient_error(seen, reference)
    own_output = _error(baseline.outputs, reference.outputs)
    own_gradient = _gradient_error(baseline, reference)
    verdict, reason = _verdict(
        seen, baseline, (output, gradient), (own_output, own_gradient), precision
    )
    if verdict == "wrong" and is_random and output < float("inf") and gradient < float("inf"):
        verdict, reason = "not checked", "the step draws random numbers; kernels draw others"
    cosine = _cosine(seen, reference)
    return Accuracy(verdict, reason, output, gradient, cosine, own_output, own_gradient)


def _verdict(
    seen: Observation,
    baseline: Observation,
    errors: tuple[float, float],
    own: tuple[float, float],
    precision: str,
) -> tuple[Verdict, str]:
    limits = [max(limit, 4 * mine) for limit, mine in zip(LIMITS[precision], own, strict=True)]
    for what, error, limit in zip(("output", "gradients"), errors, limits, strict=True):
        if not _finite(seen):
            return "wrong", f"{what}: not finite"
        if error != error or error == float("inf"):
            return "wrong", f"{what}: others than the baseline's in number or shape"
        if error > limit:
            return (
                "wrong",
                f"{what} off by {error:.2g}, more than {precision} explains ({limit:.2g})",
            )
    if baseline.moved > 0 and not LEAST_MOVE < seen.moved / baseline.moved < MOST_MOVE:
        return "wrong", f"the parameters moved {seen.moved / baseline.moved:.2g} times as far"
    close = all(error <= 2 * mine + 1e-6 for error, mine in zip(errors, own, strict=True))
    return ("exact", "") if close else ("rounding", "")


def _finite(seen: Observation) -> bool:
    return all(
        bool(one.isfinite().all()) for one in (*seen.outputs, *seen.gradients) if one is not None
    )


def _error(seen: Sequence[Any], reference: Sequence[Any]) -> float:
    """Norm of the difference over the norm of the reference; infinite where shapes differ."""
    if len(seen) != len(reference):
        return float("inf")
    difference = total = 0.0
    for one, other in zip(seen, reference, strict=True):
        if one is None or other is None:
            if one is not other:
                return float("inf")
            continue
        if one.shape != other.shape:
            return float("inf")
        difference += float((one - other).norm() ** 2)
        total += float(other.norm() ** 2)
    if total == 0:
        return 0.0 if difference == 0 else float("inf")
    return float((difference / total) ** 0.5)


def _gradient_error(seen: Observation, reference: Observation) -> float:
    return _error(seen.gradients, reference.gradients)


def _cosine(seen: Observation, reference: Observation) -> float | None:
    pairs = [
        (one, other)
        for one, other in zip(seen.gradients, reference.gradients, strict=False)
        if one is not None and other is not None and one.shape == other.shape
    ]
    dot = sum(float((one * other).sum()) for one, other in pairs)
    norms = [sum(float(p[i].norm() ** 2) for p in pairs) ** 0.5 for i in (0, 1)]
    return dot / (norms[0] * norms[1]) if all(norms) else None


def _flat(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a result, wherever they lie in it."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [
        one.detach().to("cpu", torch.float64)
        for one in tree_leaves(value)
        if isinstance(one, torch.Tensor) and one.is_floating_point()
    ]


def _versions(parameters: Sequence[Any]) -> list[tuple[Any, int]]:
    """The gradients that lie there, and how often each was written to."""
    return [(p.grad, 0 if p.grad is None else p.grad._version) for p in parameters]


def _made_since(
    left: Sequence[tuple[Any, int]], parameters: Sequence[Any], scale: float
) -> list[torch.Tensor | None]:
    """The gradients, without those that an earlier step has left behind: of a second model that is
    trained later in the step, say.
    """
    now = _versions(parameters)
    return [
        None if new[0] is old[0] and new[1] == old[1] else gradient
        for old, new, gradient in zip(left, now, _gradients(parameters, scale), strict=True)
    ]


def _gradients(parameters: Sequence[Any], scale: float) -> list[torch.Tensor | None]:
    import torch

    found: list[torch.Tensor | None] = []
    for one in parameters:
        gradient = one.grad
        if gradient is not None and gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        found.append(
            None if gradient is None else gradient.detach().to("cpu", torch.float64) / scale
        )
    return found


def returned(value: Any) -> list[torch.Tensor]:
    """The tensors that a step gave back, for a step without a backward pass."""
    return _flat(value)
