"""The report of generated code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from speedkit_jupyter.codegen.forms import code
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import CodeBlock, Section

if TYPE_CHECKING:
    from speedkit_jupyter.codegen.script import Optimizers


def code_report(
    plan: Plan | SpeedContext,
    form: str,
    optimizers: Optimizers,
    name: str,
    model: torch.nn.Module | None = None,
    names: Mapping[str, Any] | None = None,
) -> Document:
    """Return a report of it; `name` is the user's word for the model, `names` the notebook."""
    text = code(plan, form, optimizers, model=model, name=name, names=names)
    titles = {"torch": "plain PyTorch", "torchrun": "a script for torchrun", "yaml": "a config"}
    title = titles.get(form, form.capitalize())
    body = Section(CodeBlock(text.rstrip("\n"), is_file=True))
    return Document(f"The plan for `{name}` as {title}", (body,), {"form": form, "code": text})
