"""The calls of a model that only predicts: in inference mode, with folded batch norms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.conv_norms import number_of_norms
from speedkit_jupyter.optimizations.predicting.folding import Folding
from speedkit_jupyter.optimizations.predicting.released import release_state, released
from speedkit_jupyter.optimizations.properties.calls import Call, is_compiled
from speedkit_jupyter.optimizations.properties.hooks import has_hooks_of_all

if TYPE_CHECKING:
    import torch

NOT_SHOWN = (
    "batch norms are folded; of the others torch.fx does not show that they alone take what a "
    "convolution gives"
)
ASKED = "an input asks for its gradient, so the model ran as ever"
TRAINING = "the model is in training mode by now, so it ran as ever: model.eval()"
CHANGED = "weights have changed since they were frozen, so the model is not compiled any more"


class Predicting(Call):
    """Where a call trains after all, or asks for gradients, it is as ever; `notes` say so.

    It is kept for the life of a context, and so are the folded weights.
    """

    def __init__(self, target: Target, fold: bool, freezing: bool) -> None:
        super().__init__(target.model)
        self._folding = Folding(target.model) if fold else None
        self._freezing = freezing
        self._modules = tuple(target.model.modules())
        self._frozen: tuple[Any, ...] | None = None
        self._notes = target.notes
        norms = number_of_norms([*target.model.modules()]) if fold else 0
        if self._folding is not None and len(self._folding) < norms:
            self._notes["inference"] = f"{len(self._folding)} of {norms} {NOT_SHOWN}"

    def layers(self) -> Iterator[tuple[torch.nn.Module, Call]]:
        """Every module with the layer around its calls."""
        yield self.module, self
        if self._folding is not None:
            yield from self._folding.calls()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One prediction; its result is made of tensors like any others."""
        import torch

        model = self.module
        if not self._predicts(model, args, kwargs) or self._gains_nothing(model):
            return self.below(*args, **kwargs)
        gives_gradients = torch.is_grad_enabled() and any(
            parameter.requires_grad for parameter in model.parameters()
        )
        if self._freezing and is_compiled(model):
            result = self._of_frozen(model, args, kwargs)
        else:
            result = self._result(model, args, kwargs)
        return result if torch.is_inference_mode_enabled() else released(result, gives_gradients)

    def end(self) -> None:
        """What the modules kept is like any other tensor again."""
        release_state(self.module)

    def _predicts(self, model: torch.nn.Module, args: Any, kwargs: Any) -> bool:
        import torch
        from torch.utils._pytree import tree_leaves

        if not self.is_here() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return False
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return False
        if model.training:
            self._notes["inference"] = TRAINING
            return False
        asks = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad
            for value in tree_leaves((args, kwargs))
        )
        if asks:
            self._notes["inference"] = ASKED
        return not asks

    def _gains_nothing(self, model: torch.nn.Module) -> bool:
        """Compiled code that records nothing anyway, whose batch norms are not folded either."""
        import torch

        return is_compiled(model) and not self._freezing and not torch.is_grad_enabled()

    def _result(self, model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        folding = None if is_compiled(model) else self._folding
        if folding is not None and len(folding):
            with folding.in_force(), self._unrecorded():
                result = self.below(*args, **kwargs)
                if not folding.is_wrong():
                    return result
        with self._unrecorded():
            return self.below(*args, **kwargs)

    def _unrecorded(self) -> AbstractContextManager[Any]:
        """What hooks keep of a call (features, for another model to learn from) are tensors like
        any others: there autograd's records alone are left out.
        """
        import torch

        hooked = has_hooks_of_all() or any(
            one._forward_hooks or one._forward_pre_hooks for one in self._modules
        )
        return torch.no_grad() if hooked else torch.inference_mode()

    def _of_frozen(self, model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Compiled code with its weights as constants, for as long as they are what they were."""

        now = tuple(
            (id(tensor), 0 if tensor.is_inference() else tensor._version, tensor.data_ptr())
            for tensor in (*model.parameters(), *model.buffers())
        )
        self._frozen = self._frozen or now
        with self._unrecorded():
            if now != self._frozen:
                self._notes["inference"] = CHANGED
                return model._call_impl(*args, **kwargs)
            with _freezing():
                return self.below(*args, **kwargs)


def _freezing() -> AbstractContextManager[None]:
    import torch._inductor.config as config

    return nullcontext() if config.freezing else config.patch(freezing=True)
