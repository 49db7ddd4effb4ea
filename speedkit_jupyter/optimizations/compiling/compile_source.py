"""torch.compile as plain code, for each form: the whole model, or its repeated blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speedkit_jupyter.optimizations.base.snippet import Form, Snippet, call, source
from speedkit_jupyter.optimizations.facts.backends import INDUCTOR
from speedkit_jupyter.optimizations.facts.model import Facts

KEYS = "save `model`: the keys of compiled_model.state_dict() begin with `_orig_mod.`"
COPIES = "copy `model` before: what is copied after this calls the original's forward"


def options_of(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of torch.compile that are not its defaults."""
    options: dict[str, Any] = {}
    for name, default in (("backend", INDUCTOR), ("mode", "default"), ("dynamic", "auto")):
        if details.get(name, default) != default:
            options[name] = details[name]
    if details.get("fullgraph", False):
        options["fullgraph"] = True
    return options


def compiled_source(details: Mapping[str, Any], reason: str, facts: Facts, form: Form) -> Snippet:
    """Return the code for a decision with these details."""
    options = options_of(details)
    if details.get("scope") == "blocks":
        return _blocks(options, reason, facts)
    if form in ("torch", "fabric"):
        comment = f"{reason}; {KEYS}" if form == "torch" else ""
        return Snippet(comment, compiled=call("torch.compile", "model", **options))
    if "backend" in options:  # not all that torch takes are the frameworks' too
        line = f"model.forward = {call('torch.compile', 'model.forward', **options)}"
        return Snippet(f"{reason}; {COPIES}", model=(line,))
    return _for_trainer(options) if form == "transformers" else _for_accelerate(options)


def _blocks(options: Mapping[str, Any], reason: str, facts: Facts) -> Snippet:
    """Return lines that compile in place, so that the keys of the state_dict stay."""
    compiling = call("block.compile", **options)
    if facts.blocks_of_torch:  # which `compile()` passes over
        compiling = f"block.forward = {call('torch.compile', 'block.forward', **options)}"
        reason = f"{reason}; {COPIES}"
    names = (f"    {source(name)}," for name in facts.block_names)
    loop = ("for name in (", *names, "):", "    block = model.get_submodule(name)")
    return Snippet(reason, model=(*loop, f"    {compiling}"))


def _for_accelerate(options: Mapping[str, Any]) -> Snippet:
    if not options:
        return Snippet(arguments={"dynamo_backend": f'"{INDUCTOR}"'})
    return Snippet(
        imports=("from accelerate.utils import TorchDynamoPlugin",),
        arguments={"dynamo_plugin": call("TorchDynamoPlugin", backend=INDUCTOR, **options)},
    )


def _for_trainer(options: Mapping[str, Any]) -> Snippet:
    """Return the mode for Trainer; the rest reaches Accelerate through the environment."""
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
