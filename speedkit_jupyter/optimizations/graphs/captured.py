"""One kind of call, recorded: the forward pass, and a backward pass for each set of results that
gradients come for.

Whatever is replayed is done in the same memory: what it is given is copied there, and what it
gives is copied out, so that the next replay writes over nothing that is still needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.graphs.aliases import alias, as_it_was, by_id, instead
from speedkit_jupyter.optimizations.graphs.call_kinds import Unfit, filled
from speedkit_jupyter.optimizations.graphs.call_results import nodes, results
from speedkit_jupyter.optimizations.graphs.tensor_twins import Twin, copies, copy_of

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.machines.capture import Cuda
    from speedkit_jupyter.optimizations.graphs.capturable import Seen

# What torch.cuda.make_graphed_callables takes: libraries choose kernels, and allocate, in the first
# runs; what they do then must not be recorded.
WARM_UPS = 3
ELSEWHERE = "it keeps its weights in another place too"
MOVES = "it moves its weights together, as an LSTM does"
SPARSE = "its gradients are sparse"


class Captured:
    """Records a call of the model when it is made.

    `call` is given the arguments, with `tensors` among them; `seen` is what the first call has
    shown. `parameters` are the model's, each once, and then their number. `epoch` is the device's:
    once that goes on this is of no use any more. `why` says from when on calls must not come here,
    and `pending` is the forward pass that a backward pass may still come for: the next one would
    write over what it needs. Raises Unfit.
    """

    def __init__(
        self,
        device: Cuda,
        call: Callable[..., Any],
        model: torch.nn.Module,
        parameters: Sequence[torch.Tensor],
        given: tuple[Any, Any],
        tensors: Sequence[torch.Tensor],
        seen: Seen,
    ) -> None:
        self._device, self._memory, self.seen = device, device.memory(), seen
        self.epoch, self.why = device.epoch, ""
        self.pending: weakref.ref[Any] | None = None
        self._inputs = [Twin(tensor, tensor.requires_grad) for tensor in tensors]
        for twin, tensor in zip(self._inputs, tensors, strict=True):
            twin.fill(tensor)
        inputs = [twin.tensor for twin in self._inputs]
        args, kwargs = filled(given, by_id(tensors, inputs))
        weights = [*parameters, *model.buffers()]
        aliases = [alias(tensor) for tensor in weights]
        sources = [*inputs, *aliases[: len(parameters)]]
        self._places = [n for n, source in enumerate(sources) if source.requires_grad]
        self._sources = [sources[place] for place in self._places]
        self._number, self.parameters = len(sources), len(parameters)
        with as_it_was(model, device), instead(model, by_id(weights, aliases)):
            self._record(lambda: _once(call, args, kwargs))
            if any(a.data_ptr() != w.data_ptr() for a, w in zip(aliases, weights, strict=True)):
                raise Unfit(MOVES)
        self._wanted: dict[Any, list[Twin | None]] = {}
        self._backward: dict[Any, tuple[list[Twin | None], list[Any], Callable[[], None]]] = {}

    def _record(self, work: Callable[[], Any]) -> None:
        with self._device.aside():
            for _ in range(WARM_UPS):
                self._warm_up(work)
        result, self._forward = self._device.record(work, self._memory)
        leaves, self._spec = results(result)
        unique = {id(leaf): leaf for leaf in leaves if _is_tensor(leaf)}
        self._outputs = [*unique.values()]
        numbers = {key: number for number, key in enumerate(unique)}
        self._leaves = [numbers.get(id(leaf), leaf) for leaf in leaves]
        self._are_outputs = [id(leaf) in numbers for leaf in leaves]
        ours = {id(source) for source in self._sources}
        if any(id(leaf) not in ours for leaf in _leaves_behind(self._outputs)):
            raise Unfit(ELSEWHERE)

    def _warm_up(self, work: Callable[[], Any]) -> None:
        """Also a backward pass, from gradients that are of no account."""
        import torch

        outputs = [
            output for output in results(work())[0] if _is_tensor(output) and output.requires_grad
        ]
        if outputs and self._sources:
            zeros = [torch.zeros_like(output) for output in outputs]
            gradients = torch.autograd.grad(outputs, self._sources, zeros, allow_unused=True)
            if any(
                gradient is not None and gradient.layout is not torch.strided
                for gradient in gradients
            ):
                raise Unfit(SPARSE)

    @property
    def trains(self) -> list[bool]:
        """Of each result, whether gradients may come for it."""
        return [output.requires_grad for output in self._outputs]

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One replay; its results, each tensor once."""
        for twin, tensor in zip(self._inputs, tensors, strict=True):
            twin.fill(tensor)
        self._forward()
        return [copy_of(output) for output in self._outputs]

    def put_together(self, outputs: Sequence[torch.Tensor]) -> Any:
        """What the call returns."""
        import torch

        leaves = [
            outputs[leaf] if is_output else leaf
            for leaf, is_output in zip(self._leaves, self._are_outputs, strict=True)
        ]
        return torch.utils._pytree.tree_unflatten(leaves, self._spec)

    def each_once(self, value: Any) -> list[torch.Tensor]:
        """The tensors of such a result in the order of `forward`."""
        return list({id(leaf): leaf for leaf in results(value)[0] if _is_tensor(leaf)}.values())

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[Any] | None:
        """For each input and each parameter; None where gradients come for just these results the
        first time. That is recorded before the next forward pass.

        Autograd can't go through what was recorded in the meantime: attention's kernels take a
        recorded seed for a number, and die of it.
        """
        around = autocast(self._device.device.type)
        which = (
            None if gradient is None else (gradient.stride(), gradient.dtype)
            for gradient in gradients
        )
        kind = (tuple(around.items()), *which)
        known = self._backward.get(kind)
        if known is None:
            self._wanted[kind] = [
                None if gradient is None else Twin(gradient) for gradient in gradients
            ]
            return None
        twins, made, replay = known
        for twin, gradient in zip(twins, gradients, strict=True):
            if twin is not None and gradient is not None:
                twin.fill(gradient)
        replay()
        return self._spread(copies(made))

    def _spread(self, gradients: Sequence[Any]) -> list[Any]:
        every: list[Any] = [None] * self._number
        for place, gradient in zip(self._places, gradients, strict=True):
            every[place] = gradient
        return every

    def record_what_is_wanted(self) -> bool:
        """The backward passes that were asked for; returns whether there were any.

        In the caller's thread, before a forward pass: nothing waits for this memory then.
        """
        import torch

        wanted, self._wanted = self._wanted, {}
        for kind, twins in wanted.items():
            pairs = [(o, t.tensor) for o, t in zip(self._outputs, twins, strict=True) if t]

            def work(pairs: list[Any] = pairs) -> list[Any]:
                return self._differentiated(pairs)

            with torch.autocast(**dict(kind[0])):  # as it is where autograd runs, not here
                made, replay = self._device.record(work, self._memory)
            self._backward[kind] = (twins, made, replay)
        return bool(wanted)

    def _differentiated(self, pairs: list[Any]) -> list[Any]:
        import torch

        outputs, gradients = zip(*pairs, strict=True)
        made = torch.autograd.grad(
            outputs, self._sources, gradients, retain_graph=True, allow_unused=True
        )
        return list(made)


def autocast(device_type: str) -> dict[str, Any]:
    """What is in force, as the arguments of `torch.autocast`."""
    import torch

    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _once(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What autocast has cast before would not be cast again in a replay, or not at all after it."""
    import torch

    torch.clear_autocast_cache()
    try:
        return call(*args, **kwargs)
    finally:
        torch.clear_autocast_cache()


def _leaves_behind(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that gradients of these go to."""
    leaves = (getattr(node, "variable", None) for node in nodes(outputs, ()))
    return (leaf for leaf in leaves if leaf is not None)


def _is_tensor(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, torch.Tensor)
