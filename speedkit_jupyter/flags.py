"""Every process-wide PyTorch switch that SpeedKit touches: snapshot, diff, restore, override.

Several applied plans may want the same switch. Their wishes lie on one stack (`OVERRIDES`), so
that they can be taken back in any order: what is still applied stays in force, the last one to
go leaves the original, and a switch that the user changed meanwhile is the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from speedkit_jupyter import fp32_precision, interrupts

Values = Mapping[str, Any]


class Switch(NamedTuple):
    """How one process-wide setting is read and written."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


class Change(NamedTuple):
    """One setting's value before and after."""

    name: str
    before: Any
    after: Any


def snapshot() -> Values:
    """The value in force of every switch, by name. Reading writes nothing, not for a moment."""
    values = {name: switch.read() for name, switch in _switches().items()}
    return MappingProxyType(fp32_precision.read() | values)


def diff(before: Values, after: Values) -> tuple[Change, ...]:
    """What differs, in the order of `before`; a switch that only one side knows is left out."""
    return tuple(
        Change(name, value, after[name])
        for name, value in before.items()
        if name in after and after[name] != value
    )


def restore(values: Values) -> None:
    """Make every switch what the snapshot says. An interrupt waits until that is done."""
    with interrupts.undisturbed():
        _write_plain(values)
        if values.keys() & set(fp32_precision.NAMES):
            fp32_precision.restore({**fp32_precision.read(), **values})


def is_mixed() -> bool:
    """Whether torch's two TF32 APIs disagree, so that its own readers raise RuntimeError."""
    return fp32_precision.is_mixed()


def repair() -> bool:
    """Make torch's two TF32 APIs agree again on what is in force; returns whether they did not."""
    return fp32_precision.repair()


@dataclass(eq=False)
class Layer:
    """One plan's wishes: the values that it set, by name, and the names that the user took over."""

    values: dict[str, Any] = field(default_factory=dict)
    taken_over: list[str] = field(default_factory=list)


class OverrideStack:
    """Overrides of switches that may be taken back in any order."""

    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self._originals: dict[str, Any] = {}

    def push(self, names: Iterable[str], change: Callable[[], None]) -> Layer:
        """Run `change`, which sets the switches in `names`, and remember how to take it back.

        If `change` raises, the switches are put back and the exception goes on.
        """
        layer = Layer()
        try:
            with interrupts.undisturbed():
                self._push(layer, tuple(names), change)
        except BaseException:
            if layer in self._layers:  # an interrupt that was held back: nobody could pop it
                self.pop(layer)
            raise
        return layer

    def _push(self, layer: Layer, names: tuple[str, ...], change: Callable[[], None]) -> None:
        before = _read(names)
        try:
            change()
        except BaseException:
            _write(before)
            raise
        self._adopt_changes_by_the_user(before)
        layer.values.update(_read(names))
        for name, value in before.items():
            self._originals.setdefault(name, value)
        self._layers.append(layer)

    def pop(self, layer: Layer) -> tuple[str, ...]:
        """Take one layer back; returns the names that the user changed meanwhile (they stay)."""
        with interrupts.undisturbed():
            current = _read(layer.values)
            on_top = [name for name in layer.values if self._top(name) is layer]
            kept = tuple(name for name in on_top if current[name] != layer.values[name])
            self._layers.remove(layer)
            targets = {name: self._in_force(name) for name in on_top if name not in kept}
            for name in layer.values:
                if self._top(name) is None:
                    self._originals.pop(name, None)
            _write(targets)
        return (*layer.taken_over, *kept)

    def _top(self, name: str) -> Layer | None:
        return next((layer for layer in reversed(self._layers) if name in layer.values), None)

    def _in_force(self, name: str) -> Any:
        top = self._top(name)
        return self._originals[name] if top is None else top.values[name]

    def _adopt_changes_by_the_user(self, found: Values) -> None:
        """What the user set since the last override is what its undo must come back to."""
        for name, value in found.items():
            if self._top(name) is None or self._in_force(name) == value:
                continue
            for layer in self._layers:
                if name in layer.values:
                    del layer.values[name]
                    layer.taken_over.append(name)
            self._originals.pop(name, None)


# State at module level, on purpose: the switches themselves belong to the whole process.
OVERRIDES = OverrideStack()


def _read(names: Iterable[str]) -> Values:
    """Exactly, for what is put back later: the fp32 switches' own values, not inherited ones."""
    names = tuple(names)
    switches = _switches()
    fp32 = fp32_precision.own() if set(names) & set(fp32_precision.NAMES) else {}
    return {name: fp32[name] if name in fp32 else switches[name].read() for name in names}


def _write(values: Values) -> None:
    fp32 = {name: value for name, value in values.items() if name in fp32_precision.NAMES}
    if fp32:
        current = fp32_precision.own()
        if any(current[name] != value for name, value in fp32.items()):
            fp32_precision.write(current | fp32)
    _write_plain(values)


def _write_plain(values: Values) -> None:
    for name, switch in _switches().items():
        if name in values and switch.read() != values[name]:
            switch.write(values[name])


def _switches() -> dict[str, Switch]:
    """All switches but the fp32 ones, which are coupled and have a module of their own."""
    import torch

    switches = {
        "num_threads": Switch(torch.get_num_threads, torch.set_num_threads),
        "default_dtype": Switch(torch.get_default_dtype, torch.set_default_dtype),
    }
    for attribute in ("benchmark", "deterministic"):
        switches[f"cudnn.{attribute}"] = _attribute(torch.backends.cudnn, attribute)
    return (
        switches
        | _reduction_switches()
        | _sdp_switches()
        | _autocast_switches()
        | _compile_switches()
    )


def _reduction_switches() -> dict[str, Switch]:
    """Read below torch.backends, whose getters hide the second half of the setting (split-K)."""
    import torch

    return {
        f"cuda.matmul.{attribute}": Switch(
            getattr(torch._C, f"_get_cublas_{attribute}"),
            partial(setattr, torch.backends.cuda.matmul, attribute),
        )
        for attribute in (
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
        )
    }


def _sdp_switches() -> dict[str, Switch]:
    import torch
    from torch.backends import cuda

    return {
        "sdp.flash": Switch(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "sdp.efficient": Switch(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "sdp.math": Switch(cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "sdp.cudnn": Switch(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        "sdp.priority_order": Switch(
            torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order
        ),
    }


def _autocast_switches() -> dict[str, Switch]:
    import torch

    switches = {
        "autocast.cache_enabled": Switch(
            torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
        )
    }
    for device in _devices_with_autocast():
        switches[f"autocast.{device}.enabled"] = Switch(
            partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        )
        switches[f"autocast.{device}.dtype"] = Switch(
            partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
        )
    return switches


def _devices_with_autocast() -> list[str]:
    """The kinds of device that this torch has autocast for: cpu, cuda, and one more if any."""
    import torch

    kinds = ["cpu", "cuda"]
    for kind in ("xpu", "mps", "hpu", "mtia", "xla", "privateuseone"):
        with suppress(RuntimeError):
            torch.is_autocast_enabled(kind)
            torch.get_autocast_dtype(kind)
            kinds.append(kind)
    return kinds


def _compile_switches() -> dict[str, Switch]:
    """Only where torch.compile's modules are loaded: importing them takes seconds."""
    switches = {}
    for short, module, attribute in (
        ("dynamo.skip_nnmodule_hook_guards", "torch._dynamo.config", "skip_nnmodule_hook_guards"),
        ("compiler.cache_key_tag", "torch.compiler.config", "cache_key_tag"),
    ):
        if module in sys.modules:
            switches[short] = _attribute(sys.modules[module], attribute)
    return switches


def _attribute(owner: Any, name: str) -> Switch:
    return Switch(partial(getattr, owner, name), partial(setattr, owner, name))
