"""Read, compare, restore and override the process-wide PyTorch flags that SpeedKit uses.

Applied plans put their overrides on one stack (`OVERRIDES`), and can undo them in any order. The
last undo restores the original values. A flag that the user changed keeps the user's value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from speedkit_jupyter.machines import fp32_precision
from speedkit_jupyter.torchglue import interrupts
from speedkit_jupyter.torchglue.private import missing_name

Values = Mapping[str, Any]


class Flag(NamedTuple):
    """The functions that read and write one process-wide setting. Tests set it to `others`."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    others: tuple[Any, ...] = ()


# Functions that return the flags of optimizations; the catalog adds them when it is loaded.
OWNERS: list[Callable[[], Mapping[str, Flag]]] = []


class Change(NamedTuple):
    """The values of one flag in an earlier and a later snapshot."""

    name: str
    before: Any
    after: Any


def snapshot() -> Values:
    """Return the current value of every flag, by name. No flag is written."""
    table = all_flags()
    return MappingProxyType(_read((*table, *fp32_precision.NAMES), table))


def diff(before: Values, after: Values) -> tuple[Change, ...]:
    """Return the changes of flags that are in both snapshots, in the order of `before`."""
    return tuple(
        Change(name, value, after[name])
        for name, value in before.items()
        if name in after and after[name] != value
    )


def restore(values: Values) -> None:
    """Set the flags named in `values` to these values. Other flags are left unchanged."""
    with interrupts.uninterrupted():
        for name, flag in (all_flags() if values else {}).items():
            if name in values and flag.read() != values[name]:
                flag.write(values[name])
        if values.keys() & set(fp32_precision.NAMES):
            fp32_precision.restore(values)


@dataclass(eq=False)
class FlagOverride:
    """The flag values that one plan has set. Flags that the user changes move to `taken_over`."""

    values: dict[str, Any] = field(default_factory=dict)
    taken_over: list[str] = field(default_factory=list)


class OverrideStack:
    """Overrides of flags, which can be undone in any order."""

    def __init__(self) -> None:
        self._layers: list[FlagOverride] = []
        self._originals: dict[str, Any] = {}

    def push(self, names: Iterable[str], change: Callable[[], object]) -> FlagOverride:
        """Run `change`, which sets the flags `names`, and return an override. Undo it on errors."""
        layer, names = FlagOverride(), tuple(names)
        try:
            with interrupts.uninterrupted():
                table = all_flags()
                before = _read(names, table)
                try:
                    change()
                except BaseException:
                    restore(before)
                    raise
                self._adopt_changes_by_the_user(before)
                layer.values.update(_read(names, table))
                self._originals = before | self._originals
                self._layers.append(layer)
        except BaseException:
            if layer in self._layers:  # interrupted: the caller has no layer to pop
                self.pop(layer)
            raise
        return layer

    def pop(self, layer: FlagOverride) -> tuple[str, ...]:
        """Undo an override. Keep flags that the user changed afterwards; return their names."""
        with interrupts.uninterrupted():
            current = _read(layer.values, all_flags())
            on_top = [name for name in layer.values if self._top(name) is layer]
            kept = tuple(name for name in on_top if current[name] != layer.values[name])
            self._layers.remove(layer)
            targets = {name: self._in_force(name) for name in on_top if name not in kept}
            for name in layer.values:
                if self._top(name) is None:
                    self._originals.pop(name, None)
            restore(targets)
        return (*layer.taken_over, *kept)

    def _top(self, name: str) -> FlagOverride | None:
        return next((layer for layer in reversed(self._layers) if name in layer.values), None)

    def _in_force(self, name: str) -> Any:
        top = self._top(name)
        return self._originals[name] if top is None else top.values[name]

    def _adopt_changes_by_the_user(self, values: Values) -> None:
        """Treat values that the user has set since the last override as originals to restore."""
        for name, value in values.items():
            if self._top(name) is None or self._in_force(name) == value:
                continue
            for layer in self._layers:
                if name in layer.values:
                    del layer.values[name]
                    layer.taken_over.append(name)
            self._originals.pop(name, None)


# This is global, because flags belong to the whole process.
OVERRIDES = OverrideStack()


def _read(names: Iterable[str], table: Mapping[str, Flag]) -> dict[str, Any]:
    names = tuple(names)
    fp32 = fp32_precision.read() if set(names) & set(fp32_precision.NAMES) else {}
    return {name: fp32[name] if name in fp32 else table[name].read() for name in names}


def attribute(owner: Any, name: str, *values: Any) -> Flag:
    """Return the Flag of an attribute of a torch module, with `values` for tests."""
    return Flag(partial(getattr, owner, name), partial(setattr, owner, name), values)


def all_flags() -> dict[str, Flag]:
    """Return all flags of this torch by name, except `fp32_precision.NAMES`."""
    import torch

    table = {  # no optimization sets these, but decisions or results depend on them
        "default_dtype": Flag(
            torch.get_default_dtype,
            torch.set_default_dtype,
            (torch.float64, torch.float16, torch.bfloat16),
        ),
        "cudnn.deterministic": attribute(torch.backends.cudnn, "deterministic", True),
        **_sums_of_products(),
    }
    for owner in OWNERS:
        try:
            table |= owner()
        except (AttributeError, ImportError) as error:
            if not missing_name(error):
                raise
    return table


def _sums_of_products() -> dict[str, Flag]:
    """Return cuBLAS's reduced-precision flags; with split-K, a pair of settings for reductions."""
    import torch

    matmul = torch.backends.cuda.matmul
    name = "allow_fp16_accumulation"
    table = {f"cuda.matmul.{name}": attribute(matmul, name, True)}
    for kind in ("fp16", "bf16"):
        name = f"allow_{kind}_reduced_precision_reduction"
        is_pair = hasattr(matmul, f"{name}_split_k")
        names = (name, f"{name}_split_k") if is_pair else (name,)
        read: Callable[[Any], Any] = attrgetter(*names)
        values = ((False, False), (False, True)) if is_pair else (False,)
        write = partial(setattr, matmul, name)
        table[f"cuda.matmul.{name}"] = Flag(partial(read, matmul), write, values)
    return table
