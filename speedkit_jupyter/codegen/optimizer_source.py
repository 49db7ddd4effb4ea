"""Optimizers in generated code: made anew with the user's hyperparameters, or switched."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.codegen.script import INDENT, Block, Script, comment, keywords

if TYPE_CHECKING:
    import torch

# What a fused kernel takes the place of.
KERNELS = ("fused", "foreach")


def is_made(script: Script, name: str) -> bool:
    """Whether the code makes this optimizer, and does not take the user's own."""
    return name not in script.given.own


def makeable(script: Script, name: str) -> bool:
    """Whether one line makes this optimizer: torch's own class, all parameters in one group."""
    import torch

    optimizer = script.optimizers[name]
    if optimizer is None:
        return hasattr(torch.optim, _class_name(script, name))
    kind, groups = type(optimizer), optimizer.param_groups
    own = kind.__module__.startswith("torch.optim") and hasattr(torch.optim, kind.__name__)
    size = sum(parameter.numel() for group in groups for parameter in group["params"])
    return own and len(groups) == 1 and size == script.plan.facts.parameters


def making(script: Script) -> Block:
    """The lines that make every optimizer, or switch those that only the user can make."""
    lines = script.reasons("optimizers")
    for name in script.optimizers:
        extra = keywords_of(script, name)
        lines += _made(script, name, extra) if is_made(script, name) else _switched(script, name)
    return lines


def keywords_of(script: Script, name: str) -> dict[str, str]:
    """What the plan adds to one optimizer."""
    index = list(script.optimizers).index(name)
    return {
        k: v
        for snippet in script.snippets
        if snippet.optimizers
        for k, v in snippet.optimizers[index].items()
    }


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Those that differ from the class's own; a scheduler's learning rate is its first one."""
    group = optimizer.param_groups[0]
    keywords = {}
    for name, parameter in signature(type(optimizer)).parameters.items():
        if name in group and name != "params":
            value = group["initial_lr"] if name == "lr" and "initial_lr" in group else group[name]
            if parameter.default is Parameter.empty or not _same(value, parameter.default):
                keywords[name] = value
    return keywords


def _made(script: Script, name: str, extra: dict[str, str]) -> Block:
    optimizer = script.optimizers[name]
    hint = [] if optimizer else comment("With your own learning rate and the rest.")
    values = {} if optimizer is None else hyperparameters(optimizer)
    replaced = KERNELS if "fused" in extra else ()
    own = {key: _source(value) for key, value in values.items() if key not in replaced}
    arguments = ", ".join(["model.parameters()", *keywords(own | extra)])
    return [*hint, f"{name} = torch.optim.{_class_name(script, name)}({arguments})"]


def _switched(script: Script, name: str) -> Block:
    """In place: the user's own, and groups and classes that one line can't make."""
    extra = keywords_of(script, name)
    if not extra:
        return []
    kind, index = _class_name(script, name), list(script.optimizers).index(name)
    optimizer = script.optimizers[name]
    has_begun = optimizer is not None and bool(optimizer.state)
    when = "" if has_begun else "before its first step and "
    lines = comment(f"This switches `{name}` ({kind}), {when}again after load_state_dict().")
    if True in script.plan.facts.optimizers[index].foreach:
        extra["foreach"] = "False"
    lines.append(f"for group in ({name}.defaults, *{name}.param_groups):")
    lines += [f'{INDENT}group["{key}"] = {value}' for key, value in extra.items()]
    if has_begun and script.plan.facts_after.device_type != "cpu":
        lines += comment("Its counts of steps go where the fused kernel wants them.")
        lines.append(f"{name}.load_state_dict({name}.state_dict())")
    if script.plan["grad_scaler"].active:
        lines += comment("Else the scaler would wait for the device before every step.")
        lines.append(f"{name}._step_supports_amp_scaling = True")
    return lines


def _class_name(script: Script, name: str) -> str:
    optimizer = script.optimizers[name]
    if optimizer is not None:
        return type(optimizer).__name__
    return script.plan.facts.optimizers[list(script.optimizers).index(name)].name


def _same(value: Any, default: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor) or isinstance(default, torch.Tensor):
        return False
    return bool(value == default)


def _source(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"torch.tensor({value.item()!r})"
    if isinstance(value, tuple):
        inside = ", ".join(map(_source, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)
