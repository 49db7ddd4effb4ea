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
        """Write the state after `step` steps. It counts once all of it is written."""
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_saver import save

        unfinished, done = Path(self.folder, "unfinished"), Path(self.folder, f"step-{step}")
        save(_states(model, optimizers), checkpoint_id=unfinished)
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(done, ignore_errors=True)
            unfinished.rename(done)
            for old in sorted(self._saved(), key=_step)[:-1]:
                shutil.rmtree(old, ignore_errors=True)
        if dist.is_initialized():
            dist.barrier()

    def load(self, model: Any, *optimizers: Any) -> int:
        """Put the last state into these; return its step, or 0 where nothing is saved."""
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        last = max(self._saved(), key=_step, default=None)
        if last is None:
            return 0
        states = _states(model, optimizers)
        load(states, checkpoint_id=last)
        set_state_dict(
            model, optimizers, model_state_dict=states["model"], optim_state_dict=states["optim"]
        )
        return _step(last)

    def _saved(self) -> list[Path]:
        return list(Path(self.folder).glob("step-*"))


def _states(model: Any, optimizers: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizers)
    return {"model": weights, "optim": moments}


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
