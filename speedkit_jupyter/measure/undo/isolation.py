"""The state that a step changes, copied and put back byte for byte."""

from __future__ import annotations

import gc
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind
from speedkit_jupyter.measure.undo.kinds.code.names import Names
from speedkit_jupyter.measure.undo.kinds.objects.containers import Dicts
from speedkit_jupyter.measure.undo.kinds.process import process
from speedkit_jupyter.measure.undo.kinds.registry import KINDS
from speedkit_jupyter.measure.undo.kinds.settings import Settings, failure
from speedkit_jupyter.measure.undo.kinds.tensors.histories import set_versions
from speedkit_jupyter.measure.undo.kinds.tensors.randomness import Generators
from speedkit_jupyter.measure.undo.kinds.tensors.tensors import Tensors
from speedkit_jupyter.measure.undo.meanwhile import Meanwhile
from speedkit_jupyter.measure.undo.walk import Walk

if TYPE_CHECKING:
    import torch

# Of a variant's warm state only what steps were seen to change is put back, but all of it every so
# often, and after the first steps, which show what they change: what is small a few times.
FIRST, SECOND, ALL_EVERY = 3, 2, 16

Memory = tuple[Kind, Any, Any]


class State:
    """A copy of all that models, optimizers, scalers, names and others reach, at one moment.

    `restore` writes the copied values into the objects that were found then: parameters,
    gradients and optimizer states stay the same objects. The copies lie beside the originals, or
    in main memory where `off_device` is set. With the state `base`, taken earlier, copies of what
    did not change since are shared, and what no step was seen to change is put back only now and
    then. What can't be copied or put back is in `failed`: why, by its name.
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
        with _without_collecting():
            self._begin([*bound, *others, *models, *optimizers, *scalers], base, off_device)

    def _begin(self, roots: Sequence[Any], base: State | None, off_device: bool) -> None:
        self.walk = Walk(roots)
        self.failed: dict[str, str] = {}
        self.changing: set[tuple[int, Kind]] = set() if base is None else base.changing
        self._base = base
        self.meanwhile: Meanwhile = Meanwhile() if base is None else base.meanwhile
        self._restored = 0
        self._memories: list[Memory] = []
        self._by_object: dict[tuple[int, Kind], Any] = {}
        self._settings = Settings(process.switches())
        self._random = Settings(process.generators())
        self._take(Copies(off_device))
        if base is None:
            self.meanwhile.look_before(self._memories)

    def _take(self, copies: Copies) -> None:
        import torch

        self._own = frozenset(_owned(self.walk, self.meanwhile))
        copies.required.update(self._own)
        by_kind: dict[Kind, list[Memory]] = {kind: [] for kind in KINDS}
        with torch._C.DisableTorchFunctionSubclass():
            for instance in self.walk.found.values():
                for kind in self.walk.kinds(instance):
                    if kind.has_state and kind in by_kind:
                        self._remember(kind, instance, copies, by_kind[kind])
        self._memories = [memory for kind in KINDS for memory in by_kind[kind]]

    def _remember(self, kind: Kind, instance: Any, copies: Copies, to: list[Memory]) -> None:
        key = (id(instance), kind)
        try:
            memory = None if self._base is None else self._base.shared(kind, instance)
            if memory is None:
                memory = kind.copy(instance, copies)
        except Exception as error:
            self.failed[self.walk.name(instance)] = f"can't be copied ({_line(error)})"
            return
        self._by_object[key] = memory
        to.append((kind, instance, memory))

    def shared(self, kind: Kind, instance: Any) -> Any:
        """The copy of bulky values that are still the same; None without."""
        key = (id(instance), kind)
        if not kind.bulky or key in self.changing or key not in self._by_object:
            return None
        memory = self._by_object[key]
        return memory if kind.same(instance, memory) else None

    def restore(self) -> None:
        """Put everything back; what fails is noted, and keeps nothing else from being put back."""
        import torch

        self._restored += 1
        # Switches first: under a mode that the step left entered nothing else could be put back.
        self.failed.update(self._settings.restore())
        stopped: BaseException | None = None
        failed: set[int] = set()
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            due = list(self._due())
            self.meanwhile.look(due, self.walk)
            for kind, instance, memory in due:
                try:
                    self._put_back(kind, instance, memory)
                except Exception as error:
                    failed.add(id(instance))
                    self.fail(self.walk.name(instance), error)
                except BaseException as error:  # Ctrl-C: all else first
                    failed.add(id(instance))
                    stopped = stopped or error
        self.failed.update(self._random.restore())
        if self._base is None:
            self._put_back_versions(failed)
        if stopped is not None:
            raise stopped

    def _put_back_versions(self, failed: set[int]) -> None:
        """What is written back counts as not written: graphs of before go on from it."""
        written = [
            (instance, memory.version)
            for kind, instance, memory in self._memories
            if type(kind) is Tensors
            and memory.is_whole()
            and memory.version is not None
            and instance._version != memory.version
            and id(instance) not in failed
            and not self.meanwhile.is_theirs(kind, instance)
        ]
        if written:
            set_versions(*zip(*written, strict=True))

    def restore_randomness(self) -> None:
        """Only what random numbers are drawn from."""
        self._random.restore()
        for kind, instance, memory in self._memories:
            if isinstance(kind, Generators):
                kind.put_back(instance, memory)

    def _due(self) -> Iterator[Memory]:
        """All; or what is known to change and what is new since the state before."""
        base = self._base
        if base is None or self._restored == SECOND or not self._restored % ALL_EVERY:
            yield from self._memories
            return
        for kind, instance, memory in self._memories:
            key = (id(instance), kind)
            is_cheap = self._restored <= FIRST and not kind.bulky
            if is_cheap or key in self.changing or key not in base._by_object:
                yield kind, instance, memory

    def _put_back(self, kind: Kind, instance: Any, memory: Any) -> None:
        key = (id(instance), kind)
        if self.meanwhile.is_theirs(kind, instance):
            keys = self.meanwhile.keys(kind, instance)
            if keys is not None and isinstance(kind, Dicts):
                kind.put_back_around(instance, memory, keys)
        elif kind.bulky and key in self.changing:  # to compare costs as much as to copy
            kind.put_back(instance, memory)
        elif not kind.same(instance, memory):
            self.changing.add(key)
            kind.put_back(instance, memory)

    def fail(self, name: str, error: Exception) -> None:
        """Note what could not be put back."""
        self.failed[name] = failure(error)

    def holds(self) -> bool:
        """Whether the values of tensors, arrays and frames are the copied ones."""
        import torch

        with torch._C.DisableTorchFunctionSubclass():
            return all(
                kind.same_values(instance, memory)
                for kind, instance, memory in self._memories
                if kind.bulky and not self.meanwhile.is_theirs(kind, instance)
            )

    def overwritten(self) -> list[Any]:
        """The tensors, arrays and frames that do not hold the copied values any more."""
        import torch

        with torch._C.DisableTorchFunctionSubclass():
            return [
                instance
                for kind, instance, memory in self._memories
                if kind.bulky
                and not self.meanwhile.is_theirs(kind, instance)
                and not kind.same_values(instance, memory)
            ]

    def changed(self) -> Iterator[Memory]:
        """What does not hold what was copied; parameters, buffers and optimizers' own left out."""
        # Those of before too: a layout gives parameters other gradients.
        own = self._own.union(_owned(self.walk, self.meanwhile))
        for kind, instance, memory in self._memories:
            if self.meanwhile.is_theirs(kind, instance):
                continue
            with suppress(Exception):
                same = kind.same_values if kind.bulky else kind.same
                if id(instance) not in own and not same(instance, memory):
                    yield kind, instance, memory

    def too_large(self) -> list[str]:
        """The names of what only a checksum was taken of."""
        return [
            f"{self.walk.name(instance)} ({type(instance).__name__})"
            for kind, instance, memory in self._memories
            if kind.is_too_large(memory)
        ]

    def written(self) -> list[str]:
        """The names of what was too large to copy, and is not what it was."""
        return [
            self.walk.name(instance)
            for kind, instance, memory in self._memories
            if kind.is_too_large(memory)
            and not self.meanwhile.is_theirs(kind, instance)
            and not kind.same_checksum(instance, memory)
        ]

    def glances(self) -> list[Memory]:
        """What all objects hold now, without values of many bytes."""
        memories = []
        for kind, instance, _ in self._memories:
            if self.meanwhile.is_theirs(kind, instance):
                continue
            with suppress(Exception):
                memories.append((kind, instance, kind.glance(instance)))
        return memories

    def adopt_random_state(self) -> None:
        """The random generators are to come back to what they are now."""
        self._random = Settings(process.generators())


@contextmanager
def _without_collecting() -> Iterator[None]:
    """So many small copies at once would start the garbage collector again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def isolated(*arguments: Any, **more: Any) -> Iterator[State]:
    """Whatever the block does to the state (arguments as for State) is undone at its end."""
    from speedkit_jupyter.support import interrupts

    state = State(*arguments, **more)
    try:
        yield state
    finally:
        with interrupts.held_back():
            state.restore()


def _owned(walk: Walk, meanwhile: Meanwhile) -> Iterator[int]:
    """The ids of tensors that are copied whatever their size: a step's own, not its data."""
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
                theirs = meanwhile.has(tensor)  # whose gradient may be written at this moment
                if theirs or walk.is_trained_elsewhere(tensor):
                    continue
                if tensor.is_leaf and tensor.grad is not None:
                    yield id(tensor.grad)


def _line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first:.100}".rstrip(": ")
