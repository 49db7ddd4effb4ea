"""A decision as plain code: the pieces of a script that one optimization needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Form = Literal["torch", "accelerate", "fabric", "transformers"]


@dataclass(frozen=True)
class Snippet:
    """Python source, by the place in a script where it belongs.

    It is about the names `model`, `loss` and (in braces) `{optimizer}`. Where a framework does
    the same by itself, `arguments` of its `Accelerator`, `Fabric` or `TrainingArguments` stand
    in place of lines. `comment` is the decision's reason where that speaks of SpeedKit.
    """

    comment: str = ""
    imports: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # process-wide, once, at the top
    compiling: tuple[str, ...] = ()  # also process-wide, but only where the model is compiled
    model: tuple[str, ...] = ()  # about the model, before the optimizer is made
    batch: str = ""  # a method call on each tensor of a batch
    optimizers: tuple[Mapping[str, str], ...] = ()  # keyword arguments for each of the facts'
    training: tuple[str, ...] = ()  # once, after the optimizer was made
    compiled: str = ""  # an expression: the compiled model
    forward: tuple[str, ...] = ()  # context managers around forward pass and loss
    loss: str = "loss"  # what backward runs on
    step: str = "{optimizer}.step()"
    after_step: tuple[str, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)


def call(function: str, *sources: str, **values: object) -> str:
    """Return a call as source: `sources` as they stand, `values` as keyword arguments."""
    keywords = (f"{key}={source(value)}" for key, value in values.items())
    return f"{function}({', '.join([*sources, *keywords])})"


def source(value: object) -> str:
    """Return a plain value as source, strings in double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def framework_precision(dtype: str, device_type: str, form: Form) -> dict[str, str]:
    """Return a framework's arguments for mixed precision; none for fp16 on a CPU."""
    if dtype == "fp16" and device_type == "cpu":
        return {}
    fabric = {"bf16": '"bf16-mixed"', "fp16": '"16-mixed"'}
    arguments: dict[str, dict[str, str]] = {
        "accelerate": {"mixed_precision": f'"{dtype}"'},
        "fabric": {"precision": fabric[dtype]},
        "transformers": {dtype: "True"},
    }
    return arguments.get(form, {})
