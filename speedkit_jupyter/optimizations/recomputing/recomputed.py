"""A block whose activations are not kept, but computed again in the backward pass, bit for bit.

`torch.utils.checkpoint` does that, with torch's random numbers and autocast as they were. What it
leaves to its caller is here: what else a second run has to find as the first did, and what it must
not change once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.properties.calls import Call
from speedkit_jupyter.optimizations.properties.hooks import has_forward_hooks
from speedkit_jupyter.optimizations.properties.wishes import MISSING, put_back_entries
from speedkit_jupyter.optimizations.recomputing.outside_state import OutsideState
from speedkit_jupyter.optimizations.recomputing.passed import Passed
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.marks import are_changed, marks, version

if TYPE_CHECKING:
    import torch

    # A buffer: the path of its module within the block, and its name there.
    Buffers = dict[tuple[str, str], torch.Tensor]


CHANGED = (
    "weights were changed between the forward and the backward pass, which would compute with the "
    "new ones: run backward() before optimizer.step(), or leave activation_checkpointing out"
)


@dataclass(frozen=True)
class Written:
    """What a run of a block writes to: buffers, and tensors that it is passed, by number."""

    buffers: frozenset[tuple[str, str]]
    passed: frozenset[int]


class Recomputed(Call):
    """The calls of one block. Where nothing is kept for a backward pass they are as ever."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__(block)
        # By the modes of all its modules: batch norm writes to its buffers in training only.
        self._written: dict[tuple[bool, ...], Written] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own result; what leads to it is computed again once it is needed."""
        block = self.module
        passed = Passed(args, kwargs) if self._keeps_something(block) else None
        if passed is None or not passed.tensors:
            return self.below(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint

        modes = tuple(part.training for part in block.modules())
        call = block._call_impl if self.inner is None else self.inner
        runs = _Runs(call, block, passed, self._written.get(modes))
        runs.first = lambda: call(*args, **kwargs)
        result = checkpoint(runs, *runs.tensors, use_reentrant=False, preserve_rng_state=True)
        self._written[modes] = runs.written
        return result

    def _keeps_something(self, block: torch.nn.Module) -> bool:
        """Not where torch allows no hooks on what is kept (torch.func), or tells what runs once."""
        import torch

        return (
            torch.is_grad_enabled()
            and self.is_here()
            and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
            and not torch.jit.is_tracing()  # type: ignore[attr-defined]
            and not has_forward_hooks(block)
        )


class _Runs:
    """One call of a block: the `first` run as it was asked for, and those that follow as it was.

    The first time of all nothing is known of what the block writes to, so that all of it is copied.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        block: torch.nn.Module,
        passed: Passed,
        written: Written | None,
    ) -> None:
        self.first: Callable[[], Any] | None = None
        self._call, self._block, self._passed = call, block, passed
        self._known = written
        self._buffers = _copies(block, None if written is None else written.buffers)
        numbers = range(len(passed.tensors))
        self._copied = set(numbers if written is None else written.passed)
        self.tensors = [
            _copy(tensor) if number in self._copied else tensor
            for number, tensor in enumerate(passed.tensors)
        ]
        self._versions = [version(tensor) for tensor in passed.tensors]
        self._outside = OutsideState(block)
        self._weights = [*block.parameters()]
        self._marks = marks(self._weights)
        self.written = written or Written(frozenset(), frozenset())

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """The first run; from then on another one with the same."""
        if self.first is not None:
            first, self.first = self.first, None
            result = first()
            self._look()
            return result
        given = [t.clone() if n in self._copied else t for n, t in enumerate(tensors)]
        args, kwargs = self._passed.again(given)
        with self._as_it_was():
            return self._call(*args, **kwargs)

    def _look(self) -> None:
        """What the first run has written to; from here on nothing that was passed is held."""
        import torch

        tensors, self._passed.tensors, self.tensors = self._passed.tensors, [], []
        if self._known is not None:
            return
        now = dict(_buffers(self._block))
        same = {
            place
            for place, before in self._buffers.items()
            if place in now and torch.equal(before, now[place])
        }
        self._buffers = {p: before for p, before in self._buffers.items() if p not in same}
        versions = map(version, tensors)
        self.written = Written(
            frozenset(self._buffers),
            frozenset(n for n, v in enumerate(versions) if v != self._versions[n]),
        )

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        if are_changed(self._weights, self._marks):
            raise SpeedKitError(CHANGED)
        with ExitStack() as stack:
            stack.enter_context(self._outside.in_force())
            for (path, name), before in self._buffers.items():
                holder = self._block.get_submodule(path)._buffers
                stack.callback(put_back_entries, holder, {name: holder.get(name, MISSING)})
                holder[name] = before.clone()
            yield


def _buffers(block: torch.nn.Module) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    for path, part in block.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield (path, name), buffer


def _copies(block: torch.nn.Module, places: frozenset[tuple[str, str]] | None) -> Buffers:
    if places is not None and not places:
        return {}
    return {
        place: buffer.detach().clone()
        for place, buffer in _buffers(block)
        if places is None or place in places
    }


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Which a run that writes to the tensor leaves as it is."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
