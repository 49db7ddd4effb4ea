"""The calls of a model, each made with a part of its samples at a time.

Where gradients are recorded, a part keeps nothing for its backward pass but computes it again, so
that never more than one part's activations are there. Gradients add up by autograd itself, whatever
the loss is: it takes the joined results, as it would those of the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.properties.hooks import has_forward_hooks
from speedkit_jupyter.optimizations.recomputing.outside_state import plain_attributes
from speedkit_jupyter.optimizations.recomputing.recomputed import Recomputed
from speedkit_jupyter.optimizations.splitting.separable import WRITES_TO, proves_nothing, why_not
from speedkit_jupyter.optimizations.splitting.whole_results import NotOfSamples, together
from speedkit_jupyter.support.samples import cut, length_of

if TYPE_CHECKING:
    import torch

PLAIN = (int, float, bool, str, type(None))
# Kinds of calls that are remembered.
MOST = 64
ONE, NONE = "a batch of one sample", "a batch without samples"
ALIKE = "its samples are all the same, which proves nothing"
OTHERS = "what parts gave can't be joined"
HOOKED = "a module has a hook, which parts would call several times"
TRACED = "it is traced, or runs under torch.func"


@dataclass
class Counts:
    """What became of the calls."""

    split: int = 0
    whole: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"{self.split} in parts, {self.whole.total()} whole"

    @property
    def note(self) -> str:
        """Why calls were whole."""
        why = "; ".join(f"{why} ({number})" for why, number in self.whole.items())
        return f"{self}: {why}" if why else str(self)


class SplitCalls(Recomputed):
    """The calls of one model in `parts` parts; those that can't be split are made as ever, counted,
    and said in the notes.
    """

    def __init__(self, model: torch.nn.Module, parts: int, notes: MutableMapping[str, str]) -> None:
        super().__init__(model)
        self.counts, self._parts, self._notes = Counts(), parts, notes
        # Why a kind of calls is not split; empty where it is.
        self._why: dict[Hashable, str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the whole batch."""
        length = length_of((args, kwargs)) if self.is_here() else None
        if length is None:
            return self.below(*args, **kwargs)
        why = self._why_whole(args, kwargs, length)
        if why:
            self._count_whole(why)
            return self.below(*args, **kwargs)
        sizes, results = [], []
        for size, some_args, some_kwargs in self._cut(args, kwargs, length):
            sizes.append(size)
            results.append(super().__call__(*some_args, **some_kwargs))
        try:
            result = together(results, sizes)
        except (NotOfSamples, RuntimeError):  # of other sizes, say: each part is padded for itself
            self._count_whole(OTHERS)
            return self.below(*args, **kwargs)
        self.counts.split += 1
        self._notes["micro_batches"] = self.counts.note
        return result

    def _cut(self, args: Any, kwargs: Any, length: int) -> Iterator[tuple[int, Any, Any]]:
        size = self._size(length)
        for first in range(0, length, size):
            chosen = slice(first, first + size)
            yield min(size, length - first), cut(args, length, chosen), cut(kwargs, length, chosen)

    def _size(self, length: int) -> int:
        """Of a part; the last may be smaller."""
        return -(-length // self._parts)

    def _why_whole(self, args: Any, kwargs: Any, length: int) -> str:
        if length < 2:
            return ONE if length else NONE
        if _is_traced():
            return TRACED
        if has_forward_hooks(self.module):
            return HOOKED
        shape = self._kind(args, kwargs, length)
        kind = shape, *(tuple(part.items()) for part in plain_attributes(self.module))
        why = self._why.get(shape) or self._why.get(kind)
        if why is not None:
            return why
        if proves_nothing(args, kwargs, length):
            return ALIKE
        if len(self._why) >= MOST:
            self._why.clear()
        why = why_not(self.below, self.module, args, kwargs, length, self._size(length))
        # What a call writes to may be among the attributes: another kind each time.
        self._why[shape if why.startswith(WRITES_TO) else kind] = why
        return why

    def _kind(self, args: Any, kwargs: Any, length: int) -> Hashable:
        """All of the arguments that the answer may depend on, but for values of tensors."""
        import torch
        from torch.utils._pytree import tree_flatten

        def of(leaf: Any) -> Hashable:
            if isinstance(leaf, torch.Tensor):
                return leaf.ndim, leaf.dtype, leaf.ndim > 0 and len(leaf) == length
            return leaf if isinstance(leaf, PLAIN) else type(leaf).__qualname__

        leaves, spec = tree_flatten((args, kwargs))
        return str(spec), tuple(of(leaf) for leaf in leaves)

    def _count_whole(self, why: str) -> None:
        self.counts.whole[why] += 1
        self._notes["micro_batches"] = self.counts.note


def _is_traced() -> bool:
    import torch

    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
