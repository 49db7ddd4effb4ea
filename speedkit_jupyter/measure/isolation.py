"""The state that a step changes, copied and put back byte for byte."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.surroundings import states_of

if TYPE_CHECKING:
    import torch

Restore = Callable[[], None]
MISSING = object()


class State:
    """A copy of models, optimizers, scalers, random generators and names at one moment.

    `restore` writes the copied values into the objects that were found then: parameters,
    gradients and optimizer states stay the same objects.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        scalers: Sequence[torch.amp.GradScaler] = (),
        names: MutableMapping[str, Any] | None = None,
        assigned: Sequence[str] = (),
        others: Sequence[Any] = (),
    ) -> None:
        self._restores: list[Restore] = [
            *(_model_state(model) for model in models),
            *(_optimizer_state(optimizer) for optimizer in optimizers),
            *(_scaler_state(scaler) for scaler in scalers),
            _random_state(),
        ]
        if names is not None:
            self._restores.append(_names_state(names, assigned))
        self._restores += states_of(others)

    def restore(self) -> None:
        """Put everything back; what fails does not keep the rest from being put back."""
        failure: BaseException | None = None
        for restore in self._restores:
            try:
                restore()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure


@contextmanager
def isolated(*arguments: Any, **more: Any) -> Iterator[State]:
    """Whatever the block does to the state (arguments as for State) is undone at its end."""
    from speedkit_jupyter import interrupts

    state = State(*arguments, **more)
    try:
        yield state
    finally:
        with interrupts.held_back():
            state.restore()


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Values into the same object; where the layout changed meanwhile, the old one returns."""
    import torch

    with torch.no_grad():
        if tensor.shape == value.shape and tensor.dtype == value.dtype:
            tensor.detach().copy_(value)
        else:
            tensor.data = value.to(tensor.device).clone()


def _model_state(model: torch.nn.Module) -> Restore:
    tensors = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    gradients = [
        (p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in model.parameters()
    ]
    # Attributes, and with them training modes, replaced parameters, buffers and submodules.
    attributes = [
        (holder, dict(holder))
        for module in model.modules()
        for holder in (module.__dict__, module._parameters, module._buffers, module._modules)
    ]

    def restore() -> None:
        for holder, saved in attributes:
            if [*holder] != [*saved]:  # the order is that of `state_dict` too
                holder.clear()
            holder.update(saved)
        for tensor, value in tensors:
            _write(tensor, value)
        for parameter, gradient, copied in gradients:
            parameter.grad = gradient
            if gradient is not None and copied is not None:
                _write(gradient, copied)

    return restore


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Restore:
    state, groups = optimizer.state, optimizer.param_groups
    copied = {key: _copied(value) for key, value in state.items()}
    found = [
        (group, list(group["params"]), _copied({k: v for k, v in group.items() if k != "params"}))
        for group in groups
    ]

    def restore() -> None:
        if optimizer.state is not state:  # `load_state_dict` replaces the containers
            optimizer.state = state
        if optimizer.param_groups is not groups:
            optimizer.param_groups = groups
        _fill(state, copied)
        groups[:] = [group for group, _, _ in found]
        for group, parameters, options in found:
            group["params"][:] = parameters
            for name in [name for name in group if name != "params" and name not in options[0]]:
                del group[name]
            group.update(_fill(*options))

    return restore


def _copied(value: Any) -> tuple[Any, Any]:
    """The object itself beside a copy of what it holds, dicts and lists element by element."""
    import torch

    if isinstance(value, dict):
        return value, {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return value, [_copied(one) for one in value]
    if isinstance(value, torch.Tensor):
        return value, value.detach().clone()
    return value, copy.deepcopy(value)


def _fill(value: Any, copied: Any) -> Any:
    """Make an object hold again what `_copied` saw in it; gives the object."""
    import torch

    if isinstance(value, dict):
        value.clear()
        value.update({key: _fill(*pair) for key, pair in copied.items()})
    elif isinstance(value, list):
        value[:] = [_fill(*pair) for pair in copied]
    elif isinstance(value, torch.Tensor):
        _write(value, copied)
    else:
        return copy.deepcopy(copied)
    return value


def _scaler_state(scaler: torch.amp.GradScaler) -> Restore:
    """Scale, growth tracker and the stage of each optimizer are attributes, nested dicts too."""
    attributes, copied = _copied(vars(scaler))

    def restore() -> None:
        _fill(attributes, copied)

    return restore


def _random_state() -> Restore:
    import torch

    python, cpu = random.getstate(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy is not None else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if mps is not None:
            torch.mps.set_rng_state(mps)
        if numpy is not None:
            numpy.random.set_state(legacy)

    return restore


def _names_state(names: MutableMapping[str, Any], assigned: Sequence[str]) -> Restore:
    found: Mapping[str, Any] = {name: names.get(name, MISSING) for name in assigned}

    def restore() -> None:
        for name, value in found.items():
            if value is MISSING:
                names.pop(name, None)
            else:
                names[name] = value

    return restore
