"""Liger's kernels as plain code: its functions on the modules of each class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from speedkit_jupyter.optimizations.base.snippet import Form, Snippet, source
from speedkit_jupyter.optimizations.facts.fusible import ROTATE, TORCHS, Fusible

FUNCTIONS = "from liger_kernel.transformers import functional as liger"
ROTATION = "from liger_kernel.transformers import liger_rotary_pos_emb"
NORM = """\
for norm in model.modules():
    if type(norm).__name__ == {name}:
        norm.forward = partial(
            liger.liger_rms_norm,
            W=norm.weight,
            eps={eps},
            offset={offset},
            casting_mode={casting},
            in_place=False,
        )"""
MLP = """\
def {name}_forward(mlp, x):
    return mlp.{down}(liger.liger_{kernel}(mlp.{gate}(x), mlp.{up}(x)))


for mlp in model.modules():
    if type(mlp).__name__ == "{name}":
        mlp.forward = partial({name}_forward, mlp)"""
ROPE = "{module}.{function} = liger_rotary_pos_emb  # for all such models"
KWARGS = ("rms_norm", "rope", "swiglu")


def fused_source(places: Sequence[Fusible], form: Form) -> Snippet:
    """Each class once; for Trainer its own argument, which takes the models that Liger lists."""
    kinds = {place.kind for place in places}
    if form == "transformers" and not any(place.how is TORCHS for place in places):
        return Snippet(arguments=_of_trainer(kinds))
    alike = dict.fromkeys(place._replace(path="") for place in places)
    imports = [FUNCTIONS, "from functools import partial"] if kinds & {"rms_norm", "swiglu"} else []
    lines = [line for place in alike for line in _lines(place)]
    if "rope" in kinds:
        imports += [ROTATION, *(f"import {place.how}" for place in alike if place.kind == "rope")]
    return Snippet(imports=tuple(imports), model=tuple(lines))


def _lines(place: Fusible) -> Iterator[str]:
    yield from _text(place).splitlines()


def _text(place: Fusible) -> str:
    how: Any = place.how
    if place.kind == "swiglu":
        return MLP.format(name=place.name, **how._asdict())
    if place.kind == "rope":
        return ROPE.format(module=how, function=ROTATE)
    eps = f"norm.{how.eps}"
    if how is TORCHS:
        eps = f"torch.finfo(torch.float32).eps if {eps} is None else {eps}"
    return NORM.format(
        name=source(place.name), eps=eps, offset=how.offset, casting=source(how.casting)
    )


def _of_trainer(kinds: set[Any]) -> dict[str, str]:
    wish = {kind: kind in kinds for kind in KWARGS}
    wish |= {
        "geglu": "swiglu" in kinds,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
    return {"use_liger_kernel": "True", "liger_kernel_config": repr(wish).replace("'", '"')}
