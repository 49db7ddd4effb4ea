"""A training loop that changes every kind of state, and functions that return that state."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from speedkit_jupyter.machines import flags
from speedkit_jupyter.rounds.budget import graphs


class Training:
    """A model with batch norm and dropout, its optimizer and scheduler, a list and an array."""

    def __init__(self, make=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten()
        self.model = nn.Sequential(*layers, nn.Linear(36, 3))
        self.optimizer = make(self.model.parameters(), 0.1, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.x, self.log, self.array = torch.rand(2, 2, 5, 5), [0.0], np.zeros(2)
        self.step()

    def step(self, between=lambda: None):
        """Train on one batch; call `between` before the optimizer's step."""
        self.log.append(random.random())
        self.array += 1
        self.model(self.x).pow(2).mean().backward()
        between()
        self.optimizer.step()
        self.scheduler.step()

    def state(self):
        """Return the state that a measurement must restore to the last bit."""
        own = str(self.scheduler.state_dict()), [*self.log], self.array.tolist(), random.getstate()
        return everything(self.model, self.optimizer), own


def training_step(optimizer, *losses):
    """Return a step that calls each function in `losses` and trains on its result."""

    def step():
        for loss in losses:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

    return step


def drained(seen):
    """Empty a queue that steps fill, and return its items. Measurements don't restore queues."""
    return [seen.get() for _ in range(seen.qsize())]


def surface(model, *optimizers):
    """Return the flags and the state of a model and its optimizers, without tensors' values."""
    modules = [
        (id(part), type(part), sorted(vars(part)), part.training, getattr(part, "p", None),
         [(key, len(held)) for key, held in vars(part).items() if "_hooks" in key])
        for part in model.modules()
    ]  # fmt: skip
    tensors = [
        (id(one), one.dtype, str(one.device), one.stride(), one.requires_grad)
        for one in (*model.parameters(), *model.buffers())
    ]
    settings = [
        ({key: value for key, value in group.items() if key != "params"}, dict(one.defaults),
         sorted(vars(one)), len(one._optimizer_step_pre_hooks))
        for one in optimizers
        for group in one.param_groups
    ]  # fmt: skip
    hooks = len(_global_optimizer_pre_hooks)
    return modules, list(model.state_dict()), tensors, settings, hooks, dict(flags.snapshot())


def everything(model, *optimizers):
    """Return `surface()`, all values, gradients and optimizer states, and torch's random state."""
    tensors = [*model.parameters(), *model.buffers(), *(one.grad for one in model.parameters())]
    tensors += [v for one in optimizers for state in one.state.values() for v in state.values()]
    values = [(v.stride(), v.tolist()) if isinstance(v, torch.Tensor) else v for v in tensors]
    return surface(model, *optimizers), values, torch.get_rng_state().tolist()


def llama():
    """Return a small Llama of transformers; skip the test if transformers is not installed."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
    ends = {"eos_token_id": None, "bos_token_id": 0, "pad_token_id": 0}
    config = transformers.LlamaConfig(**sizes, **heads, **ends)
    return transformers.LlamaForCausalLM(config).eval()


def graphs_of(call):
    """Run `call` and return the number of graphs that torch.compile made."""
    before = graphs()
    call()
    return graphs() - before


def is_lowered(model):
    """Return whether calls of the model run under a plan's autocast."""
    from speedkit_jupyter.catalog.model_changes.calls import around
    from speedkit_jupyter.catalog.precision import Lowered

    return around(model, Lowered)
