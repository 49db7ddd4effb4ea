"""Whether the samples of a batch can be computed apart, tried on a few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    call: Callable[..., Any], model: torch.nn.Module, args: Any, kwargs: Any, length: int
) -> str:
    """Why parts don't make up a call; empty where they do.

    Two parts of few samples are called, and both at once, without gradients; dropout is off, since
    it draws other masks for parts. Everything is as before afterwards.
    """
    number = max(1, min(FEW, length // 2))
    every = length // (2 * number)

    def few(first: int, last: int) -> Callable[[], Any]:
        chosen = slice(first * every, last * every, every)
        some_args, some_kwargs = _own(cut(args, length, chosen)), _own(cut(kwargs, length, chosen))
        return lambda: call(*some_args, **some_kwargs)

    trial = _Trial(model, number)
    try:
        return trial.outcome(lambda: [few(0, number), few(number, 2 * number), few(0, 2 * number)])
    except NotOfSamples as error:
        return str(error)
    except Exception as error:  # the user's own code, with samples that it did not expect
        return f"with {number} of the samples it raises {type(error).__name__}"


def proves_nothing(args: Any, kwargs: Any, length: int) -> bool:
    """Whether the few samples of a trial hold the same."""
    number = max(1, min(FEW, length // 2))
    every = length // (2 * number)
    return are_alike((args, kwargs), length, slice(0, 2 * number * every, every))


class _Trial:
    def __init__(self, model: torch.nn.Module, number: int) -> None:
        self._model, self._number = model, number

    def outcome(self, calls: Callable[[], list[Callable[[], Any]]]) -> str:
        """Why not; as the model is, but for dropout, and in eval mode where it draws even so."""
        from torch.nn.modules.dropout import _DropoutNd

        modules = [*self._model.modules()]
        dropouts = [module for module in modules if isinstance(module, _DropoutNd)]
        why, draws = self._tried(calls, dropouts)
        if draws and why == DEPEND:
            why, draws = self._tried(calls, modules)
        return RANDOM if draws and why == DEPEND else why

    def _tried(
        self, calls: Callable[[], list[Callable[[], Any]]], still: Sequence[torch.nn.Module]
    ) -> tuple[str, bool]:
        """Why not, and whether random numbers were drawn."""
        import torch

        with _in_eval(still), put_back(self._model) as left, torch.no_grad():
            one, other, both = (call() for call in calls())
            draws = left.has_drawn()
            if written := left.written_to():
                return WRITES.format(written), draws
            whole = together([one, other], [self._number] * 2)
            together([both], [2 * self._number])
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
