"""What another thread changes while a step is measured: its own work, which is left to it.

A step often reaches more than it uses: the other model in the same dict, which a thread trains.
Whose change one is shows while the step does not run: what changes then is another thread's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from time import sleep
from typing import Any

from speedkit_jupyter.measure.undo.busy_threads import others_at_work
from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind, attribute_dict
from speedkit_jupyter.measure.undo.kinds.code.names import NamesKind
from speedkit_jupyter.measure.undo.kinds.objects.containers import Dicts
from speedkit_jupyter.measure.undo.kinds.objects.locks import Locks
from speedkit_jupyter.measure.undo.kinds.tensors.tensors import Gradients, Tensors
from speedkit_jupyter.measure.undo.walk import Walk

Memory = tuple[Kind, Any, Any]
Key = tuple[int, Kind]
# How long it looks before the first step; and when something is first seen changed, so many times
# as long as the change may have taken, with limits, for each and for all such looks.
FIRST_S, TIMES, LEAST_S, MOST_S, MOST_IN_ALL_S = 0.1, 2.0, 0.05, 1.0, 4.0
LOOKS, BEATS, PULSE = 5, 3, 8
# Names are put back one by one, only where the step binds them; locks where no thread runs.
NEVER = (NamesKind, Locks)


class Meanwhile:
    """Tells apart what the step changed and what others did, for all states of one visit.

    Nothing is looked at, and no time spent, where no other thread of the user's is at work;
    `waited_s` are the seconds that it stood still to look.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.used: set[int] | None = None  # models called and optimizers stepped, if known
        self._ours: set[Key] = set()
        self._seen: dict[Key, Any] = {}  # changed by others; holds the object: no id returns
        self._keys: dict[int, dict[Any, None]] = {}  # of a dict that they change: where
        self._owners: dict[int, Any] = {}  # models and optimizers that they train
        self._parts: dict[int, Any] = {}
        self._left_s, self._since_s = MOST_IN_ALL_S, time.perf_counter()

    def __bool__(self) -> bool:
        """Whether another thread was seen to change anything."""
        return bool(self._seen)

    def is_theirs(self, kind: Kind, instance: Any) -> bool:
        """Whether another thread changes it, so that it is left as it is."""
        return id(instance) in self._parts or (id(instance), kind) in self._seen

    def keys(self, kind: Kind, instance: Any) -> dict[Any, None] | None:
        """Of a dict that others write to beside the step: the keys that are theirs."""
        return None if id(instance) in self._parts else self._keys.get(id(instance))

    def has(self, instance: Any) -> bool:
        """Whether it is part of what another thread trains."""
        return id(instance) in self._parts

    def owns(self, instance: Any) -> bool:
        """Whether it is a model or an optimizer that another thread trains."""
        return id(instance) in self._owners

    def concerns(self, instance: Any) -> bool:
        """Whether others train it, or may: the step neither uses nor changes it."""
        if self.owns(instance):
            return True
        ours = {number for number, kind in self._ours if isinstance(kind, Tensors)}
        return self._is_unused(instance) and not _parameters(instance) & ours

    def _is_unused(self, instance: Any) -> bool:
        """Known only where others were at work when the step first ran."""
        import torch

        if self.used is None or id(instance) in self.used or not _parameters(instance):
            return False
        if isinstance(instance, torch.nn.Module):
            return not any(id(part) in self.used for part in instance.modules())
        return not _parameters(instance) & self.used

    def _is_used(self, instance: Any) -> bool:
        """Whether the step is known to call or step it, or a part of it."""
        import torch

        if self.used is None or id(instance) in self.used:
            return self.used is not None
        if not issubclass(type(instance), torch.nn.Module):
            return False
        return any(id(part) in self.used for part in instance.modules())

    def look_before(self, memories: Iterable[Memory]) -> None:
        """Nothing of the step has run since they were taken: what differs is others'."""
        if others_at_work():
            self._wait(FIRST_S)
            self._note(memories)
        self._since_s = time.perf_counter()

    def look(self, memories: Iterable[Memory], walk: Walk) -> None:
        """The step has run: whose is what changed since?"""
        at_work = others_at_work()
        if at_work or self:
            self._take_over(walk)
            new = [memory for memory in memories if self._is_new(memory)]
            if new and at_work:
                self._watch(new)
            self._ours.update((id(item), kind) for kind, item, _ in new)
            self._ours.difference_update(self._seen)
            self._find_owners(walk)
            self._take_over(walk)
        self._since_s = time.perf_counter()

    def _is_new(self, memory: Memory) -> bool:
        kind, instance, _ = memory
        known = (id(instance), kind) in self._ours or self.is_theirs(kind, instance)
        return not known and not isinstance(kind, NEVER) and _differs(memory)

    def _watch(self, changed: list[Memory]) -> None:
        """While the step does not run. As long as others may take to change it once more; and
        where they were seen to change something, until they have done so some times, and with it
        changed all that they do at each of their steps.
        """
        took_s = TIMES * (time.perf_counter() - self._since_s)
        wait_s = min(max(took_s, LEAST_S), MOST_S)
        now, pulse = list(_looked_at(changed)), list(_looked_at(self._known()))
        looks = beats = 0
        while self._left_s > 0 and (looks < LOOKS or (pulse and beats < BEATS)):
            self._left_s -= wait_s / LOOKS
            self._wait(wait_s / LOOKS)  # in small parts: what is set and set back shows in one
            self._note(now)
            looks += 1
            beaten = any(map(_differs, pulse))
            beats += beaten
            if beaten or not pulse:
                pulse = list(_looked_at(self._known()))

    def _known(self) -> list[Memory]:
        """Some of what others change."""
        return [(kind, item, None) for (_, kind), item in list(self._seen.items())[:PULSE]]

    def _wait(self, seconds: float) -> None:
        begun_s = time.perf_counter()
        sleep(seconds)
        self.waited_s += time.perf_counter() - begun_s

    def _note(self, memories: Iterable[Memory]) -> None:
        for kind, instance, memory in memories:
            if isinstance(kind, (*NEVER, Gradients)) or not _differs((kind, instance, memory)):
                continue
            self._seen[id(instance), kind] = instance
            if isinstance(kind, Dicts):
                self._keys.setdefault(id(instance), {}).update(_keys_between(instance, memory))

    def _find_owners(self, walk: Walk) -> None:
        """Of whose parameters some are changed by others, and none by the step."""
        import torch

        values = {id(item) for (_, kind), item in self._seen.items() if isinstance(kind, Tensors)}
        ours = {number for number, kind in self._ours if isinstance(kind, Tensors)}
        instances = walk.found.values()
        for instance in instances:  # what the step does not step, and yet is changed
            if issubclass(type(instance), torch.optim.Optimizer) and self._is_unused(instance):
                held = _parameters(instance)
                if held & (values | ours):
                    self._owners[id(instance)] = instance
                    values, ours = values | held, ours - held
        for instance in instances:
            held = _parameters(instance)
            if held & values and not held & ours and not self._is_used(instance):
                self._owners[id(instance)] = instance

    def _take_over(self, walk: Walk) -> None:
        import torch

        for owner in self._owners.values():
            for part in _parts(owner):
                self._parts[id(part)] = part
        # Not by reading `.grad`, which the other thread's backward writes without Python's lock.
        for instance in walk.found.values() if self._owners else ():
            holder = walk.before(instance)
            if isinstance(holder, torch.Tensor) and id(holder) in self._parts:
                self._parts[id(instance)] = instance

    def line(self, walk: Walk) -> list[str]:
        """The names of what others change, the largest of each."""
        inside: set[int] = set()
        for owner in self._owners.values():
            inside.update(id(part) for part in _parts(owner) if part is not owner)
        names = [walk.name(owner) for owner in self._owners.values() if id(owner) not in inside]
        for (number, _), instance in self._seen.items():
            if number in self._keys:
                names += _written(instance, self._keys[number], walk, self._parts)
            elif number not in self._parts:
                names.append(walk.name(instance))
        return list(dict.fromkeys(names))


def _differs(memory: Memory) -> bool:
    kind, instance, saved = memory
    try:
        if kind.is_too_large(saved) and not kind.same_checksum(instance, saved):
            return True
        return not kind.same(instance, saved)
    except Exception:  # others work on it at this moment, or it can't be compared
        return False


def _looked_at(changed: Iterable[Memory]) -> Iterator[Memory]:
    """As it is now: checksums of what has many bytes."""
    few = Copies(most_bytes=0)
    for kind, instance, _ in changed:
        if isinstance(kind, Gradients):
            continue
        with suppress(Exception):
            yield kind, instance, kind.copy(instance, few)


def _keys_between(instance: dict[Any, Any], memory: Any) -> dict[Any, None]:
    """The keys whose values are not what they were, also such as are gone."""
    before = dict(zip(memory[0], memory[1], strict=True))
    now, nothing = dict(instance), object()
    every = [*before, *now]
    return dict.fromkeys(k for k in every if before.get(k, nothing) is not now.get(k, nothing))


def _parameters(holder: Any) -> set[int]:
    """The ids of those of a model or an optimizer; none of anything else."""
    import torch

    if issubclass(type(holder), torch.nn.Module):
        return {id(p) for p in holder.parameters()}
    if issubclass(type(holder), torch.optim.Optimizer):
        return {id(p) for group in holder.param_groups for p in group["params"]}
    return set()


def _parts(owner: Any) -> Iterator[Any]:
    """All that belongs to a model or an optimizer, but the gradients."""
    import torch

    yield owner
    if isinstance(owner, torch.optim.Optimizer):
        yield from (attribute_dict(owner), owner.param_groups, owner.state)
        yield from owner.param_groups
        yield from (group["params"] for group in owner.param_groups)
        tensors = [p for group in owner.param_groups for p in group["params"]]
        for state in list(owner.state.values()):
            yield state
            yield from list(state.values()) if isinstance(state, dict) else ()
    else:
        tensors = [*owner.parameters(), *owner.buffers()]
        for part in owner.modules():
            yield from (part, vars(part), part._parameters, part._buffers, part._modules)
    yield from tensors


def _written(dictionary: Any, keys: Iterable[Any], walk: Walk, parts: Any) -> list[str]:
    """`trainer.seen`, `losses['b']`."""
    if id(dictionary) in parts:
        return []
    holder = walk.before(dictionary)
    if holder is not None and attribute_dict(holder) is dictionary:
        return [f"{walk.name(holder)}.{key}" for key in keys]
    return [f"{walk.name(dictionary)}[{key!r:.40}]" for key in keys]
