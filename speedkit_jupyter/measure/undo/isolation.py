"""The state that a step changes, copied and put back byte for byte."""

from __future__ import annotations

import gc
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.undo import process
from speedkit_jupyter.measure.undo.handlers.base import Copies, StateHandler
from speedkit_jupyter.measure.undo.handlers.names import Names
from speedkit_jupyter.measure.undo.handlers.registry import HANDLERS
from speedkit_jupyter.measure.undo.handlers.tensors import Tensors
from speedkit_jupyter.measure.undo.handlers.values import Generators
from speedkit_jupyter.measure.undo.process import Settings, failure
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.support import interrupts
from speedkit_jupyter.support.torch_private import set_versions

if TYPE_CHECKING:
    import torch

# A variant's warm state is put back wholly at times, otherwise only what steps were seen to
# change. The first restores show what they change: what is small is compared a few times.
FIRST, SECOND, ALL_EVERY = 3, 2, 16

Memory = tuple[StateHandler, Any, Any]


class State:
    """A copy of all that models, optimizers, scalers, names and others reach, at one moment.

    `restore` writes the copied values into the objects that were found then: parameters,
    gradients and optimizer states stay the same objects. Copies of tensors lie beside the
    originals, or in main memory where `off_device` is set. A state with a `base`, taken earlier,
    shares the copies of what did not change since, and puts back what no step was seen to change
    only now and then. `failed` says, by name, why something can't be copied or put back.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        scalers: Sequence[torch.amp.GradScaler] = (),
        names: MutableMapping[str, Any] | None = None,
        assigned: Sequence[str] = (),
        others: Sequence[Any] = (),
        off_device: bool = False,
        base: State | None = None,
    ) -> None:
        bound = [] if names is None else [Names(names, (), assigned)]
        self.failed: dict[str, str] = {}
        self.changing: set[tuple[int, StateHandler]] = set() if base is None else base.changing
        self._base = base
        self._restored = 0
        self._memories: list[Memory] = []
        self._by_object: dict[tuple[int, StateHandler], Any] = {}
        with _without_collecting():
            self.walk = Walk([*bound, *others, *models, *optimizers, *scalers])
            self._settings = Settings(process.switches())
            self._random = Settings(process.generators())
            self._take(Copies(off_device))

    def _take(self, copies: Copies) -> None:
        import torch

        self._own = frozenset(_owned(self.walk))
        copies.required.update(self._own)
        by_handler: dict[StateHandler, list[Memory]] = {handler: [] for handler in HANDLERS}
        with torch.DisableTorchFunctionSubclass():
            for instance in self.walk.found.values():
                for handler in self.walk.handlers(instance):
                    if handler.has_state and handler in by_handler:
                        self._remember(handler, instance, copies, by_handler[handler])
        self._memories = [memory for handler in HANDLERS for memory in by_handler[handler]]

    def _remember(
        self, handler: StateHandler, instance: Any, copies: Copies, to: list[Memory]
    ) -> None:
        try:
            memory = None if self._base is None else self._base.shared(handler, instance)
            if memory is None:
                memory = handler.copy(instance, copies)
        except Exception as error:
            self.failed[self.walk.name(instance)] = f"can't be copied ({_line(error)})"
            return
        self._by_object[id(instance), handler] = memory
        to.append((handler, instance, memory))

    def shared(self, handler: StateHandler, instance: Any) -> Any:
        """Return the copy of bulky values that are still the same; None if there is none."""
        key = (id(instance), handler)
        if not handler.bulky or key in self.changing or key not in self._by_object:
            return None
        memory = self._by_object[key]
        return memory if handler.same(instance, memory) else None

    def restore(self) -> None:
        """Put everything back; a failure is noted, and keeps nothing else from being put back."""
        import torch

        self._restored += 1
        # Switches first: in inference mode, say, nothing else could be put back.
        self.failed.update(self._settings.restore())
        stopped: BaseException | None = None
        failed: set[int] = set()
        with (
            torch.DisableTorchFunctionSubclass(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            for handler, instance, memory in list(self._due()):
                try:
                    self._put_back(handler, instance, memory)
                except Exception as error:
                    failed.add(id(instance))
                    self.failed[self.walk.name(instance)] = failure(error)
                except BaseException as error:  # Ctrl-C: all else first
                    failed.add(id(instance))
                    stopped = stopped or error
        self.failed.update(self._random.restore())
        if self._base is None:
            self._put_back_versions(failed)
        if stopped is not None:
            raise stopped

    def _put_back_versions(self, failed: set[int]) -> None:
        """Let what was written back count as not written: earlier graphs go on from it."""
        written = [
            (instance, memory.version)
            for handler, instance, memory in self._memories
            if type(handler) is Tensors
            and memory.saved is not None
            and memory.version is not None
            and instance._version != memory.version
            and id(instance) not in failed
        ]
        if written:
            set_versions(*zip(*written, strict=True))

    def restore_randomness(self) -> None:
        """Put back only what random numbers are drawn from."""
        self.failed.update(self._random.restore())
        for handler, instance, memory in self._memories:
            if isinstance(handler, Generators):
                handler.put_back(instance, memory)

    def _due(self) -> Iterator[Memory]:
        """Yield all; or what is known to change, and what is new since the state before."""
        base = self._base
        if base is None or self._restored == SECOND or not self._restored % ALL_EVERY:
            yield from self._memories
            return
        for handler, instance, memory in self._memories:
            key = (id(instance), handler)
            is_cheap = self._restored <= FIRST and not handler.bulky
            if is_cheap or key in self.changing or key not in base._by_object:
                yield handler, instance, memory

    def _put_back(self, handler: StateHandler, instance: Any, memory: Any) -> None:
        key = (id(instance), handler)
        if handler.bulky and key in self.changing:  # to compare costs as much as to copy
            handler.put_back(instance, memory)
        elif not handler.same(instance, memory):
            self.changing.add(key)
            handler.put_back(instance, memory)

    def overwritten(self) -> list[Any]:
        """Return the tensors and arrays that do not hold the copied values any more."""
        import torch

        with torch.DisableTorchFunctionSubclass():
            return [
                instance
                for handler, instance, memory in self._memories
                if handler.bulky and not handler.same_values(instance, memory)
            ]

    def changed(self) -> Iterator[Memory]:
        """Yield what does not hold what was copied, but for parameters, buffers and optimizers'
        own state.
        """
        # Those of before too: a layout gives parameters other gradients.
        own = self._own.union(_owned(self.walk))
        for handler, instance, memory in self._memories:
            with suppress(Exception):
                same = handler.same_values if handler.bulky else handler.same
                if id(instance) not in own and not same(instance, memory):
                    yield handler, instance, memory

    def too_large(self) -> list[str]:
        """Return the names of what was not copied."""
        return [
            f"{self.walk.name(instance)} ({type(instance).__name__})"
            for handler, instance, memory in self._memories
            if handler.is_too_large(memory)
        ]

    def glances(self) -> list[Memory]:
        """Return what all objects hold now, without values of many bytes."""
        memories = []
        for handler, instance, _ in self._memories:
            with suppress(Exception):
                memories.append((handler, instance, handler.glance(instance)))
        return memories

    def adopt_random_state(self) -> None:
        """Have the random generators come back to what they are now."""
        self._random = Settings(process.generators())


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Keep so many small copies from starting the garbage collector again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def isolated(*arguments: Any, **more: Any) -> Iterator[State]:
    """Undo at the end whatever the block does to the state (arguments as for State)."""
    state = State(*arguments, **more)
    try:
        yield state
    finally:
        with interrupts.held_back():
            state.restore()


def _owned(walk: Walk) -> Iterator[int]:
    """Yield the ids of tensors that are copied whatever their size: a step's own, not its data."""
    import torch

    for instance in walk.found.values():
        cls = type(instance)
        if issubclass(cls, torch.nn.Module):
            tensors: list[Any] = [*instance._parameters.values(), *instance._buffers.values()]
        elif issubclass(cls, torch.optim.Optimizer):
            tensors = [p for group in instance.param_groups for p in group["params"]]
            state = getattr(instance, "state", {})  # a wrapper may have none
            states = [list(s.values()) for s in state.values() if isinstance(s, dict)]
            tensors += [value for values in states for value in values]
        else:
            continue
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                yield id(tensor)
                if tensor.is_leaf and tensor.grad is not None:
                    yield id(tensor.grad)


def _line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first:.100}".rstrip(": ")
