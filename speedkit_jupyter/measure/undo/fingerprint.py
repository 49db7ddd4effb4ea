"""Tell whether a cell changed what is measured while its turn had been given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines import flags
from speedkit_jupyter.measure.undo.isolation import State
from speedkit_jupyter.plans.applying import applied_to

if TYPE_CHECKING:
    import torch


class Fingerprint:
    """What a step works on at one moment, which is also when its `state` is in place."""

    def __init__(self, models: Sequence[torch.nn.Module], state: State) -> None:
        self._models, self._state = models, state
        self._plans, self._settings = self._plans_now(), self._settings_now()
        self._seen = state.glances()  # holds the objects, so that no address is used again

    def difference(self) -> str:
        """Return what differs since, in words; nothing if all is the same."""
        import torch

        if [*map(id, self._plans_now())] != [*map(id, self._plans)]:
            return "a plan was applied or restored"
        if self._settings_now() != self._settings:
            return "a cell changed torch's settings"
        with torch.DisableTorchFunctionSubclass():
            changed = [
                instance
                for handler, instance, memory in self._seen
                if not handler.same(instance, memory)
                or (
                    getattr(memory, "version", None) is not None
                    and instance._version != memory.version
                )
            ]
        changed = changed or self._state.overwritten()  # writing to `.data` counts no version
        if not changed:
            return ""
        names = {
            id(tensor): name
            for model in self._models
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        name = names.get(id(changed[0])) or self._state.walk.name(changed[0])
        return f"a cell changed {name}"

    def _plans_now(self) -> list[Any]:
        plans = [applied_to(model) for model in self._models]
        return [*plans, *(plan.active for plan in plans if plan)]

    def _settings_now(self) -> list[Any]:
        import torch

        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return [*modes, dict(flags.snapshot())]
