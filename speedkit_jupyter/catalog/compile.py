"""The switch `compile`: torch.compile in place. The class and the state_dict keys stay."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Fields, Flag, Optimization, call, no_triton
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts, repeated_blocks
from speedkit_jupyter.catalog.model_changes.calls import Call, is_compiled, is_compiled_by_user
from speedkit_jupyter.catalog.model_changes.compiled import CompiledCall, CompiledCode
from speedkit_jupyter.machines import compile_cache, devices, flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.torchglue import dynamo as torch_private
from speedkit_jupyter.torchglue.modules import COMPILED_CHILD

HOOKS = "dynamo.skip_nnmodule_hook_guards"
INDUCTOR, SAME_RANDOM = "inductor", "same_random"
# On a CPU, `auto` compiles blocks if they hold a share above MOSTLY of the parameters. There must
# be ALIKE blocks per kind, with LARGE_BLOCK parameters each on average. As blocks, six transformer
# layers compile in half the time. Each block's call adds 16 µs, which is little next to the 0.16 ms
# for reading LARGE_BLOCK parameters at 10 GB/s.
ALIKE, MOSTLY, LARGE_BLOCK = 6, 0.8, 400_000
# Seconds of a compiled first step on a CPU: a fixed part, a part for the graph, and one per layer.
# In eval mode, the last two are halved. Fitted to transformers and convolutions on 2 cores.
BEGIN_S, GRAPH_S, LAYER_S = 3.0, 3.0, 0.25
KEYS = f"save `model`: the keys of compiled_model.state_dict() begin with `{COMPILED_CHILD}.`"
COPIES = "copy `model` before: later copies call the original's forward"
NO_BLOCKS = "it has no repeated blocks (modules of one class in one list), or you compiled them"


class Compile(Optimization):
    """Compile at the first forward pass; after a failure, run uncompiled unless `required`."""

    name = "compile"
    effect = Effect.ROUNDING
    costly = True
    summary = "torch.compile in place"
    helps = "steps with many small operations, the same shapes, and many calls"
    risk = "seconds at the first call and at each new shape; other random numbers; graph breaks"
    page = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"

    class Options(Fields):
        """The options of `torch.compile`; with `dynamic: auto` torch detects changing shapes.

        `scope: blocks` compiles the repeated blocks instead of the whole model, in less time.
        `auto` selects blocks on a CPU if the model consists mostly of many large blocks, and on
        any device for recomputed activations or several processes. `draws: same_random` draws the
        same random numbers as uncompiled code, more slowly. `background` compiles with inductor in
        another process while the model runs uncompiled. With `required` a failure is an error.
        """

        enabled: Switch = "auto"
        scope: Literal["auto", "model", "blocks"] = "auto"
        mode: Literal[
            "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
        ] = "default"
        fullgraph: Flag = False
        dynamic: Switch = "auto"
        backend: Literal["inductor", "eager", "aot_eager", "cudagraphs"] = "inductor"
        draws: Literal["auto", "same_random"] = "auto"
        required: Flag = False
        background: Flag = False

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        options = _in_scope(request.value, facts)
        if facts.compiled == "in place":
            return request.leave(True, "you have compiled this model already; it stays so")
        why_not = obstacle(hardware, facts, options)
        names = ("required", "background", "draws")
        usual = {one for one in names if getattr(options, one) in (False, "auto")}
        details = options.model_dump(exclude={"enabled", *usual})
        gpu, kind = hardware.accelerator(facts.device), devices.kind_of(facts.device)
        is_usual = kind is not None and kind.has_triton and hardware.system == "Linux"
        if options.enabled == "auto" and is_usual and not why_not:
            name = facts.device if gpu is None else gpu.name
            return request.apply(True, f"{name} on Linux with Triton", details=details)
        offer = f"young on {facts.device_type} on {hardware.system}; it is there on request"
        if facts.device_type == "cpu":
            offer = "4 to 12 s of compiling on a CPU: it is there on request"
            is_part = options.enabled == "auto" and request.value != self.default
            if is_part and not why_not:  # only a field was set, such as --compile-mode
                return replace(request.leave(False, f"{offer}, `--compile true`"), declined=True)
        return request.on_request(why_not, offer, hint=_hint(options, facts), details=details)

    def process_flags(self) -> Mapping[str, flags.Flag]:
        # With torch's default, compiled code ignores hooks that are added or removed later.
        config = sys.modules.get(torch_private.DYNAMO_CONFIG)
        if not config:
            return compile_cache.compiler_flags()
        hooks = {HOOKS: flags.attribute(config, HOOKS.partition(".")[2], False)}
        functorch, backward = torch_private.eager_backward()
        hooks |= {f"functorch.{n}": flags.attribute(functorch, n, v) for n, v in backward.items()}
        return hooks | compile_cache.compiler_flags()

    def values(self, decision: Decision, now: flags.Values) -> Mapping[str, Any]:
        kept = compile_cache.values(now) if _is_inductor(decision) else {}
        # Backward passes are compiled along with forward passes. If one fails, both run uncompiled.
        backward = {f"functorch.{n}": v for n, v in torch_private.eager_backward()[1].items()}
        return {HOOKS: False, **backward, **kept}

    def switched(self, decision: Decision, target: Target) -> AbstractContextManager[None]:
        torch_private.dynamo_config()  # loads Dynamo, which has the flag HOOKS
        if _is_inductor(decision):
            compile_cache.prepare()
            first = next(iter(target.model.parameters()), None)
            if first is None or first.device.type == "cpu":
                torch_private.import_compiler()  # loads Inductor, which has further flags
        return super().switched(decision, target)

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        """Return a compiled call per module; `target.memo` keeps the compiled code for reuse."""
        details, memo = decision.details, target.memo
        modules = _modules(details, target.model)
        if memo.compiled_call is None:
            # A benchmark compiles in this process: its first rounds must not time uncompiled code.
            background = details.get("background") and _is_inductor(decision) and target.search
            required = bool(details.get("required"))
            memo.compiled_call = CompiledCode(
                options_of(details), modules, target.notes, required, bool(background)
            )
        return [CompiledCall(module, memo.compiled_call) for module in modules]

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        options = options_of(decision.details)
        if decision.details.get("scope") == "blocks":
            return _blocks(options, decision.reason, facts)
        return _compiled_model(options, decision.reason, form)

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        later = {id(one) for one in _modules(planned.details, target.model)} if planned else set()
        modules = target.model.modules()
        on = [one is target.model for one in modules if is_compiled(one) or id(one) in later]
        return {"model.compiled": any(on) or (f"{len(on)} of its modules" if on else False)}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        if facts.compiled != "no" or obstacle(hardware, facts, self.default):
            return ()
        # `dynamic` compiles one graph for all lengths; torch's default starts with one length.
        usual = {"enabled": True, "dynamic": True} if facts.lengths_vary else True
        graphs = {"enabled": True, "mode": "reduce-overhead"}
        return (usual, graphs) if facts.device_type == "cuda" else (usual,)


def _in_scope(options: Compile.Options, facts: Facts) -> Compile.Options:
    """Return the options, with `scope: blocks` if no scope was set and blocks are better.

    Blocks are needed if activations are recomputed or if processes exchange gradients. On a CPU,
    blocks pay off if the model consists mostly of many large blocks.
    """
    if options.scope != "auto":
        return options
    is_needed = facts.recomputed or (facts.processes > 1 and facts.block_names)
    is_plain = options.backend == INDUCTOR and options.mode == "default" and not options.fullgraph
    pays = is_plain and facts.device_type == "cpu" and _is_mostly_blocks(facts)
    return options.model_copy(update={"scope": "blocks"}) if is_needed or pays else options


def _is_mostly_blocks(facts: Facts) -> bool:
    are_alike = facts.blocks >= ALIKE * max(facts.block_kinds, 1)
    are_most = facts.block_parameters > MOSTLY * facts.parameters
    are_large = facts.block_parameters >= LARGE_BLOCK * facts.blocks
    return are_alike and are_most and are_large and len(facts.block_names) == facts.blocks


def expected_s(facts: Facts, options: Compile.Options) -> float | None:
    """Return the estimated seconds of the first step; None unless Inductor compiles on a CPU."""
    if facts.device_type != "cpu" or options.backend != INDUCTOR:
        return None
    layers = facts.linears + facts.convolutions + facts.lstms
    if facts.blocks and _in_scope(options, facts).scope == "blocks":  # equal blocks compile once
        layers = round(layers * facts.block_kinds / facts.blocks)
    graph_s = GRAPH_S + LAYER_S * layers
    return BEGIN_S + (graph_s if facts.training else graph_s / 2)


def whole_model_s(facts: Facts) -> float:
    """Return `expected_s` of the whole model if `auto` compiles blocks in one process; else 0."""
    if facts.processes > 1 or _in_scope(Compile.default, facts).scope != "blocks":
        return 0.0
    return expected_s(facts, Compile.default.model_copy(update={"scope": "model"})) or 0.0


def _hint(options: Compile.Options, facts: Facts) -> str:
    is_inductor = options.backend == INDUCTOR
    scope = ""
    if options.scope == "blocks":
        each = f"{facts.block_parameters // max(facts.blocks, 1):,} parameters each"
        scope = f"its {len(facts.block_names)} repeated blocks ({each}) "
    if options.background and is_inductor:
        return f"another process compiles {scope or 'it '}while your loop goes on"
    by = "" if is_inductor else f", by {options.backend}"
    cost_s = expected_s(facts, options)
    cost = "" if cost_s is None else f", for about {cost_s:.0f} s"
    return f"compiles {scope}at the first step{by}{cost}"


def _is_inductor(decision: Decision) -> bool:
    return bool(decision.details.get("backend", INDUCTOR) == INDUCTOR)


def _modules(details: Mapping[str, Any], model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules to compile: the model, or the blocks that the user has not compiled."""
    if details.get("scope") != "blocks":
        return [model]
    return [block for block in repeated_blocks(model) if not is_compiled_by_user(block)]


def obstacle(hardware: Hardware, facts: Facts, options: Compile.Options) -> str:
    """Return the reason why the model can't be compiled here; empty if it can."""
    if facts.compiled == "script":
        return "a TorchScript module can't be compiled by torch.compile"
    if facts.graphed:
        return "compiled code bypasses cuda_graphs, which this plan has"
    if facts.recomputed and options.scope == "model":
        return "compiled as a whole it bypasses activation_checkpointing: leave `scope` out"
    if facts.compiled == "wrapper":
        return "this is torch.compile's own wrapper already; give the model inside it"
    if options.scope == "blocks" and not facts.block_names:
        return NO_BLOCKS
    if options.draws == SAME_RANDOM and (options.mode, options.backend) != ("default", INDUCTOR):
        return "torch.compile takes `draws: same_random` with its default mode and backend only"
    if options.backend != INDUCTOR:
        is_cuda = facts.device_type == "cuda" or options.backend != "cudagraphs"
        return "" if is_cuda else f"CUDA graphs need CUDA, and the model is on {facts.device}"
    if why := no_triton(hardware, facts):
        return why
    if facts.device_type in devices.TPUS:
        return f"Inductor generates no code for {facts.device}"
    if hardware.cxx is None:
        tools = {"Windows": "Visual Studio's C++ build tools", "Darwin": "Xcode's tools"}
        return f"no C++ compiler found: install {tools.get(hardware.system, 'g++')}"
    return ""


def options_of(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for torch.compile that differ from torch's defaults."""
    names = ("backend", "mode", "dynamic", "fullgraph")
    usual = Compile.Options().model_dump()
    options = {n: details[n] for n in names if details.get(n, usual[n]) != usual[n]}
    if details.get("draws") == SAME_RANDOM:
        options["options"] = {"fallback_random": True}
    is_inductor = "backend" not in options
    return {name: value for name, value in options.items() if name != "mode" or is_inductor}


def _compiled_model(options: Mapping[str, Any], reason: str, form: Form) -> Snippet:
    """Return the code that compiles the whole model, or a Trainer's arguments if they suffice."""
    if form == "torch":
        return Snippet(f"{reason}; {KEYS}", compiled=call("torch.compile", "model", **options))
    if options.keys() - {"mode"}:
        line = f"model.forward = {call('torch.compile', 'model.forward', **options)}"
        return Snippet(f"{reason}; {COPIES}", model=(line,))
    mode = {"torch_compile_mode": f'"{options["mode"]}"'} if options else {}
    return Snippet(arguments={"torch_compile": "True", **mode})


def _blocks(options: Mapping[str, Any], reason: str, facts: Facts) -> Snippet:
    """Return code that compiles blocks in place. The keys of the state_dict stay."""
    compiling = call("block.compile", **options)
    if facts.blocks_of_torch:  # `compile()` skips torch's own modules
        compiling = f"block.forward = {call('torch.compile', 'block.forward', **options)}"
        reason = f"{reason}; {COPIES}"
    names = (f'    "{name}",' for name in facts.block_names)
    loop = ("for name in (", *names, "):", "    block = model.get_submodule(name)")
    return Snippet(reason, model=(*loop, f"    {compiling}"))
