"""The state that a step changes, copied and put back byte for byte."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
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
    gradients and optimizer states stay the same objects. The copies lie beside the originals, or
    in main memory where `off_device` is set.
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
    ) -> None:
        copied = self._copies = _Copies(off_device)
        self._restores: list[Restore] = [
            *(_model_state(model, copied) for model in models),
            *(_optimizer_state(optimizer, copied) for optimizer in optimizers),
            *(_scaler_state(scaler) for scaler in scalers),
            _modes_state(),
        ]
        self._random = _random_state()
        if names is not None:
            self._restores.append(_names_state(names, assigned))
        self._restores += states_of(others)

    def restore(self) -> None:
        """Put everything back; what fails does not keep the rest from being put back."""
        failure: BaseException | None = None
        for restore in (*self._restores, self._random):
            try:
                restore()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def holds(self) -> bool:
        """Whether every parameter, buffer, gradient and optimizer state has its copied value.

        Compared by value, since fused optimizers and `.data` change tensors without counting it.
        """
        return all(_equal(tensor, saved) for tensor, saved in self._copies.made)

    def adopt_random_state(self) -> None:
        """The random generators are to come back to what they are now."""
        self._random = _random_state()


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


class _Copies:
    """Makes copies of tensors, beside them or in main memory, and remembers which."""

    def __init__(self, off_device: bool = False) -> None:
        self.off_device = off_device
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.detach()
        saved = found.to("cpu", copy=True) if self.off_device else found.clone()
        self.made.append((tensor, saved))
        return saved


def _equal(tensor: torch.Tensor, saved: torch.Tensor) -> bool:
    """The same values; what is not a number equals itself."""
    import torch

    if tensor.shape != saved.shape or tensor.dtype != saved.dtype:
        return False
    if tensor.is_meta:
        return True
    with torch.inference_mode():
        one, other = tensor.detach(), saved.to(tensor.device)
        if one.layout != torch.strided:
            one, other = one.to_dense(), other.to_dense()
        if torch.equal(one, other):
            return True
        return bool(((one == other) | ((one != one) & (other != other))).all())


def _tensor_state(tensor: torch.Tensor, copied: _Copies | None = None) -> Restore:
    """Values into the same object and the same memory; strides, dtype and device return with it.

    They change when a plan is taken back and applied again. State that does not lie like its
    parameter belongs to other weights in a fused kernel, and recorded CUDA graphs know addresses.
    """
    import torch

    copied = copied or _Copies()
    saved, layout = copied(tensor), _layout(tensor)
    home = None if copied.off_device else tensor.data  # else it would stay on the device as well
    is_leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    strides = tensor.stride() if tensor.layout == torch.strided else None
    device = tensor.device

    def restore() -> None:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if home is not None and _layout(tensor) != layout:
                tensor.data = home
            elif _layout(tensor)[:4] != layout[:4]:
                tensor.data = saved.to(device, copy=True)  # strides and all
            # Not through detach(): for a sparse tensor that is another one.
            _once(tensor, strides).copy_(_once(saved, strides))
        if is_leaf and not tensor.is_leaf:  # a graph was written into it
            tensor.detach_()
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)

    return restore


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    import torch

    if tensor.layout != torch.strided:
        return tensor.shape, tensor.dtype, tensor.device
    address = None if tensor.is_meta else tensor.data_ptr()
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), address


def _once(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """Each element in memory once: an expanded dimension (stride 0) can't be written whole."""
    if strides is None or 0 not in strides:
        return tensor
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in strides)]


def _model_state(model: torch.nn.Module, copied: _Copies) -> Restore:
    import torch

    tensors = [_tensor_state(one, copied) for one in (*model.parameters(), *model.buffers())]
    gradients = [
        (p, p.grad, None if p.grad is None else _tensor_state(p.grad, copied))
        for p in model.parameters()
    ]
    # Attributes, and with them training modes, replaced parameters, buffers and submodules.
    attributes = [
        (holder, dict(holder))
        for module in model.modules()
        for holder in (module.__dict__, module._parameters, module._buffers, module._modules)
        if isinstance(holder, dict)  # TorchScript keeps its own in C++, where none is replaced
    ]
    torchs = vars(torch.nn.Module())  # hooks: those of a plan may be others when it returns
    own = states_of(
        [
            value
            for module in model.modules()
            for name, value in vars(module).items()
            if name not in torchs and isinstance(value, list | dict | set | deque | torch.Tensor)
        ]
    )

    def restore() -> None:
        for holder, saved in attributes:
            if [*holder] != [*saved]:  # the order is that of `state_dict` too
                holder.clear()
            holder.update(saved)
        for write in (*tensors, *own):
            write()
        for parameter, gradient, write_gradient in gradients:
            if write_gradient is not None:  # first, for it must fit the parameter
                write_gradient()
            parameter.grad = gradient

    return restore


def _optimizer_state(optimizer: torch.optim.Optimizer, copied: _Copies) -> Restore:
    state, groups = optimizer.state, optimizer.param_groups
    attributes = _plain_attributes(optimizer)
    held = {key: _copied(value, copied) for key, value in state.items()}
    found = [(group, list(group["params"]), _copied(_options(group), copied)) for group in groups]

    def restore() -> None:
        for name in _plain_attributes(optimizer).keys() - attributes.keys():
            del optimizer.__dict__[name]
        optimizer.__dict__.update(attributes)  # `load_state_dict` replaces containers
        _fill(state, held)
        groups[:] = [group for group, _, _ in found]
        for group, parameters, options in found:
            group["params"][:] = parameters
            for name in [name for name in group if name != "params" and name not in options[0]]:
                del group[name]
            group.update(_fill(*options))

    return restore


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Counters and containers; not `step`, on which schedulers and plans put their own."""
    return {name: value for name, value in vars(optimizer).items() if not callable(value)}


def _copied(value: Any, copied: _Copies | None = None) -> tuple[Any, Any]:
    """The object itself beside a copy of what it holds, dicts and lists element by element."""
    import torch

    if isinstance(value, dict):
        return value, {key: _copied(one, copied) for key, one in value.items()}
    if isinstance(value, list):
        return value, [_copied(one, copied) for one in value]
    if isinstance(value, torch.Tensor):
        return value, _tensor_state(value, copied)
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
        copied()
    else:
        return copy.deepcopy(copied)
    return value


def _scaler_state(scaler: torch.amp.GradScaler) -> Restore:
    """Scale, growth tracker and the stage of each optimizer are attributes, nested dicts too."""
    attributes, held = _copied(vars(scaler))

    def restore() -> None:
        _fill(attributes, held)

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


def _modes_state() -> Restore:
    """Process-wide modes that a step may set: gradients, default dtype, threads."""
    import torch

    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    threads = torch.get_num_threads()

    def restore() -> None:
        if torch.is_grad_enabled() != gradients:
            torch.set_grad_enabled(gradients)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

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
