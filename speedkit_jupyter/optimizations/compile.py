"""torch.compile, in place: the model object, its class and its state_dict keys stay."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from speedkit_jupyter.machines import compile_cache, devices, flags, probes
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.optimization import Optimization, no_triton
from speedkit_jupyter.optimizations.base.options import Fields, Flag
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet, call, source
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.layers import repeated_blocks
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.properties.calls import Call, is_compiled, users_own
from speedkit_jupyter.optimizations.properties.eager_parts import EagerParts
from speedkit_jupyter.support import messages, torch_private
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.support.source_lines import Spot, place
from speedkit_jupyter.support.weak import Alive

if TYPE_CHECKING:
    import torch

HOOKS = "dynamo.skip_nnmodule_hook_guards"
# An error of the backward pass comes up in the forward pass, where the plain model can take over.
BACKWARD = "functorch.force_non_lazy_backward_lowering"
# Graphs that one plan may compile: 8 is torch's own limit, for a function that serves one module.
GRAPHS = 8
HALF_WRITTEN = r"(\S+\.so): (file too short|invalid ELF header|file is truncated)"
INDUCTOR = "inductor"
# Blocks are compiled in the model's place if each kind stands there so often, and they hold more
# than this share of the parameters: six layers of a transformer then compile in half of the time.
ALIKE, MOSTLY = 3, 0.8
KEYS = "save `model`: the keys of compiled_model.state_dict() begin with `_orig_mod.`"
COPIES = "copy `model` before: what is copied after this calls the original's forward"
NO_BLOCKS = (
    "it has no repeated blocks, or you have compiled them: modules in one list that are of one "
    "class, with parameters of the same shapes"
)


class Compile(Optimization):
    """Compiles at the first forward pass. A part that can't be compiled runs as before, and the
    whole model does where nothing can; `required` makes that an error.
    """

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
        `scope: blocks` compiles the repeated blocks instead of the whole model, in less time: on a
        CPU the rule, where a model is little else.
        """

        enabled: Switch = "auto"
        scope: Literal["auto", "model", "blocks"] = "auto"
        mode: Literal[
            "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
        ] = "default"
        fullgraph: Flag = False
        dynamic: Switch = "auto"
        backend: Literal["inductor", "eager", "aot_eager", "cudagraphs"] = "inductor"
        required: Flag = False

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Turn it on for GPUs on Linux, by request elsewhere, where a compiler is at hand."""
        options = _in_scope(request.value, facts)
        if facts.compiled == "in place":
            return request.leave(True, "you have compiled this model already; it stays so")
        obstacle = _obstacle(hardware, facts, options)
        details = options.model_dump(exclude={"enabled", *["required"] * (not options.required)})
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
        # Without it hooks that are registered after compiling never fire.
        config = sys.modules.get(torch_private.DYNAMO_CONFIG)
        if not config:
            return compile_cache.switches()
        hooks = {HOOKS: flags.attribute(config, HOOKS.partition(".")[2], False)}
        backward = torch_private.eager_backward()
        hooks |= {BACKWARD: flags.attribute(*backward, True)} if backward else {}
        return hooks | compile_cache.switches()

    def values(self, decision: Decision, now: flags.Values) -> Mapping[str, Any]:
        kept = compile_cache.values(now) if _is_inductor(decision) else {}
        backward = {BACKWARD: True} if torch_private.eager_backward() else {}
        return {HOOKS: False, **backward, **kept}

    def switched(self, decision: Decision, target: Target) -> AbstractContextManager[None]:
        torch_private.dynamo_config()  # which has the switch
        if _is_inductor(decision):
            compile_cache.prepare()
        return super().switched(decision, target)

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        """Return compiled calls for the modules; the code is kept for the context's life."""
        modules, memo = _modules(decision.details, target.model), target.memo
        options = options_of(decision.details)
        required = bool(decision.details.get("required"))
        code = memo.compiled_call or CompiledCode(options, modules, target.notes, required)
        memo.compiled_call = code
        return [CompiledCall(module, code) for module in modules]

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        with super().applied(decision, target), target.memo.compiled_call.parts.in_force():
            if _is_inductor(decision) and sys.platform == "linux" and probes.cxx():
                if next(target.model.parameters()).device.type == "cpu":
                    compile_cache.build_headers_ahead()
            yield

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
        if facts.compiled != "no" or _obstacle(hardware, facts, self.default):
            return ()
        if facts.device_type == "cuda":
            return (True, {"enabled": True, "mode": "reduce-overhead"})
        return (True,)


def _in_scope(options: Compile.Options, facts: Facts) -> Compile.Options:
    """Return the options with the repeated blocks as scope where that was left open and pays: on
    CPUs, where nothing but the blocks takes long to compile, and each kind serves several.
    """
    is_plain = options.backend == INDUCTOR and options.mode == "default" and not options.fullgraph
    if options.scope != "auto" or not is_plain or facts.device_type != "cpu":
        return options
    are_alike = facts.blocks >= ALIKE * max(facts.block_kinds, 1)
    are_most = facts.block_parameters > MOSTLY * facts.parameters
    pays = are_alike and are_most and len(facts.block_names) == facts.blocks
    return options.model_copy(update={"scope": "blocks"}) if pays else options


def _is_inductor(decision: Decision) -> bool:
    return bool(decision.details.get("backend", INDUCTOR) == INDUCTOR)


def _modules(details: Mapping[str, Any], model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules to compile: the model, or blocks that the user has not compiled."""
    if details.get("scope") != "blocks":
        return [model]
    return [block for block in repeated_blocks(model) if not users_own(block)]


def _obstacle(hardware: Hardware, facts: Facts, options: Compile.Options) -> str:
    """Return why this can't be compiled here; empty where it can."""
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
        return "" if is_cuda else f"CUDA graphs need CUDA, and the model is on {facts.device}"
    if why := no_triton(hardware, facts):
        return why
    if hardware.cxx is None:
        tools = {"Windows": "Visual Studio's C++ build tools", "Darwin": "Xcode's tools"}
        return f"no C++ compiler found: install {tools.get(hardware.system, 'g++')}"
    return ""


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


class CompiledCode:
    """Compiled forward passes of one plan, plain ones once that failed. It holds no module.

    `forwards` are the functions that were compiled, with those of all parts.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        modules: Sequence[torch.nn.Module],
        notes: dict[str, str],
        required: bool = False,
    ) -> None:
        self._options, self._modules, self.failed = options, len(modules), False
        self._compiled = _compile(options, len(modules))
        self.parts, self.forwards = EagerParts(Alive(modules)), set[Any]()
        self._notes, self._required, backend = notes, required, options.get("backend")
        self._name = f"torch.compile by {backend}" if backend else "torch.compile"
        self._checked, self._at, self._why = False, "", ""

    def run(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Make one forward pass. A failing compiler never stops it; the user's own errors do."""
        if self.failed:
            return module._call_impl(*args, **kwargs)
        try:
            graphs = None if self._checked else _graphs()
            result = self._compiled(module, args, kwargs)
            if not self._checked:
                self._check(graphs)
            return result
        except KeyboardInterrupt:
            torch_private.forget_builds()
            raise
        except Exception as error:
            if not torch_private.is_compiler_error(error):
                raise
            if was_interrupted(error):
                torch_private.forget_builds()
                raise KeyboardInterrupt from error
            if removed_half_written_build(error):
                return self.run(module, args, kwargs)
            if self._required:
                raise
            return self._run_plainly(error, module, args, kwargs)

    def _check(self, graphs: int | None) -> None:
        """Note what was compiled, and try whether more of it can be."""
        self.forwards = {type(part).forward for part in self.parts.every()}
        if _graphs() == graphs:
            self._notes["compile"] = f"{self._name} found nothing to compile in this model"
        self._checked = not self.parts.narrow()
        if self._checked and self.parts.names:
            self._notes["compile"] = self._partly
        elif not self._checked:
            self._compiled = _compile(self._options, self._modules)

    def _run_plainly(self, error: Exception, module: Any, args: Any, kwargs: Any) -> Any:
        # Where the plain model fails too, the mistake is the user's: the plain error goes up.
        result = module._call_impl(*args, **kwargs)
        line, self._why = None, in_a_line(torch_private.cause(error))
        if not (self._options.get("fullgraph") or torch_private.lacks_compiler(error)):
            line = self.parts.blame(Spot(*one) for one in torch_private.users_lines(error))
            self.failed = line is None and not self.parts.try_next()
        else:
            self.failed = True
        self._compiled, self._checked = _compile(self._options, self._modules), False
        self._at = f" ({place(line)})" if line else self._at
        whole = f"{self._name} failed, so the model runs as before: {self._why}"
        note = self._partly if line else whole
        is_new = "compile" not in self._notes or line is not None
        self._notes["compile"] = note
        if is_new:
            messages.warn(f"{note} (%speedkit report)")
        return result

    @property
    def _partly(self) -> str:
        left = f"{self.parts.names}{self._at} can't be compiled and runs as before"
        return f"{left}; the rest is compiled: {self._why}"


class CompiledCall(Call):
    """What the call of one module runs."""

    compiles = True

    def __init__(self, module: torch.nn.Module, code: CompiledCode) -> None:
        super().__init__(module)
        self.code = code

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make one forward pass; a plain one where something around it is being compiled."""
        import torch

        if torch.compiler.is_compiling():
            return self.module._call_impl(*args, **kwargs)
        return self.code.run(self.module, args, kwargs)


def _compile(options: Mapping[str, Any], modules: int) -> Callable[..., Any]:
    """Compile a function of ours: `nn.Module.compile()` skips torch.nn's own classes. Modules that
    are alike share what is compiled; those that are not need room for a graph each.
    """
    import torch

    def forward(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    allowed = signature(torch.compile).parameters
    more: dict[str, Any] = {}
    if "recompile_limit" in allowed and modules > 1:
        more["recompile_limit"] = GRAPHS * modules
    if "isolate_recompiles" in allowed:
        more["isolate_recompiles"] = True
    else:  # several plans on one model: each needs a code object, and so a cache, of its own
        forward = types.FunctionType(
            forward.__code__.replace(), forward.__globals__, closure=forward.__closure__
        )
    return torch.compile(forward, **options, **more)


def _graphs() -> int:
    return int(torch_private.compile_counters()["stats"]["unique_graphs"])


def was_interrupted(error: BaseException | None) -> bool:
    """Return whether the compiler died of Ctrl-C: Jupyter signals the whole process group."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or getattr(error, "returncode", 0) in (-2, 130):
            return True
        error = error.__cause__ or error.__context__
    return False


def removed_half_written_build(error: BaseException) -> bool:
    """Delete the library that a killed linker left half written: Inductor takes any file of that
    name for a finished one, also in later processes.
    """
    match = re.search(HALF_WRITTEN, str(error))
    if match is None or not Path(match[1]).is_file():
        return False
    Path(match[1]).unlink()
    torch_private.forget_builds()
    return True
