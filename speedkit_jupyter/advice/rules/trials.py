"""Remedies in force for a while, so that they can be measured without editing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.advice.opportunity import Subject, Trial
from speedkit_jupyter.measure.rounds.confinement import patched

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from speedkit_jupyter.advice.situation import Situation


def not_stepped(subject: Subject) -> list[torch.nn.Parameter]:
    """Parameters that require gradients, and that no optimizer holds."""
    held = subject.held
    return [one for one in subject.parameters if one.requires_grad and id(one) not in held]


@contextmanager
def without_gradients(subject: Subject) -> Iterator[None]:
    """Parameters that no optimizer steps need none."""
    changed = not_stepped(subject)
    try:
        for one in changed:
            one.requires_grad_(False)
        yield
    finally:
        for one in changed:
            one.requires_grad_(True)


@contextmanager
def sparse_tables(subject: Subject) -> Iterator[None]:
    """Embeddings give gradients of the rows that were asked for, and Adam steps these alone."""
    import torch

    taken: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for one in group["params"]:
                if one.grad is not None and one.grad.is_sparse:
                    _step_rows(one, group, optimizer.state[one])
                    taken.append((one, one.grad))
                    one.grad = None  # the optimizer leaves it out

    def after(*_: Any) -> None:
        while taken:
            one, gradient = taken.pop()
            one.grad = gradient

    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    tables = [one for model in subject.models for one in model.modules() if isinstance(one, kinds)]
    dense = [one for one in tables if not one.sparse]
    try:
        for one in dense:
            one.sparse = True
        with ExitStack() as hooks:
            for optimizer in filter(steps_rows, subject.optimizers):
                # One optimizer's own hooks run after those of all: what checks gradients sees them.
                hooks.callback(optimizer.register_step_pre_hook(before).remove)
                hooks.callback(optimizer.register_step_post_hook(after).remove)
            yield
    finally:
        for one in dense:
            one.sparse = False


def steps_rows(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether Adam's step of a row without a gradient is its moments' alone."""
    import torch

    return isinstance(optimizer, torch.optim.Adam) and not any(
        group["weight_decay"] or group["amsgrad"] or group["maximize"] or group["differentiable"]
        for group in optimizer.param_groups
    )


def _step_rows(table: torch.nn.Parameter, group: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Make Adam's step of the rows that have a gradient."""
    import torch

    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(table), torch.zeros_like(table)
    gradient = table.grad.coalesce()  # type: ignore[union-attr]
    (rows,), values = gradient.indices(), gradient.values()
    first, second = group["betas"]
    state["step"] += 1
    number = float(state["step"])
    mean = state["exp_avg"][rows].lerp(values, 1 - first)
    square = second * state["exp_avg_sq"][rows] + (1 - second) * values**2
    state["exp_avg"][rows], state["exp_avg_sq"][rows] = mean, square
    size = (square / (1 - second**number)).sqrt() + group["eps"]
    with torch.no_grad():
        table[rows] -= float(group["lr"]) / (1 - first**number) * mean / size


@contextmanager
def zeroed_to_none(_: Subject) -> Iterator[None]:
    """`zero_grad` lets gradients go, whatever it was asked for."""
    import torch

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda optimizer, set_to_none=True: original(optimizer, True)

    with patched(torch.optim.Optimizer, "zero_grad", make):
        yield


@contextmanager
def graph_let_go(which: str, _: Subject) -> Iterator[None]:
    """`backward` without `retain_graph` or `create_graph`."""
    import torch

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensors: Any, grads: Any = None, retain: Any = None, create: Any = False,
                 *args: Any, **kwargs: Any) -> Any:  # fmt: skip
            kwargs.pop(which, None)
            return original(tensors, grads, None, False, *args, **kwargs)

        return call

    with patched(torch.autograd, "backward", make):
        yield


@contextmanager
def doing_nothing(owners: Sequence[tuple[Any, str]], _: Subject) -> Iterator[None]:
    """These functions return at once."""
    with ExitStack() as stack:
        for owner, name in owners:
            stack.enter_context(patched(owner, name, lambda _: lambda *args, **kwargs: None))
        yield


def other_loader(
    seen: Situation, number: int, make: Callable[[DataLoader[Any]], DataLoader[Any]]
) -> Trial | None:
    """The step with another loader in place of the one of this number; None where the step makes
    that itself, each time another one.
    """
    lasts = seen.lasting is None or number < seen.lasting
    return partial(replaced, number, make) if lasts else None


@contextmanager
def replaced(
    number: int, make: Callable[[DataLoader[Any]], DataLoader[Any]], subject: Subject
) -> Iterator[None]:
    """Whoever goes through this loader gets the batches of another one, which is made of it."""
    from torch.utils.data import DataLoader

    loader = subject.loaders[number]
    other = make(loader)

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(asked: DataLoader[Any]) -> Any:
            if asked is not loader:
                return original(asked)
            if other.persistent_workers and other._iterator is not None:
                _draw_a_seed(loader)
            return original(other)

        return call

    with patched(DataLoader, "__iter__", instead):
        yield


def _draw_a_seed(loader: DataLoader[Any]) -> None:
    """As every new iterator does, but not one whose workers stay: so the order is the same."""
    import torch

    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
