"""Draw and copy a call's inputs and incoming gradients; name, describe and compare values."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.torchglue.private import tree_map
from speedkit_jupyter.torchglue.storage import has_values, is_plain

Values = dict[str, Any]  # tensors by name
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
# Types whose values are equal if their reprs are equal.
WORDS = (str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
UNKNOWN = " that check() can't compare"
# Kernels load up to this many elements at once, so copies keep storage offsets modulo ALIGNED.
ALIGNED = 64
# Weights change by about this share from call to call, as in training. A candidate that caches the
# first weights then fails the check.
MOVE = 0.1
# An input repeats too often if more than this share of calls get the values of an earlier call: a
# candidate that caches results would then look faster than it is.
REPEATS = 0.1


def places(value: Any, name: str = "output") -> dict[str, Any]:
    """Return a value and all nested values in containers, by location (`output[0]`)."""
    found, is_listed = {name: value}, isinstance(value, list | tuple)
    inside = value.items() if isinstance(value, Mapping) else enumerate(value if is_listed else ())
    for key, part in inside:
        found |= places(part, f"{name}[{key!r}]")
    return found


def form(value: Any) -> str:
    """Return a description of a value, ending in UNKNOWN if check() can't compare the value."""
    kind = type(value)
    if _is_dense(value):
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        return f"a {kind.__name__} of {dtype}, {shape}, {value.device}"
    if isinstance(value, torch.Tensor):
        layout = str(value.layout).removeprefix("torch.").removeprefix("strided")
        return f"a {layout or kind.__qualname__} tensor{UNKNOWN}"
    if kind in NUMBERS:
        return f"a Python {kind.__name__}"
    if kind in WORDS:
        return repr(value)
    known = {*value} if isinstance(value, Mapping) else set[Any]()
    has_more = not {*getattr(value, "__dict__", ())} <= known
    is_known = isinstance(value, Mapping | list | tuple) and not has_more
    return f"a {kind.__qualname__}{'' if is_known else UNKNOWN}"


def _is_dense(value: Any) -> bool:
    # Tensors of other classes may compute values late, or define their own comparison.
    is_known = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_known and is_plain(value) and has_values(value)


def numbers(value: Any) -> torch.Tensor | None:
    """Return a number or dense tensor as a tensor that torch can compare; None for other values."""
    if type(value) in NUMBERS:
        value = value % 2**63 if type(value) is int else value
        return torch.tensor(value, dtype=NUMBERS[type(value)])
    if not _is_dense(value):
        return None
    is_narrow = value.is_floating_point() and value.element_size() == 1
    return value.float() if is_narrow else value  # type: ignore[no-any-return]


def are_equal(value: Any, before: Any) -> bool:
    first, second = numbers(value), numbers(before)
    if first is None or second is None or form(value) != form(before):
        return form(value) == form(before)
    return torch.equal(first, second) or torch.allclose(first, second, 0, 0, equal_nan=True)


def tensors(parts: Mapping[str, Any]) -> Values:
    return {name: part for name, part in parts.items() if _is_dense(part)}


def copied(parts: Mapping[str, Any]) -> Values:
    known = {name: numbers(part) for name, part in parts.items()}
    return {name: one.detach().clone() for name, one in known.items() if one is not None}


def laid_out(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a copy (of `dtype`, if given) with the same strides, alignment and conjugate bit."""
    if tensor.is_conj():
        return laid_out(tensor.conj(), dtype).conj()
    tensor = tensor.detach().resolve_neg()
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((length - 1) * stride for length, stride in sides) if tensor.numel() else 0
    flat = tensor.as_strided((span,), (1,), tensor.storage_offset())
    offset = tensor.storage_offset() % ALIGNED
    whole = flat.new_zeros((offset + span,), dtype=dtype or tensor.dtype)
    whole[offset:] = flat
    return whole.as_strided(tensor.shape, tensor.stride(), offset)


@dataclass(frozen=True)
class CallInputs:
    """New inputs of one call by name, and values for a module's parameters and buffers."""

    arguments: Mapping[str, Any]
    by_keyword: bool
    seed: int = 0  # of torch's generators
    cotangents: Values = field(default_factory=dict)  # incoming gradients, by output
    weights: Values = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in self.arguments.items():
            found |= places(value, name)
        return found

    def copied(self, wide: bool = False, gradients: bool = False) -> CallInputs:
        """Return a copy: in float64 if `wide`, with tensors that require grad if `gradients`."""

        def copy(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            dtype = torch.float64 if value.is_floating_point() else None
            dtype = torch.complex128 if value.is_complex() else dtype
            found = laid_out(value, dtype if wide else None)
            return found.requires_grad_(gradients and dtype is not None)

        cotangents = {name: copy(one).detach() for name, one in self.cotangents.items()}
        return replace(self, arguments=tree_map(copy, dict(self.arguments)), cotangents=cotangents)

    def written(self, given: CallInputs) -> list[str]:
        """Return the names of inputs and incoming gradients that a call on `given` changed."""
        names = {n: (part, given.inputs.get(n)) for n, part in self.inputs.items()}
        for name, one in self.cotangents.items():
            names[f"incoming gradient of {name}"] = one, given.cotangents[name]
        return [name for name, pair in names.items() if not are_equal(*pair)]


class InputSource:
    """Draw inputs for `reference` from the function `source`."""

    def __init__(self, source: Any, reference: Callable[..., Any], weights: Values) -> None:
        if not callable(source):
            raise ArgumentError("inputs must be a function that returns new tensors: lambda: ...")
        parameters = _parameters(getattr(reference, "forward", reference))
        self._source, self._names = source, [one.name for one in parameters]
        self._random = random.SystemRandom()  # candidates can't predict the inputs
        self._weights = {name: value.detach().clone() for name, value in weights.items()}
        self._moving = [n for n, t in weights.items() if t.requires_grad and t.is_floating_point()]
        self._seen: dict[str, dict[str, list[int]]] = {}  # digests by size and name
        self.takes_size = any(
            p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in _parameters(source)
        )

    def draw(self, size: Any, outputs: Values | None = None, expanded: bool = False) -> CallInputs:
        """Return new inputs and weights, and random incoming gradients for `outputs`.

        With `expanded`, the gradients have a stride of 0. Raises ArgumentError for invalid inputs.
        """
        seed_generators(self._random.getrandbits(60))
        value = self._source(size) if self.takes_size else self._source()
        value = (value,) if isinstance(value, torch.Tensor) else value
        if not isinstance(value, Mapping | list | tuple):
            kind = type(value).__name__
            raise ArgumentError(f"inputs must give tensors in a tuple or a dict, not {kind}")
        more = (f"input_{at}" for at in range(len(self._names), len(value)))
        by_keyword = isinstance(value, Mapping)
        arguments = dict(value if by_keyword else zip([*self._names, *more], value, strict=False))
        moved = {name: _moved(self._weights[name]) for name in self._moving}
        generator = torch.Generator().manual_seed(self._random.getrandbits(60))
        gradients = {n: _cotangent(one, generator, expanded) for n, one in (outputs or {}).items()}
        seed, weights = self._random.getrandbits(60), self._weights | moved
        drawn = CallInputs(arguments, by_keyword, seed, gradients, weights)
        seen = self._seen.setdefault(repr(size), {})
        for name, part in drawn.inputs.items():
            if isinstance(part, torch.Tensor):
                seen.setdefault(name, []).append(_digest(name, part))
        return drawn

    def repeating(self, size: Any) -> list[str]:
        """Return the names of inputs that repeat too often; "all of them" if none are tensors."""
        seen = self._seen.get(repr(size)) or {"all of them": [0, 0]}
        return [n for n, found in seen.items() if len(found) - len({*found}) > REPEATS * len(found)]


def _cotangent(output: torch.Tensor, generator: torch.Generator, expanded: bool) -> torch.Tensor:
    dtype = torch.complex64 if output.is_complex() else torch.float32
    drawn = torch.randn(output.shape, generator=generator, dtype=dtype).to(output)
    if expanded and drawn.numel() and drawn.dim():  # as `.sum()` passes gradients back
        longest = drawn.shape.index(max(drawn.shape))
        return laid_out(drawn.narrow(longest, 0, 1).expand(drawn.shape))
    return drawn


def _digest(name: str, tensor: torch.Tensor) -> int:
    """Return a hash of the values. Raises ArgumentError for a tensor that is not dense."""
    if (known := numbers(tensor)) is None:
        raise ArgumentError(
            f"the input {name} is {form(tensor).removesuffix(UNKNOWN)}: give dense tensors, in "
            "tuples, lists and dicts, and make other objects of these inside"
        )
    flat = known.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hash(flat.view(torch.uint8).numpy().tobytes())


def _moved(weight: torch.Tensor) -> torch.Tensor:
    noise = MOVE * torch.randn_like(weight)
    return weight * (1 + noise) if weight.any() else noise


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions in C have no signature
        return []


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)  # faster than torch.manual_seed
