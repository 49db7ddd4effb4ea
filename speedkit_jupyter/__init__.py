"""SpeedKit: faster PyTorch in a notebook, measured, explained and undone exactly.

Importing this package imports neither torch nor pydantic; names load at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support import __version__ as __version__

if TYPE_CHECKING:
    from speedkit_jupyter.advice.advisor import advise as advise
    from speedkit_jupyter.batching.micro_batch import micro_batch as micro_batch
    from speedkit_jupyter.batching.sweep import batch_sizes as batch_sizes
    from speedkit_jupyter.checking.api import check as check
    from speedkit_jupyter.codegen.forms import code as code
    from speedkit_jupyter.kernels.attention import AttentionPattern as AttentionPattern
    from speedkit_jupyter.kernels.attention import attention as attention
    from speedkit_jupyter.kernels.graphs import make_graphed_step as make_graphed_step
    from speedkit_jupyter.loading.tuner import tune_loader as tune_loader
    from speedkit_jupyter.machines.hardware import Hardware as Hardware
    from speedkit_jupyter.measure.subject.from_function import benchmark as benchmark
    from speedkit_jupyter.measure.subject.step import StateWarning as StateWarning
    from speedkit_jupyter.optimizations.base.decision import Decision as Decision
    from speedkit_jupyter.optimizations.facts.model import Facts as Facts
    from speedkit_jupyter.plans.applying import apply_speedups as apply_speedups
    from speedkit_jupyter.plans.applying import autocast_context as autocast_context
    from speedkit_jupyter.plans.applying import sdp_context as sdp_context
    from speedkit_jupyter.plans.config import SpeedConfig as SpeedConfig
    from speedkit_jupyter.plans.context import SpeedContext as SpeedContext
    from speedkit_jupyter.plans.context import restore_all as restore_all
    from speedkit_jupyter.plans.own_kernels import optimization as optimization
    from speedkit_jupyter.plans.planning import Plan as Plan
    from speedkit_jupyter.plans.planning import plan as plan
    from speedkit_jupyter.processes.launching import launch as launch
    from speedkit_jupyter.profiling.profiler import profile as profile
    from speedkit_jupyter.rollouts.api import rollout as rollout
    from speedkit_jupyter.support.exceptions import ConfigError as ConfigError
    from speedkit_jupyter.support.exceptions import SpeedKitError as SpeedKitError
    from speedkit_jupyter.support.exceptions import StepError as StepError
    from speedkit_jupyter.tuning.api import tune as tune
    from speedkit_jupyter.tuning.api import verify as verify
    from speedkit_jupyter.tuning.learning import tuned as tuned
    from speedkit_jupyter.widgets.panel import Panel as Panel

_PUBLIC = {  # the public names, by the module where they live
    "advice.advisor": "advise",
    "batching.micro_batch": "micro_batch",
    "batching.sweep": "batch_sizes",
    "checking.api": "check",
    "codegen.forms": "code",
    "kernels.attention": "AttentionPattern attention",
    "kernels.graphs": "make_graphed_step",
    "loading.tuner": "tune_loader",
    "machines.hardware": "Hardware",
    "measure.subject.from_function": "benchmark",
    "measure.subject.step": "StateWarning",
    "optimizations.base.decision": "Decision",
    "optimizations.facts.model": "Facts",
    "plans.applying": "apply_speedups autocast_context sdp_context",
    "plans.config": "SpeedConfig",
    "plans.context": "SpeedContext restore_all",
    "plans.own_kernels": "optimization",
    "plans.planning": "Plan plan",
    "processes.launching": "launch",
    "profiling.profiler": "profile",
    "rollouts.api": "rollout",
    "support.exceptions": "ConfigError SpeedKitError StepError",
    "tuning.api": "tune verify",
    "tuning.learning": "tuned",
    "widgets.panel": "Panel",
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext speedkit_jupyter`: add %speedkit and %%speedbench."""
    from speedkit_jupyter.magics.shell import register

    # Magics and widgets meet here and nowhere else.
    register(shell, open_panel=lambda *given, **more: __getattr__("Panel")(*given, **more))


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext speedkit_jupyter`: restore everything and take the magics away."""
    from speedkit_jupyter.magics.shell import unregister

    unregister(shell)
