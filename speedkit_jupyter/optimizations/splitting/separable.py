"""Whether the samples of a batch can be computed apart, tried on a few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.splitting.left import put_back
from speedkit_jupyter.optimizations.splitting.whole_results import NotOfSamples, same, together
from speedkit_jupyter.support.samples import are_alike, cut

if TYPE_CHECKING:
    import torch

# So many samples make a part of the trial, where there are enough.
FEW = 2
DEPEND = "samples depend on each other (a batch norm that trains?)"
RANDOM = "it draws random numbers, other ones for parts than for the whole"
WRITES_TO = "it writes to "
WRITES = WRITES_TO + "{}, which the calls of parts would do several times"


def why_not(
    call: Callable[..., Any], model: torch.nn.Module, args: Any, kwargs: Any, length: int, size: int
) -> str:
    """Why parts of `size` samples don't make up a call; empty where they do.

    Two parts of few samples are called, and both at once, without gradients; then all parts and the
    whole, since some models go by how many samples there are (an expert's capacity, the hardest
    few). Dropout is off, since it draws other masks for parts. Everything is as before afterwards.
    """
    import torch

    number, every = _few(length)

    def some(chosen: slice) -> Callable[[], Any]:
        some_args, some_kwargs = _own(cut(args, length, chosen)), _own(cut(kwargs, length, chosen))
        return lambda: call(*some_args, **some_kwargs)

    def few() -> list[Callable[[], Any]]:
        ends = ((0, number), (number, 2 * number), (0, 2 * number))
        return [some(slice(first * every, last * every, every)) for first, last in ends]

    def every_part() -> Iterator[Callable[[], Any]]:
        yield from (some(slice(first, first + size)) for first in range(0, length, size))
        yield some(slice(0, length))

    sizes = [min(size, length - first) for first in range(0, length, size)]
    try:
        why = _Trial(model, [number] * 2).outcome(few)
        return why or _Trial(model, sizes).outcome(every_part)
    except torch.OutOfMemoryError:  # of the whole, even without gradients: the few have to do
        return ""
    except NotOfSamples as error:
        return str(error)
    except Exception as error:  # the user's own code, with samples that it did not expect
        return f"with some of the samples it raises {type(error).__name__}"


def proves_nothing(args: Any, kwargs: Any, length: int) -> bool:
    """Whether the few samples of a trial hold the same."""
    number, every = _few(length)
    return are_alike((args, kwargs), length, slice(0, 2 * number * every, every))


def _few(length: int) -> tuple[int, int]:
    """How many samples each of two parts has, and how far apart they lie in the whole."""
    number = max(1, min(FEW, length // 2))
    return number, length // (2 * number)


class _Trial:
    def __init__(self, model: torch.nn.Module, sizes: Sequence[int]) -> None:
        self._model, self._sizes = model, sizes

    def outcome(self, calls: Callable[[], Iterable[Callable[[], Any]]]) -> str:
        """Why not; as the model is, but for dropout, and in eval mode where it draws even so."""
        from torch.nn.modules.dropout import _DropoutNd

        modules = [*self._model.modules()]
        dropouts = [module for module in modules if isinstance(module, _DropoutNd)]
        why, draws = self._tried(calls, dropouts)
        if draws and why == DEPEND:
            why, draws = self._tried(calls, modules)
        return RANDOM if draws and why == DEPEND else why

    def _tried(
        self, calls: Callable[[], Iterable[Callable[[], Any]]], still: Sequence[torch.nn.Module]
    ) -> tuple[str, bool]:
        """Why not, and whether random numbers were drawn."""
        import torch

        with _in_eval(still), put_back(self._model) as left, torch.no_grad():
            *parts, both = (call() for call in calls())
            draws = left.has_drawn()
            if written := left.written_to():
                return WRITES.format(written), draws
            whole = together(parts, self._sizes)
            together([both], [sum(self._sizes)])
            return "" if same(whole, both) else DEPEND, draws


@contextmanager
def _in_eval(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    trained = [module for module in modules if module.training]
    for module in trained:
        module.__dict__["training"] = False
    try:
        yield
    finally:
        for module in trained:
            module.__dict__["training"] = True


def _own(value: Any) -> Any:
    """With tensors that a call may write to."""
    import torch
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)
