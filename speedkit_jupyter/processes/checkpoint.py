"""The last state of models and optimizers on disk, to go on from after a rank was killed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints of `torch.distributed.checkpoint` in a folder; every rank calls both methods."""

    folder: str

    def save(self, step: int, model: Any, *optimizers: Any) -> None:
        """Write the state after `step` steps, in the place of the last. It counts once complete."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(_states(model, optimizers), checkpoint_id=self._at(step))
        for old in self._saved() - {step}:
            shutil.rmtree(self._at(old), ignore_errors=True)

    def load(self, model: Any, *optimizers: Any) -> int:
        """Put the last state into these; return its step, or 0 where nothing is saved."""
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        last = max(self._saved(), default=0)
        if not last:
            return 0
        states = _states(model, optimizers)
        load(states, checkpoint_id=self._at(last))
        set_state_dict(
            model, optimizers, model_state_dict=states["model"], optim_state_dict=states["optim"]
        )
        return last

    def _at(self, step: int) -> Path:
        return Path(self.folder, str(step))

    def _saved(self) -> set[int]:
        """Return the steps of complete states: torch writes .metadata after all else."""
        return {int(one.parent.name) for one in Path(self.folder).glob("[0-9]*/.metadata")}


def _states(model: Any, optimizers: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizers)
    return {"model": weights, "optim": moments}
