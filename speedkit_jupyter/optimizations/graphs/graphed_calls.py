"""The calls of a model that are recorded and replayed: when, and when not."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines import capture
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.graphs.call_kinds import (
    State,
    Unfit,
    arguments,
    hindrance,
    modes,
    state,
)
from speedkit_jupyter.optimizations.graphs.capturable import Found, Seen, looked_at
from speedkit_jupyter.optimizations.graphs.captured import Captured
from speedkit_jupyter.optimizations.graphs.replayed import Turn, is_recorded, recording
from speedkit_jupyter.optimizations.properties.calls import Call

if TYPE_CHECKING:
    import torch

# Recorded kinds of calls of a model, each with memory of its own; and kinds that are looked at.
MOST, MOST_SEEN = 8, 64
FIRST = "the first of its kind"
PENDING = "the backward pass of the call before it may still come"
TOO_MANY = f"{MOST} kinds of calls are recorded, no more than that"
EVER_NEW = f"more than {MOST_SEEN} kinds of calls: ever other shapes, or other attributes"
HOOKED = "a module has a hook, which a replay would not run"
BUSY = "another call of the model is under way"


@dataclass
class Counts:
    """What became of the calls."""

    captures: int = 0
    replays: int = 0
    plain: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"{self.captures} captured, {self.replays} replayed, {self.plain.total()} plain"

    @property
    def note(self) -> str:
        """What is captured, and why calls were plain."""
        why = ", ".join(f"{why} ({number})" for why, number in self.plain.items())
        return f"{self.captures} captured" + (f"; plain calls: {why}" if why else "")


class GraphedCalls(Call):
    """The calls of one model.

    The first call of a kind is looked at while it is made, the second one is recorded, and from
    then on it is replayed; whatever can't be is called as ever, counted, and said in the notes.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target.model)
        self.counts = Counts()
        self._notes = target.notes
        self._lock = threading.RLock()
        self._inside = 0
        self._device: Any = None
        self._weights: list[int] = []
        # Why not, what the first call has shown, or what is recorded.
        self._kinds: dict[Hashable, str | Seen | Captured] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result is the user's own: no replay writes over it."""
        if not self.is_here() or is_recorded() or _is_in_backward():
            return self.below(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        parameters: list[torch.Tensor] = []
        why = ""
        try:
            kind = self._kind(args, kwargs, tensors, parameters)
            with self._lock:
                known = self._kinds.get(kind)
                if isinstance(known, str):
                    raise Unfit(known)
                if known is not None:
                    return self._replayed(kind, (args, kwargs), tensors, parameters)
                if len(self._kinds) >= MOST_SEEN:
                    raise Unfit(EVER_NEW)
        except Unfit as unfit:  # what the model itself raises is no consequence of that
            why = str(unfit)
        if why:
            self._count(why)
            return self._plainly(args, kwargs)
        return self._first(kind, (args, kwargs), tensors)

    def _plainly(self, args: Any, kwargs: Any) -> Any:
        """As ever; nothing is recorded meanwhile, when modules hold other tensors for a moment."""
        with self._lock:
            self._inside += 1
        try:
            return self.below(*args, **kwargs)
        finally:
            with self._lock:
                self._inside -= 1

    def _kind(
        self,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        parameters: list[torch.Tensor],
    ) -> Hashable:
        """Adds the tensors among the arguments, and the model's parameters. Raises Unfit where such
        calls are made as ever, whatever was recorded.
        """
        if why := hindrance():
            raise Unfit(why)
        passed = arguments((args, kwargs), tensors)
        now = state(self.module)
        parameters += now.parameters
        if now.hooked:
            raise Unfit(HOOKED)
        self._meet(now)
        if self._device.is_recording():
            raise Unfit("somebody records it")
        if any(tensor.device != self._device.device for tensor in tensors):
            raise Unfit("a tensor on another device is among its arguments")
        around = modes(self._device.device.type)
        return passed, tuple(now.marks), around, self._device.stream()

    def _meet(self, now: State) -> None:
        """What was recorded is of no use once the weights lie elsewhere."""
        if now.device is None:
            raise Unfit("it has no weights")
        with self._lock:
            if self._device is None or self._device.device != now.device:
                if now.device.type not in capture.KINDS:
                    raise Unfit(f"it lies on {now.device} by now")
                self._device = capture.KINDS[now.device.type](now.device)
            if self._weights != now.weights:
                self._kinds, self._weights = {}, now.weights

    def _first(self, kind: Hashable, given: tuple[Any, Any], tensors: list[torch.Tensor]) -> Any:
        """Made as ever, and looked at; not under the lock, since this is the user's code."""
        args, kwargs = given
        try:
            result, seen = looked_at(lambda: self._plainly(args, kwargs), self.module, tensors)
        except Found as found:
            self._kinds[kind] = found.why
            self._count(found.why)
            return found.result
        self._kinds.setdefault(kind, seen)
        self._count(FIRST)
        return result

    def _replayed(
        self,
        kind: Hashable,
        given: tuple[Any, Any],
        tensors: list[torch.Tensor],
        parameters: list[torch.Tensor],
    ) -> Any:
        """Recorded before that where it is not yet. Raises Unfit."""
        import torch

        captured = self._captured(kind, given, tensors, parameters)
        pending = captured.pending() if captured.pending is not None else None
        if pending is not None and not pending.done:
            raise Unfit(PENDING)
        self._recorded(kind, captured.record_what_is_wanted)
        self.counts.replays += 1
        if not (torch.is_grad_enabled() and any(captured.trains)):
            return captured.put_together(captured.forward(tensors))
        sources = [*tensors, *parameters]
        turn = Turn(self, self._device, captured, given, sources)
        captured.pending = weakref.ref(turn)
        return turn.run()

    def _captured(
        self,
        kind: Hashable,
        given: tuple[Any, Any],
        tensors: list[torch.Tensor],
        parameters: list[torch.Tensor],
    ) -> Captured:
        known = self._kinds[kind]
        if isinstance(known, Captured) and known.epoch != self._device.epoch:
            known = self._kinds[kind] = known.seen
        if isinstance(known, Captured):
            if known.why:
                self._kinds[kind] = known.why
                raise Unfit(known.why)
            return known
        if sum(isinstance(kind, Captured) for kind in self._kinds.values()) >= MOST:
            raise Unfit(TOO_MANY)
        if self._inside:
            raise Unfit(BUSY)
        assert isinstance(known, Seen)
        seen = known

        def record() -> Captured:
            model, passed = self.module, (given, tensors)
            return Captured(self._device, self.below, model, parameters, *passed, seen)

        captured = self._recorded(kind, record)
        self._kinds[kind] = captured
        return captured  # type: ignore[no-any-return]

    def _recorded(self, kind: Hashable, record: Callable[[], Any]) -> Any:
        """Raises Unfit where it can't be, now and from now on."""
        try:
            with recording():
                result = record()
        except Unfit as unfit:
            self._kinds[kind] = str(unfit)
            raise
        except Exception as error:
            self._kinds[kind] = why = f"it can't be recorded: {_first_line(error)}"
            raise Unfit(why) from None
        if result:
            self.counts.captures += 1
            self._notes["cuda_graphs"] = self.counts.note
        return result

    def _count(self, why: str) -> None:
        with self._lock:
            self.counts.plain[why] += 1
            self._notes["cuda_graphs"] = self.counts.note


def _is_in_backward() -> bool:
    """Whether autograd calls: its thread for a device must not wait for one that records."""
    import torch

    return torch._C._current_graph_task_id() >= 0


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
