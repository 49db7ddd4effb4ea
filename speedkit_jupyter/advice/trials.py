"""Remedies in force for a while, so that they can be measured without editing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.advice.opportunity import Subject, Trial
from speedkit_jupyter.loading.settings import Settings
from speedkit_jupyter.loading.tuned_loader import rebuilt
from speedkit_jupyter.measure.rounds.confinement import patched

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


# Gradients and graphs.


def not_stepped(subject: Subject) -> list[torch.nn.Parameter]:
    """Return the parameters that require gradients, and that no optimizer holds."""
    held = subject.held
    return [one for one in subject.parameters if one.requires_grad and id(one) not in held]


@contextmanager
def without_gradients(subject: Subject) -> Iterator[None]:
    """Require no gradients of parameters that no optimizer steps."""
    changed = not_stepped(subject)
    try:
        for one in changed:
            one.requires_grad_(False)
        yield
    finally:
        for one in changed:
            one.requires_grad_(True)


@contextmanager
def no_gradients(_: Subject) -> Iterator[None]:
    """Compute without gradients."""
    import torch

    with torch.no_grad():
        yield


@contextmanager
def zeroed_to_none(_: Subject) -> Iterator[None]:
    """Let `zero_grad` drop gradients, whatever it was asked for."""
    import torch

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda optimizer, set_to_none=True: original(optimizer, True)

    with patched(torch.optim.Optimizer, "zero_grad", make):
        yield


@contextmanager
def graph_let_go(which: str, _: Subject) -> Iterator[None]:
    """Call `backward` without `retain_graph` or `create_graph`."""
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
def anomaly_mode_off(_: Subject) -> Iterator[None]:
    """Detect no anomalies, also where the step itself turns that on."""
    import torch

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda mode, check_nan=True: original(False, check_nan)

    with torch.autograd.set_detect_anomaly(False), patched(torch, "set_anomaly_enabled", make):
        yield


# Updates of embedding tables.


def steps_what_has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether rows without a gradient stay as they are: plain SGD."""
    import torch

    return isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] or group["weight_decay"] for group in optimizer.param_groups
    )


def steps_rows(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether Adam's step of a row without a gradient is its moments' alone."""
    import torch

    return isinstance(optimizer, torch.optim.Adam) and not any(
        group["weight_decay"] or group["amsgrad"] or group["maximize"] or group["differentiable"]
        for group in optimizer.param_groups
    )


@contextmanager
def sparse_tables(subject: Subject) -> Iterator[None]:
    """Have embeddings give gradients of the rows that were asked for; Adam steps these alone."""
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


# Settings.


@contextmanager
def deterministic_off(_: Subject) -> Iterator[None]:
    """Allow kernels whose sums come in any order, also where the step asks for others."""
    import torch

    cudnn = torch.backends.cudnn
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
    )
    torch.use_deterministic_algorithms(False)
    cudnn.deterministic = False
    try:
        with doing_nothing([(torch, "use_deterministic_algorithms")], _):  # the step's own calls
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic = before[2]


@contextmanager
def unchecked_distributions(_: Subject) -> Iterator[None]:
    """Check no arguments of `torch.distributions`."""
    from torch.distributions import Distribution

    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def doing_nothing(owners: Sequence[tuple[Any, str]], _: Subject) -> Iterator[None]:
    """Return at once from these functions."""
    with ExitStack() as stack:
        for owner, name in owners:
            stack.enter_context(patched(owner, name, lambda _: lambda *args, **kwargs: None))
        yield


# Loaders.


def other_loader(
    lasting: int | None, number: int, make: Callable[[DataLoader[Any]], DataLoader[Any]]
) -> Trial | None:
    """Return what replaces the loader of this number; None where the step makes it itself, each
    time another one: the first `lasting` stay.
    """
    return partial(replaced, number, make) if lasting is None or number < lasting else None


@contextmanager
def replaced(
    number: int, make: Callable[[DataLoader[Any]], DataLoader[Any]], subject: Subject
) -> Iterator[None]:
    """Give whoever goes through this loader the batches of another one, which is made of it."""
    import torch
    from torch.utils.data import DataLoader

    loader = subject.loaders[number]
    other = make(loader)

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(asked: DataLoader[Any]) -> Any:
            if asked is not loader:
                return original(asked)
            if other.persistent_workers and other._iterator is not None:
                # Every new iterator draws a seed, one whose workers stay does not.
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            return original(other)

        return call

    with patched(DataLoader, "__iter__", instead):
        yield


def with_workers(workers: int, loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the same loader, with worker processes that stay."""
    from torch.utils.data import DataLoader

    return DataLoader(
        loader.dataset,
        batch_sampler=loader.batch_sampler,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        persistent_workers=True,
    )


def whole_batches(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader that draws the same batches in the same order, each by one index."""
    from torch.utils.data import DataLoader

    return DataLoader(
        loader.dataset,
        sampler=loader.batch_sampler,
        batch_size=None,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
    )


def kept_in_memory(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the same loader, which makes each sample once."""
    return rebuilt(loader, Settings(kept=True))
