"""SpeedKit: faster PyTorch in a notebook, measured, explained and undone exactly.

Importing this package imports neither torch nor pydantic; names load at first use.
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
    from speedkit_jupyter.extras.check.api import check as check
    from speedkit_jupyter.extras.data.batch_sweep import batch_sizes as batch_sizes
    from speedkit_jupyter.extras.data.loader_tuner import tune_loader as tune_loader
    from speedkit_jupyter.extras.data.micro_batch import micro_batch as micro_batch
    from speedkit_jupyter.extras.kernels.attention import AttentionPattern as AttentionPattern
    from speedkit_jupyter.extras.kernels.attention import attention as attention
    from speedkit_jupyter.extras.kernels.graphs import make_graphed_step as make_graphed_step
    from speedkit_jupyter.extras.processes.launching import launch as launch
    from speedkit_jupyter.extras.profile.profiler import profile as profile
    from speedkit_jupyter.extras.rollouts.api import rollout as rollout
    from speedkit_jupyter.machines.hardware import Hardware as Hardware
    from speedkit_jupyter.notebook.panel.panel import Panel as Panel
    from speedkit_jupyter.plans.applying import apply_speedups as apply_speedups
    from speedkit_jupyter.plans.applying import autocast_context as autocast_context
    from speedkit_jupyter.plans.applying import sdp_context as sdp_context
    from speedkit_jupyter.plans.config import SpeedConfig as SpeedConfig
    from speedkit_jupyter.plans.context import SpeedContext as SpeedContext
    from speedkit_jupyter.plans.context import restore_all as restore_all
    from speedkit_jupyter.plans.own_kernels import optimization as optimization
    from speedkit_jupyter.plans.planning import Plan as Plan
    from speedkit_jupyter.plans.planning import plan as plan
    from speedkit_jupyter.rounds.from_function import benchmark as benchmark
    from speedkit_jupyter.search.api import tune as tune
    from speedkit_jupyter.search.api import verify as verify
    from speedkit_jupyter.search.learning import tuned as tuned
    from speedkit_jupyter.step.step import StateWarning as StateWarning
    from speedkit_jupyter.support.exceptions import ConfigError as ConfigError
    from speedkit_jupyter.support.exceptions import SpeedKitError as SpeedKitError
    from speedkit_jupyter.support.exceptions import StepError as StepError

_PUBLIC = {  # the public names, by the module where they live
    "extras.advise.advisor": "advise",
    "extras.data.micro_batch": "micro_batch",
    "extras.data.batch_sweep": "batch_sizes",
    "extras.check.api": "check",
    "codegen.forms": "code",
    "extras.kernels.attention": "AttentionPattern attention",
    "extras.kernels.graphs": "make_graphed_step",
    "extras.data.loader_tuner": "tune_loader",
    "machines.hardware": "Hardware",
    "rounds.from_function": "benchmark",
    "step.step": "StateWarning",
    "catalog.base.decision": "Decision",
    "catalog.facts.model": "Facts",
    "plans.applying": "apply_speedups autocast_context sdp_context",
    "plans.config": "SpeedConfig",
    "plans.context": "SpeedContext restore_all",
    "plans.own_kernels": "optimization",
    "plans.planning": "Plan plan",
    "extras.processes.launching": "launch",
    "extras.profile.profiler": "profile",
    "extras.rollouts.api": "rollout",
    "support.exceptions": "ConfigError SpeedKitError StepError",
    "search.api": "tune verify",
    "search.learning": "tuned",
    "notebook.panel.panel": "Panel",
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
    from speedkit_jupyter.notebook.shell import register

    # Magics and widgets meet here and nowhere else.
    register(shell, open_panel=lambda *given, **more: __getattr__("Panel")(*given, **more))


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext speedkit_jupyter`: restore everything and take the magics away."""
    from speedkit_jupyter.notebook.shell import unregister

    unregister(shell)
