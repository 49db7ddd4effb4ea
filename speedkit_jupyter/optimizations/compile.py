"""torch.compile, in place: the model object, its class and its state_dict keys stay."""

from __future__ import annotations

import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from speedkit_jupyter.machines import devices, flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base import (
    Decision,
    Effect,
    Optimization,
    Request,
    Switch,
    Target,
    overridden,
)
from speedkit_jupyter.optimizations.builds import (
    forget_broken_builds,
    is_compiler_error,
    removed_half_written_build,
    was_interrupted,
)
from speedkit_jupyter.optimizations.calls import CALLS, Call, is_compiled
from speedkit_jupyter.optimizations.facts import Facts
from speedkit_jupyter.optimizations.options import Fields
from speedkit_jupyter.optimizations.snippet import Form, Snippet, call, source

if TYPE_CHECKING:
    import torch

SWITCHES = (
    (
        "dynamo.skip_nnmodule_hook_guards",
        "torch._dynamo.config",
        "skip_nnmodule_hook_guards",
        False,
    ),
    ("compiler.cache_key_tag", "torch.compiler.config", "cache_key_tag", "another"),
)
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class Compile(Optimization):
    """Compiles at the first forward pass; if that fails the model runs on as before."""

    name = "compile"
    effect = Effect.ROUNDING
    costly = True
    summary = "torch.compile in place"
    helps = "steps with many small operations, the same shapes, and many calls"
    risk = (
        "seconds at the first call and at each new shape; random numbers are drawn "
        "otherwise; graph breaks"
    )
    undone = "the model calls its own forward again, and no compiled code lies on it"
    page = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"

    class Options(Fields):
        """Those of `torch.compile`; `dynamic: auto` lets torch find changing shapes itself."""

        enabled: Switch = Field("auto", description="auto, true, false")
        mode: Mode = Field(
            "default",
            description="default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs",
        )
        fullgraph: bool = Field(False, strict=True, description="true, false")
        dynamic: Switch = Field("auto", description="auto, true, false")

    default = Options()

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """On for GPUs on Linux, by request elsewhere, where a compiler is at hand."""
        options = request.value
        if facts.compiled == "in place":
            return request.leave(True, "you have compiled this model already; it stays so")
        if options.enabled is False:
            return request.leave(False, asked=True)
        obstacle = _obstacle(hardware, facts)
        if obstacle:
            return request.decline(False, obstacle)
        details = options.model_dump(exclude={"enabled"})
        if options.enabled is True:
            return request.obey(True, hint="compiles at the first step", details=details)
        if facts.device_type == "cpu":
            return request.leave(
                False,
                "on CPUs it gave 1.05x over ten models for 10 to 20 s of compiling; "
                "it is there on request",
            )
        kind = devices.kind_of(facts.device)
        if kind is None or not kind.has_triton or hardware.system != "Linux":
            where = f"{facts.device_type} on {hardware.system}"
            return request.leave(False, f"young on {where}; it is there on request")
        gpu = hardware.accelerator(facts.device)
        name = facts.device if gpu is None else gpu.name
        return request.apply(True, f"{name} on Linux with Triton", details=details)

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        """Only compiled code can be frozen."""
        return replace(facts, compiles=decision.active)

    def switches(self) -> Mapping[str, flags.Switch]:
        """Only where torch.compile's modules are loaded: importing them takes seconds."""
        return {
            name: flags.attribute(sys.modules[module], attribute, value)
            for name, module, attribute, value in SWITCHES
            if module in sys.modules
        }

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """A call will go through compiled code; hooks that come later will fire."""
        return {"model.compiled": True, "dynamo.skip_nnmodule_hook_guards": False}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Put a compiled call on the model; the compiled code is kept for the context's life."""
        import torch._dynamo.config as config

        def change() -> None:  # else hooks that are registered after compiling never fire
            config.skip_nnmodule_hook_guards = False

        call = target.memo.compiled_call
        if call is None:
            call = target.memo.compiled_call = CompiledCall(target, decision.details)
        with (
            overridden(target, ("dynamo.skip_nnmodule_hook_guards",), change),
            CALLS.wished([(target.model, call)]),
        ):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """`torch.compile(model)`: unlike `model.compile()` it takes torch.nn's own classes too."""
        options = _options(decision.details)
        if form == "transformers":
            return _for_trainer(options)
        if form in ("torch", "fabric"):
            save = "; save `model`: the keys of compiled_model.state_dict() begin with `_orig_mod.`"
            comment = decision.reason + save if form == "torch" else ""
            return Snippet(comment, compiled=call("torch.compile", "model", **options))
        if not options:
            return Snippet(arguments={"dynamo_backend": '"inductor"'})
        return Snippet(
            imports=("from accelerate.utils import TorchDynamoPlugin",),
            arguments={"dynamo_plugin": call("TorchDynamoPlugin", backend="inductor", **options)},
        )

    def observe(self, target: Target) -> Mapping[str, Any]:
        """Whether a call of the model goes through compiled code."""
        return {"model.compiled": is_compiled(target.model)}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """Last to be tried, since each costs seconds; CUDA graphs only where there is CUDA."""
        if facts.compiled != "no" or _obstacle(hardware, facts):
            return ()
        if facts.device_type == "cuda":
            return (True, {"enabled": True, "mode": "reduce-overhead"})
        return (True,)


def _obstacle(hardware: Hardware, facts: Facts) -> str | None:
    """Why this model can't be compiled here, or None."""
    if facts.compiled == "script":
        return "a TorchScript module can't be compiled by torch.compile"
    if facts.checkpointed:
        return "compiled code passes by activation_checkpointing, which this plan has"
    if facts.compiled == "wrapper":
        return "this is torch.compile's own wrapper already; give the model inside it"
    gpu, kind = hardware.accelerator(facts.device), devices.kind_of(facts.device)
    if kind is not None and kind.has_triton and not hardware.triton:
        triton = "triton-windows" if hardware.system == "Windows" else "triton"
        return f"no working Triton on {hardware.system}: pip install {triton}"
    if gpu is not None and gpu.is_nvidia and gpu.capability and gpu.capability < (7, 0):
        major, minor = gpu.capability
        return f"Triton needs compute capability 7.0; {gpu.name} has {major}.{minor}"
    if hardware.cxx is None:
        tool = {
            "Windows": "Visual Studio's C++ build tools",
            "Darwin": "Xcode's command line tools",
        }
        return f"no C++ compiler found: install {tool.get(hardware.system, 'g++')}"
    return None


class CompiledCall(Call):
    """What `model(...)` calls: the compiled forward, or the plain one once compiling failed."""

    compiles = True

    def __init__(self, target: Target, details: Mapping[str, Any]) -> None:
        super().__init__(target.model)
        self._target, self._notes = target, target.notes  # which doesn't keep the model alive
        self._compiled: Callable[..., Any] | None = _compile(details)
        self._checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass. A failing compiler never stops it; the user's own errors do."""
        if self._compiled is None:
            return self._target.model._call_impl(*args, **kwargs)
        start = time.time()
        try:
            if self._checked:
                return self._compiled(self._target.model, args, kwargs)
            return self._first_call(*args, **kwargs)
        except KeyboardInterrupt:
            forget_broken_builds(start)
            raise
        except Exception as error:
            if not is_compiler_error(error):
                raise
            if was_interrupted(error):
                forget_broken_builds(start)
                raise KeyboardInterrupt from error
            if removed_half_written_build(error):
                return self(*args, **kwargs)
            return self._run_plainly(error, args, kwargs)

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.utils import counters

        before = counters["frames"]["ok"]
        result = self._compiled(self._target.model, args, kwargs)  # type: ignore[misc]
        self._checked = True
        if counters["frames"]["ok"] == before:
            self._notes["compile"] = "torch.compile found nothing to compile in this model"
        return result

    def _run_plainly(self, error: Exception, args: Any, kwargs: Any) -> Any:
        # Where the plain model fails too, the mistake is the user's: the plain error goes up.
        result = self._target.model._call_impl(*args, **kwargs)
        self._compiled = None
        note = f"torch.compile failed, so the model runs as before: {_first_line(error)}"
        self._notes["compile"] = note
        warnings.warn(f"{note} (%speedkit report)", stacklevel=3)
        return result


def _options(details: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not torch.compile's defaults."""
    options: dict[str, Any] = {}
    if details.get("mode", "default") != "default":
        options["mode"] = details["mode"]
    if details.get("fullgraph", False):
        options["fullgraph"] = True
    if details.get("dynamic", "auto") != "auto":
        options["dynamic"] = details["dynamic"]
    return options


def _for_trainer(options: Mapping[str, Any]) -> Snippet:
    """Trainer takes the mode; what else there is reaches Accelerate through the environment."""
    arguments = {"torch_compile": "True"}
    if "mode" in options:
        arguments["torch_compile_mode"] = source(options["mode"])
    lines = tuple(
        f'os.environ["ACCELERATE_DYNAMO_USE_{key.upper()}"] = "{options[key]}"'
        for key in ("fullgraph", "dynamic")
        if key in options
    )
    imports = ("import os",) if lines else ()
    return Snippet(imports=imports, setup=lines, arguments=arguments)


def _compile(details: Mapping[str, Any]) -> Callable[..., Any]:
    """Through a function of ours: `nn.Module.compile()` skips torch.nn's own classes.

    The model is an argument: what is kept of the compiled code must not keep the model.
    """
    import torch

    def forward(model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    options = _options(details)
    if "isolate_recompiles" in signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    else:  # several plans on one model: each needs a code object, and so a cache, of its own
        forward = types.FunctionType(
            forward.__code__.replace(), forward.__globals__, closure=forward.__closure__
        )
    return torch.compile(forward, **options)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if not line.endswith("raised:")]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
