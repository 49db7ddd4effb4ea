"""What a step works on, by identity: which objects there are, and in what order and setting.

Values of tensors are compared elsewhere (`State.holds`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines import flags
from speedkit_jupyter.measure.undo.isolation import State
from speedkit_jupyter.plans.applying import applied_to

if TYPE_CHECKING:
    from speedkit_jupyter.measure.subject.step import Step


class Fingerprint:
    """Taken now; `difference()` says in words what is otherwise by then, or nothing."""

    def __init__(self, step: Step, state: State) -> None:
        self._step, self._walk = step, state.walk
        self._plans, self._settings = self._plans_now(), self._settings_now()
        self._of_models = {
            id(tensor)
            for model in step.models
            for tensor in (*model.parameters(), *model.buffers())
        }
        self._seen = state.glances()  # holds the objects, so that no address is used again

    def difference(self) -> str:
        """The first thing that differs: `a cell changed the model`."""
        import torch

        plans = self._plans_now()
        if len(plans) != len(self._plans) or any(
            plan is not before for plan, before in zip(plans, self._plans, strict=True)
        ):
            return "a plan was applied or restored"
        if self._settings_now() != self._settings:
            return "a cell changed torch's settings"
        with torch._C.DisableTorchFunctionSubclass():
            changed = [
                instance
                for handler, instance, memory in self._seen
                if not handler.same(instance, memory)
            ]
            changed += [
                instance
                for handler, instance, memory in self._seen
                if getattr(memory, "version", None) is not None
                and instance._version != memory.version
            ]
        words = [self._words(instance) for instance in changed]
        return min(words, key=ORDER.index) if words else ""

    def _plans_now(self) -> list[Any]:
        plans = [applied_to(model) for model in self._step.models]
        return [*plans, *(plan.active for plan in plans if plan)]

    def _settings_now(self) -> list[Any]:
        import torch

        return [
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dict(flags.snapshot())
        ]  # fmt: skip

    def _words(self, instance: Any) -> str:
        """Whose part it is."""
        import torch

        holder, is_tensor = instance, issubclass(type(instance), torch.Tensor)
        if id(instance) in self._of_models:
            return MODEL
        for _ in range(24):
            if issubclass(type(holder), torch.nn.Module):
                return MODEL
            if issubclass(type(holder), torch.optim.Optimizer):
                return OPTIMIZER
            if (holder := self._walk.before(holder)) is None:
                break
        return IN_PLACE if is_tensor else USED


USED = "a cell changed what the step uses"
MODEL = "a cell changed the model"
OPTIMIZER = "a cell changed the optimizer"
IN_PLACE = "a cell changed what the step uses, in place"
ORDER = (USED, MODEL, OPTIMIZER, IN_PLACE)
