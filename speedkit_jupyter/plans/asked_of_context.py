"""What a training step asks of a context, and which context it is asked of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.plans.entering import Entering
from speedkit_jupyter.plans.planning import Plan

if TYPE_CHECKING:
    import torch

# The prepared context that is in force on a model, by the model's id: what it is measured under.
STANDING_IN: dict[int, Asked] = {}


class Asked:
    """Where the model lies, and the blocks and the scaler of the plan that is in force on it by
    then: while a variant is measured that is another than the plan of the context that code knows.

    `asked` notes what code has called; `_key` is of the model, `_thread` the one that measures.
    """

    asked: set[str]
    target: Target
    _planned: Plan
    _key: int
    _thread: int
    _stack: ExitStack | None
    _around: Mapping[str, Callable[[], AbstractContextManager[Any]]]
    __slots__ = ()

    @property
    def device(self) -> torch.device:
        """Where the model lies now; batches belong there too."""
        import torch

        model = self.target.model
        parameter = None if model is None else next(model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def autocast(self) -> AbstractContextManager[Any]:
        """What the forward pass belongs in: autocast of the plan's dtype; nothing once restored.

        Chosen at each entry, also of one that is kept, or decorates a function.
        """
        return Entering(self._autocast)

    def _autocast(self) -> AbstractContextManager[Any]:
        acting = self._acting if STANDING_IN else self  # at every step: one call less
        acting.asked.add("autocast")
        if acting._stack is None:
            return nullcontext()
        acting.target.memo.autocast_entered = True
        return acting._around["precision"]()

    def sdpa(self) -> AbstractContextManager[Any]:
        """The plan's choice of attention kernel for one block; nothing once restored."""
        return Entering(self._sdpa)

    def _sdpa(self) -> AbstractContextManager[Any]:
        acting = self._acting
        return nullcontext() if acting._stack is None else acting._around["sdpa"]()

    @property
    def grad_scaler(self) -> torch.amp.GradScaler:
        """A GradScaler on the model's device; a disabled one passes everything through."""
        acting = self._acting
        acting.asked.add("grad_scaler")
        return acting._scaler

    @property
    def _acting(self) -> Asked:
        """The context that its model is measured under at present, whichever the code knows.

        In a thread that measures, that of the first measured model stands for one of any other.
        """
        measured = STANDING_IN.get(self._key)
        if measured is None and STANDING_IN:
            here = threading.get_ident()
            measured = next(
                (context for context in STANDING_IN.values() if context._thread == here), None
            )
        return self if measured is None else measured

    @cached_property
    def _scaler(self) -> torch.amp.GradScaler:
        import torch

        return torch.amp.GradScaler(self.device.type, enabled=self._planned["grad_scaler"].active)
