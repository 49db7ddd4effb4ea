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

    def save(self, step: int, module: Any, *optimizers: Any) -> None:
        """Write the state after `step` steps, in the place of the last. It counts once complete."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._states(module, optimizers), checkpoint_id=self._at(step))
        for old in self._saved() - {step}:
            shutil.rmtree(self._at(old), ignore_errors=True)

    def load(self, module: Any, *optimizers: Any) -> int:
        """Put the last state into these; return its step, or 0 where nothing is saved."""
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        if last := max(self._saved(), default=0):
            found = self._states(module, optimizers)
            load(found, checkpoint_id=self._at(last))
            weights, moments = found["model"], found["optim"]
            given = {"model_state_dict": weights, "optim_state_dict": moments}
            set_state_dict(module, optimizers, **given)
        return last

    def _states(self, module: Any, optimizers: Any) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        return dict(zip(("model", "optim"), get_state_dict(module, optimizers), strict=True))

    def _at(self, step: int) -> Path:
        return Path(self.folder, str(step))

    def _saved(self) -> set[int]:
        """Return the steps of complete states: torch writes .metadata after all else."""
        return {int(one.parent.name) for one in Path(self.folder).glob("[0-9]*/.metadata")}
