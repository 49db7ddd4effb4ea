"""Whose work it is: the module that is called, and in the backward pass the one that was."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.support.torch_private import sequence_number
from speedkit_jupyter.support.wrappers import unwrapped

if TYPE_CHECKING:
    import torch

Around = Callable[[str], AbstractContextManager[Any]]


class ModuleCalls:
    """Follows the calls of modules in this thread; `names` are theirs, by their ids.

    Autograd numbers its nodes in the order in which a thread makes them. So the number of a node
    tells during which call it was made, and what it does in the backward pass is that module's.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._inside: list[str] = []
        # From this number on nodes are this module's.
        self._numbers: list[int] = []
        self._whose: list[str] = []

    def __len__(self) -> int:
        """Return how many calls are open, one within the other."""
        return len(self._inside)

    @property
    def here(self) -> str:
        """Return the innermost module that is being called; empty outside of all."""
        return self._inside[-1] if self._inside else ""

    def of_node(self, number: int) -> str:
        """Return the module that made the node of this number; empty where none did."""
        at = bisect_right(self._numbers, number) - 1
        return self._whose[at] if at >= 0 else ""

    @contextmanager
    def followed(self, around: Around = nullcontext) -> Iterator[None]:
        """Follow calls in the block; `around` makes what surrounds each, from the module's name."""
        import torch

        with patched(torch.nn.Module, "__call__", partial(self._calling, around)):
            yield

    def _calling(self, around: Around, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(module)) or type(module).__name__
            self._inside.append(name)
            self._note()
            try:
                with around(name):
                    return original(module, *args, **kwargs)
            finally:
                self._inside.pop()
                self._note()

        return call

    def _note(self) -> None:
        self._numbers.append(sequence_number())
        self._whose.append(self.here)


def names_of(
    models: Sequence[torch.nn.Module], given: Mapping[int, str]
) -> tuple[dict[int, str], dict[str, str]]:
    """Return the name of each module by its id, as `net.blocks.3.mlp`, and its class by its name.

    `given` are names of models by their ids; one without any is called by its class.
    """
    names: dict[int, str] = {}
    kinds: dict[str, str] = {}
    for model in models:
        inner = unwrapped(model)
        name = given.get(id(model)) or given.get(id(inner)) or type(inner).__name__
        root = _free(name.replace(".", "_"), kinds)
        for path, module in inner.named_modules(prefix=root):
            names.setdefault(id(module), path)
            kinds.setdefault(path, type(module).__name__)
        names.setdefault(id(model), root)
    return names, kinds


def _free(name: str, taken: Mapping[str, str]) -> str:
    number = 1
    while (free := name if number == 1 else f"{name} {number}") in taken:
        number += 1
    return free
