"""Generated code for Accelerate, Lightning Fabric and transformers' Trainer.

What a framework has an argument for is its argument; the rest stays plain torch beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from speedkit_jupyter.codegen.optimizer_source import (
    hyperparameters,
    is_made,
    keywords_of,
    making,
)
from speedkit_jupyter.codegen.script import (
    Block,
    Script,
    assembled,
    comment,
    header,
    indented,
    keywords,
)
from speedkit_jupyter.codegen.training_step import function, has_closures
from speedkit_jupyter.codegen.unwrapping import new_state
from speedkit_jupyter.support.exceptions import SpeedKitError

# Where the notebook has one that is set otherwise.
OTHERS = "In place of your own: give it your other arguments, too."


def accelerate(script: Script) -> str:
    """With an `Accelerator`, which compiles and scales by itself."""
    own = script.given.instance
    room, imports_too = new_state()
    arguments = dict(script.arguments)
    if own is not None and own.accumulation_steps > 1 and not has_closures(script):
        arguments["gradient_accumulation_steps"] = str(own.accumulation_steps)
    also = comment(OTHERS) if own is not None else []
    make = [*room, *also, f"accelerator = Accelerator({_arguments(arguments)})"]
    imports = ["from accelerate import Accelerator", *imports_too]
    if (kept := _kept(script)) is not None:
        make, imports = kept, []
    names = ", ".join(["model", *script.optimizers])
    prepare = [f"{names} = accelerator.prepare({names})"]
    return _with_loop(script, imports, make, prepare, "accelerator.backward({loss})")


def fabric(script: Script) -> str:
    """With a `Fabric`, which is handed the compiled model."""
    also = comment(OTHERS) if script.given.instance is not None else []
    make = [*also, f"fabric = Fabric({_arguments(script.arguments)})"]
    imports = ["from lightning.fabric import Fabric"]
    if (kept := _kept(script)) is not None:
        make, imports = kept, []
    model = next((snippet.compiled for snippet in script.snippets if snippet.compiled), "model")
    names = ", ".join(["model", *script.optimizers])
    setup = f"{names} = fabric.setup({', '.join([model, *script.optimizers])})"
    prepare = [*script.reasons("compiled"), setup]
    return _with_loop(script, imports, make, prepare, "fabric.backward({loss})")


def _kept(script: Script) -> Block | None:
    """What stands in place of making another one, where the user's own is as planned already."""
    own = script.given.instance
    if own is None or (own.accumulation_steps > 1 and has_closures(script)):
        return None  # a closure is to run at each batch
    if not own.suits(script.arguments, script.plan.facts_after.device):
        return None
    return comment(f"`{own.word}` is set so already.") if script.arguments else []


def transformers(script: Script) -> str:
    """With `TrainingArguments`; an optimizer that these can't describe is given to the Trainer."""
    if len(script.optimizers) > 1:
        raise SpeedKitError("Trainer takes one optimizer and the plan has more: take --as torch")
    described = _described_optimizer(script)
    room, imports_too = new_state()
    make = [
        *script.reasons("arguments"),
        *(script.reasons("optimizers") if described else []),
        *room,
        *comment("Add your own arguments to these."),
        f"arguments = TrainingArguments({_arguments(script.arguments | described)})",
    ]
    given = {"model": "model", "args": "arguments", "train_dataset": "train_dataset"}
    if script.optimizers and not described:
        given["optimizers"] = f"({next(iter(script.optimizers))}, None)"
    body = [
        f"trainer = Trainer({_arguments(given)}, **more)",
        *script.surrounded(["trainer.train()"]),
        "return trainer",
    ]
    blocks = [*script.setup(), make, *script.blocks("model")]
    if not described:
        blocks.append(making(script))
    yours = ["model"] if described else _yours(script)
    return assembled(
        header(script, yours),
        script,
        blocks,
        ["def train(train_dataset, **more):", *indented(body)],
        "from transformers import Trainer, TrainingArguments",
        *imports_too,
    )


def _with_loop(
    script: Script, imports: Sequence[str], make: Block, prepare: Block, backward: str
) -> str:
    """What Accelerate and Fabric have in common: the loop stays the user's."""
    blocks = [
        *script.setup(),
        [*script.reasons("arguments"), *make],
        *script.blocks("model"),
        making(script),
        prepare,
        *script.blocks("training"),
    ]
    body = function(script, "model", backward)
    return assembled(header(script, _yours(script)), script, blocks, body, *imports)


def _arguments(arguments: Mapping[str, str]) -> str:
    return ", ".join(keywords(arguments))


def _yours(script: Script) -> list[str]:
    instance = script.given.instance
    kept = [instance.word] if instance is not None and _kept(script) is not None else []
    return ["model", *(name for name in script.optimizers if not is_made(script, name)), *kept]


def _described_optimizer(script: Script) -> dict[str, str]:
    """A fused AdamW in TrainingArguments' words, or nothing where they would not be the same.

    Trainer lets biases and norms out of weight decay, so one with weight decay is none of these.
    """
    for name, optimizer in script.optimizers.items():
        if "fused" not in keywords_of(script, name) or not is_made(script, name):
            return {}
        if script.plan.facts.optimizers[0].name != "AdamW":
            return {}
        described = {"optim": '"adamw_torch_fused"'}
        if optimizer is None:
            return described
        group, own = optimizer.param_groups[0], hyperparameters(optimizer)
        if group["weight_decay"] != 0 or own.keys() - {
            "lr",
            "betas",
            "eps",
            "weight_decay",
            "fused",
        }:
            return {}
        described["learning_rate"] = repr(own.get("lr", group["lr"]))
        if "betas" in own:
            described["adam_beta1"], described["adam_beta2"] = map(repr, own["betas"])
        if "eps" in own:
            described["adam_epsilon"] = repr(own["eps"])
        return described
    return {}
