"""What stands in for a GPU that records CUDA graphs: the operations of a CPU, on a tape.

It behaves as torch 2.13's `torch/cuda/graphs.py` and its page on CUDA graphs say of a graph:

- Recording computes nothing: no kernel runs, so results have no values (here: NaN, or the largest
  number), what would be written to is what it was, and the random generator is where it was.
- A replay does the same operations on the same memory, with the values that lie there by then:
  inputs are read where they lay, results and all between them are written where they lay.
- A replay runs no Python code, and tells autograd nothing: versions of tensors stay.
- Random numbers are drawn anew by each replay, from the generator as it is by then.
- What needs an answer of the GPU while it is recorded (`.item()`) fails, and nothing is recorded.
- It belongs to a stream; here there is one.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OnCpu:
    """In the place of `machines.capture.Cuda`. `made` are those of a test, `failure` is what the
    next recordings raise.
    """

    epoch = 0
    made: list = []
    failure: BaseException | None = None

    def __init__(self, device: torch.device) -> None:
        self.device, self.records, self.replays = device, 0, 0
        self.records_now = False
        OnCpu.made.append(self)

    def stream(self) -> int:
        return 0

    def is_recording(self) -> bool:
        return self.records_now

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    @contextmanager
    def aside(self):
        yield

    def memory(self) -> object:
        return object()

    def record(self, work, memory):
        tape, drawn = Tape(), torch.get_rng_state()
        self.records_now = True
        try:
            with tape:
                result = work()
            if OnCpu.failure is not None:
                raise OnCpu.failure
        except BaseException:
            OnCpu.epoch += 1
            raise
        finally:
            self.records_now = False
            tape.as_if_nothing_was_computed()
            torch.set_rng_state(drawn)
        self.records += 1

        def replay() -> None:
            self.replays += 1
            tape.play()

        return result, replay


class Tape(TorchDispatchMode):
    """The operations in their order, with the memory that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list = []
        self._before: list = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in function.tags:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        given = tensors((args, kwargs))
        values = [tensor.detach().clone() for tensor in given]
        result = function(*args, **kwargs)
        # Whatever the schema says: batch norm's running statistics are written and not said to be.
        self._before += [
            (plain(tensor), before)
            for tensor, before in zip(given, values, strict=True)
            if not same(tensor, before)
        ]
        lay = {where(tensor) for tensor in given}
        every = tensors(result)
        again = torch.utils._pytree.tree_map_only(torch.Tensor, plain, (args, kwargs))
        is_own = [where(tensor) not in lay for tensor in every]
        self._operations.append((function, again, [plain(one) for one in every], is_own))
        own = [one for one, is_new in zip(every, is_own, strict=True) if is_new]
        self._before += [(plain(tensor), None) for tensor in own]
        return result

    def as_if_nothing_was_computed(self) -> None:
        for tensor, before in reversed(self._before):
            if before is not None:
                tensor.copy_(before)
            elif tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype is not torch.bool and not tensor.is_complex():
                tensor.fill_(torch.iinfo(tensor.dtype).max)
        self._before = []

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # it was cast when it was recorded
    def play(self) -> None:
        for function, (args, kwargs), made, is_own in self._operations:
            found = tensors(function(*args, **kwargs))
            for tensor, value, own in zip(made, found, is_own, strict=True):
                if own:
                    tensor.copy_(value)


def tensors(values) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(values) if torch.is_tensor(one)]


def where(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, of which autograd knows nothing."""
    return tensor.data


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.detach().nan_to_num(7.0), other.nan_to_num(7.0))
