"""SpeedKit: faster PyTorch in a notebook, measured, explained and undone exactly.

Importing this package imports neither torch nor pydantic. These public names load at first use:
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support import __version__ as __version__

if TYPE_CHECKING:
    from speedkit_jupyter.catalog.base.decision import Decision as Decision
    from speedkit_jupyter.catalog.facts.model import Facts as Facts
    from speedkit_jupyter.codegen.forms import code as code
    from speedkit_jupyter.extras.advise.advisor import advise as advise
    from speedkit_jupyter.extras.auto.auto import auto as auto
    from speedkit_jupyter.extras.check.api import check as check
    from speedkit_jupyter.extras.data.batch_sizes import batch_sizes as batch_sizes
    from speedkit_jupyter.extras.data.bucketed import bucketed as bucketed
    from speedkit_jupyter.extras.data.loader_tuner import tune_loader as tune_loader
    from speedkit_jupyter.extras.data.micro_batch import micro_batch as micro_batch
    from speedkit_jupyter.extras.kernels.attention import attention as attention
    from speedkit_jupyter.extras.kernels.custom import optimization as optimization
    from speedkit_jupyter.extras.kernels.graphs import make_graphed_step as make_graphed_step
    from speedkit_jupyter.extras.processes.launching import launch as launch
    from speedkit_jupyter.extras.profile.profiler import profile as profile
    from speedkit_jupyter.extras.rollouts.api import rollout as rollout
    from speedkit_jupyter.extras.verify.verification import verify as verify
    from speedkit_jupyter.machines.hardware import Hardware as Hardware
    from speedkit_jupyter.notebook.panel.panel import Panel as Panel
    from speedkit_jupyter.plans.applying import apply_speedups as apply_speedups
    from speedkit_jupyter.plans.applying import autocast_context as autocast_context
    from speedkit_jupyter.plans.applying import sdp_context as sdp_context
    from speedkit_jupyter.plans.config import SpeedConfig as SpeedConfig
    from speedkit_jupyter.plans.context import SpeedContext as SpeedContext
    from speedkit_jupyter.plans.context import restore_all as restore_all
    from speedkit_jupyter.plans.planning import Plan as Plan
    from speedkit_jupyter.plans.planning import plan as plan
    from speedkit_jupyter.rounds.benchmark import benchmark as benchmark
    from speedkit_jupyter.search.learning import tuned as tuned
    from speedkit_jupyter.search.search import tune as tune
    from speedkit_jupyter.step.step import StateWarning as StateWarning
    from speedkit_jupyter.support.exceptions import ConfigError as ConfigError
    from speedkit_jupyter.support.exceptions import SpeedKitError as SpeedKitError
    from speedkit_jupyter.support.exceptions import StepError as StepError

# The module and the purpose of each public name.
_PUBLIC = {
    "ConfigError": ("support.exceptions", "A configuration that can't be read."),
    "Decision": ("catalog.base.decision", "The decision about one optimization, with its reason."),
    "Facts": ("catalog.facts.model", "The facts of a model and its optimizers that plans go by."),
    "Hardware": ("machines.hardware", "The facts of a machine that plans go by."),
    "Panel": ("notebook.panel.panel", "See, toggle and measure a model's plan with buttons."),
    "Plan": ("plans.planning", "All decisions for one model on one machine."),
    "SpeedConfig": ("plans.config", "The options that you ask for; all are auto by default."),
    "SpeedContext": ("plans.context", "A plan in force, until `restore()`."),
    "SpeedKitError": ("support.exceptions", "The base class of SpeedKit's errors."),
    "StateWarning": ("step.step", "Names state that can't be put back after a measurement."),
    "StepError": ("support.exceptions", "A step that can't be measured as it is written."),
    "advise": ("extras.advise.advisor", "Find changes that would make a step faster."),
    "apply_speedups": ("plans.applying", "Plan for a model and apply the plan, in place."),
    "attention": ("extras.kernels.attention", "Compute attention by a pattern such as causal."),
    "auto": ("extras.auto.auto", "Race plans on the loops of a block while they train."),
    "autocast_context": ("plans.applying", "`ctx.autocast()`, by its name in other guides."),
    "batch_sizes": ("extras.data.batch_sizes", "Measure speed and memory by batch size."),
    "benchmark": ("rounds.benchmark", "Compare plans for a step, with intervals."),
    "bucketed": ("extras.data.bucketed", "Pad batches to few lengths, by your own collate_fn."),
    "check": ("extras.check.api", "Compare a rewrite with its reference: results and speed."),
    "code": ("codegen.forms", "Return a plan as code without SpeedKit."),
    "launch": ("extras.processes.launching", "Call a function on every worker process."),
    "make_graphed_step": ("extras.kernels.graphs", "Return a step as one CUDA graph."),
    "micro_batch": ("extras.data.micro_batch", "Run a batch in parts if memory is short."),
    "optimization": ("extras.kernels.custom", "Register a function of yours as an optimization."),
    "plan": ("plans.planning", "Decide about every optimization; nothing is changed."),
    "profile": ("extras.profile.profiler", "Measure where the time of a step goes."),
    "restore_all": ("plans.context", "Restore every plan that is in force in this process."),
    "rollout": ("extras.rollouts.api", "Apply an operator many times to its own result."),
    "sdp_context": ("plans.applying", "`ctx.sdpa()`, by its name in other guides."),
    "tune": ("search.search", "Search for the fastest safe plan for a step, by measuring."),
    "tune_loader": ("extras.data.loader_tuner", "Find the fastest settings of a DataLoader."),
    "tuned": ("search.learning", "Return the plan that tuning learned for a model."),
    "verify": ("extras.verify.verification", "Compare loss curves with and without a plan."),
}
_HOMES = {name: module for name, (module, _) in _PUBLIC.items()}
__all__ = list(_PUBLIC)
__doc__ = "\n".join([str(__doc__), *(f"    {k}: {about}" for k, (_, about) in _PUBLIC.items())])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]


def load_ipython_extension(shell: Any) -> None:
    """Handle `%load_ext speedkit_jupyter`: add the magics; start `auto` if SPEEDKIT_AUTO is 1."""
    from speedkit_jupyter.notebook.shell import register

    register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Handle `%unload_ext speedkit_jupyter`: restore all plans, stop extras, remove the magics."""
    from speedkit_jupyter.notebook.shell import unregister

    unregister(shell)
