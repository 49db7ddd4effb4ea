"""torch.compile, in place: the model object, its class and its state_dict keys stay."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from speedkit_jupyter.machines import devices, flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.compiled_calls import CompiledCall, CompiledCode
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.optimization import Optimization, no_triton
from speedkit_jupyter.optimizations.base.options import Fields, Flag
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet, call, source
from speedkit_jupyter.optimizations.base.target import Target, overridden
from speedkit_jupyter.optimizations.facts.blocks import repeated_blocks
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.properties.calls import CALLS, is_compiled, users_own
from speedkit_jupyter.support import torch_private

if TYPE_CHECKING:
    import torch

HOOKS = "dynamo.skip_nnmodule_hook_guards"
INDUCTOR = "inductor"
KEYS = "save `model`: the keys of compiled_model.state_dict() begin with `_orig_mod.`"
COPIES = "copy `model` before: what is copied after this calls the original's forward"
NO_BLOCKS = (
    "it has no repeated blocks, or you have compiled them: modules in one list that are of one "
    "class, with parameters of the same shapes"
)


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
        """Those of `torch.compile`; `dynamic: auto` lets torch find changing shapes itself, and
        `scope: blocks` compiles the repeated blocks instead of the whole model, in less time.
        """

        enabled: Switch = "auto"
        scope: Literal["auto", "model", "blocks"] = "auto"
        mode: Literal[
            "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
        ] = "default"
        fullgraph: Flag = False
        dynamic: Switch = "auto"
        backend: Literal["inductor", "eager", "aot_eager", "cudagraphs"] = "inductor"

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Turn it on for GPUs on Linux, by request elsewhere, where a compiler is at hand."""
        options = request.value
        if facts.compiled == "in place":
            return request.leave(True, "you have compiled this model already; it stays so")
        obstacle = _obstacle(hardware, facts, options) or ""
        details = options.model_dump(exclude={"enabled"})
        gpu, kind = hardware.accelerator(facts.device), devices.kind_of(facts.device)
        is_usual = kind is not None and kind.has_triton and hardware.system == "Linux"
        if options.enabled == "auto" and is_usual and not obstacle:
            name = facts.device if gpu is None else gpu.name
            return request.apply(True, f"{name} on Linux with Triton", details=details)
        offer = f"young on {facts.device_type} on {hardware.system}; it is there on request"
        if facts.device_type == "cpu":
            offer = "10 to 20 s of compiling on a CPU: it is there on request"
        what = f"its {len(facts.block_names)} repeated blocks " if options.scope == "blocks" else ""
        by = "" if options.backend == INDUCTOR else f", by {options.backend}"
        hint = f"compiles {what}at the first step{by}"
        return request.on_request(obstacle, offer, hint=hint, details=details)

    def switches(self) -> Mapping[str, flags.Switch]:
        config = sys.modules.get(torch_private.DYNAMO_CONFIG)
        return {HOOKS: flags.attribute(config, HOOKS.partition(".")[2], False)} if config else {}

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        compiled = _observed(target.model, _modules(decision.details, target.model))
        return {"model.compiled": compiled, HOOKS: False}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Put compiled calls on the modules; the compiled code is kept for the context's life."""
        config = torch_private.dynamo_config()

        def change() -> None:  # else hooks that are registered after compiling never fire
            config.skip_nnmodule_hook_guards = False

        with (
            overridden(target, (HOOKS,), change),
            CALLS.overriding(()) as layer,
        ):
            modules, memo = _modules(decision.details, target.model), target.memo
            options = options_of(decision.details)
            code = memo.compiled_call or CompiledCode(options, len(modules), target.notes)
            memo.compiled_call = code
            layer.add_each((module, CompiledCall(module, code)) for module in modules)
            del modules  # which hold the model
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return `torch.compile(model)`, which takes torch.nn's own classes, too."""
        options = options_of(decision.details)
        if decision.details.get("scope") == "blocks":
            return _blocks(options, decision.reason, facts)
        return _compiled_model(options, decision.reason, form)

    def observe(self, target: Target) -> Mapping[str, Any]:
        return {"model.compiled": _observed(target.model, ())}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        if facts.compiled != "no" or _obstacle(hardware, facts, self.default):
            return ()
        if facts.device_type == "cuda":
            return (True, {"enabled": True, "mode": "reduce-overhead"})
        return (True,)


def _modules(details: Mapping[str, Any], model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules to compile: the model, or blocks that the user has not compiled."""
    if details.get("scope") != "blocks":
        return [model]
    return [block for block in repeated_blocks(model) if not users_own(block)]


def _observed(model: torch.nn.Module, later: Sequence[torch.nn.Module]) -> Any:
    """Return in words what is compiled, with what will be compiled `later`."""
    ids = {id(module) for module in later}
    if is_compiled(model) or id(model) in ids:
        return True
    number = sum(is_compiled(module) or id(module) in ids for module in model.modules())
    return f"{number} of its modules" if number else False


def _obstacle(hardware: Hardware, facts: Facts, options: Compile.Options) -> str | None:
    """Return why this can't be compiled here, or None."""
    if facts.compiled == "script":
        return "a TorchScript module can't be compiled by torch.compile"
    if facts.passed_by:
        return f"compiled code passes by {facts.passed_by}, which this plan has"
    if facts.compiled == "wrapper":
        return "this is torch.compile's own wrapper already; give the model inside it"
    if options.scope == "blocks" and not facts.block_names:
        return NO_BLOCKS
    if options.backend != INDUCTOR:
        is_cuda = facts.device_type == "cuda" or options.backend != "cudagraphs"
        return None if is_cuda else f"CUDA graphs need CUDA, and the model is on {facts.device}"
    if why := no_triton(hardware, facts):
        return why
    if hardware.cxx is None:
        tools = {"Windows": "Visual Studio's C++ build tools", "Darwin": "Xcode's tools"}
        return f"no C++ compiler found: install {tools.get(hardware.system, 'g++')}"
    return None


def options_of(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of torch.compile that are not its defaults."""
    names = ("backend", "mode", "dynamic", "fullgraph")
    usual = Compile.Options().model_dump()
    options = {n: details[n] for n in names if details.get(n, usual[n]) != usual[n]}
    if "backend" in options:  # a mode is Inductor's
        options.pop("mode", None)
    return options


def _compiled_model(options: Mapping[str, Any], reason: str, form: Form) -> Snippet:
    """Return the code that compiles the whole model, in a framework by its own arguments."""
    if form in ("torch", "fabric"):
        comment = f"{reason}; {KEYS}" if form == "torch" else ""
        return Snippet(comment, compiled=call("torch.compile", "model", **options))
    if "backend" in options or (form == "transformers" and options.keys() - {"mode"}):
        line = f"model.forward = {call('torch.compile', 'model.forward', **options)}"
        return Snippet(f"{reason}; {COPIES}", model=(line,))
    if form == "transformers":
        mode = {"torch_compile_mode": source(options["mode"])} if options else {}
        return Snippet(arguments={"torch_compile": "True", **mode})
    if not options:
        return Snippet(arguments={"dynamo_backend": f'"{INDUCTOR}"'})
    plugin = call("TorchDynamoPlugin", backend=INDUCTOR, **options)
    imports = ("from accelerate.utils import TorchDynamoPlugin",)
    return Snippet(imports=imports, arguments={"dynamo_plugin": plugin})


def _blocks(options: Mapping[str, Any], reason: str, facts: Facts) -> Snippet:
    """Return lines that compile in place, so that the keys of the state_dict stay."""
    compiling = call("block.compile", **options)
    if facts.blocks_of_torch:  # which `compile()` passes over
        compiling = f"block.forward = {call('torch.compile', 'block.forward', **options)}"
        reason = f"{reason}; {COPIES}"
    names = (f"    {source(name)}," for name in facts.block_names)
    loop = ("for name in (", *names, "):", "    block = model.get_submodule(name)")
    return Snippet(reason, model=(*loop, f"    {compiling}"))
