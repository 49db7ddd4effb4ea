"""torch.compile as plain code, for each form: the whole model, or its repeated blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from speedkit_jupyter.optimizations.base.snippet import Form, Snippet, call, source
from speedkit_jupyter.optimizations.facts.backends import INDUCTOR
from speedkit_jupyter.optimizations.facts.model import Facts

KEYS = "save `model`: the keys of compiled_model.state_dict() begin with `_orig_mod.`"
COPIES = "copy `model` before: what is copied after this calls the original's forward"


def options_of(details: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of torch.compile that are not its defaults."""
    options: dict[str, Any] = {}
    for name, default in (("backend", INDUCTOR), ("mode", "default"), ("dynamic", "auto")):
        if details.get(name, default) != default:
            options[name] = details[name]
    if details.get("fullgraph", False):
        options["fullgraph"] = True
    return options


def compiled_source(details: Mapping[str, Any], reason: str, facts: Facts, form: Form) -> Snippet:
    """The code for a decision with these details."""
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
    """In place, so that the keys of the state_dict stay; the same in every framework."""
    compiling = call("block.compile", **options)
    if facts.blocks_of_torch:  # which `compile()` passes over
        compiling = f"block.forward = {call('torch.compile', 'block.forward', **options)}"
        reason = f"{reason}; {COPIES}"
    lines = [
        line
        for block, loop in _loops(facts.block_names)
        for line in (loop, f"    block = model.get_submodule({block})", f"    {compiling}")
    ]
    return Snippet(reason, model=tuple(lines))


def _loops(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """An expression for the name of a block, and the loop that it stands in, for each parent."""
    for parent, group in groupby(names, lambda name: name.rpartition(".")[0]):
        begin = f"{parent}." if parent else ""
        parts = [name.removeprefix(begin) for name in group]
        numbers = [int(part) if part.isdecimal() else -1 for part in parts]
        if numbers == [*range(numbers[0], numbers[0] + len(numbers))] and numbers[0] >= 0:
            first = f"{numbers[0]}, " if numbers[0] else ""
            yield f'f"{begin}{{number}}"', f"for number in range({first}{numbers[-1] + 1}):"
        else:
            every = ", ".join(source(f"{begin}{part}") for part in parts)
            yield "name", f"for name in [{every}]:"


def _for_accelerate(options: Mapping[str, Any]) -> Snippet:
    if not options:
        return Snippet(arguments={"dynamo_backend": f'"{INDUCTOR}"'})
    return Snippet(
        imports=("from accelerate.utils import TorchDynamoPlugin",),
        arguments={"dynamo_plugin": call("TorchDynamoPlugin", backend=INDUCTOR, **options)},
    )


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
