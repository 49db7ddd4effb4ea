"""Arguments of a transformers Trainer, tried on a few of its own training steps."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.right import deviations, reference
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.right.observer import Enough
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.search.thresholds import LEAST_COMPILING_S
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.step.variants import BASELINE, Variant, variant
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.support.units import share
from speedkit_jupyter.torchglue.confinement import patched

# Arguments of a Trainer that have the effect of a variant, by the variant's name.
ARGUMENTS = {
    "bf16": {"bf16": "True"},
    "fused_optimizer": {"optim": '"adamw_torch_fused"'},
    "compile": {"torch_compile": "True"},
}
WORKERS = "dataloader_num_workers"
ROWS, PARTS = "per_device_train_batch_size", "gradient_accumulation_steps"
OTHER_UPDATE = (
    "an update over the same rows has gradients that are off by {:.2g}: the loss or the model "
    "depends on the other rows of its batch (BatchNorm, a mean of each batch, random masks)"
)
NOTHING = "Nothing is proven faster: keep the arguments as they are"
TOO_SHORT = "Nothing was measured within the budget: --budget gives more seconds"


def is_trainer(value: Any) -> bool:
    """Return whether a value is a transformers Trainer, or one of a subclass such as trl's."""
    classes = ((base.__name__, base.__module__.partition(".")[0]) for base in type(value).__mro__)
    return ("Trainer", "transformers") in classes


@contextmanager
def unchanged(*owners: Any) -> Iterator[None]:
    """Restore the attributes of `owners` after the block, and the items of their lists."""
    before = [(vars(owner), dict(vars(owner))) for owner in owners]
    lists = [(one, [*one]) for _, old in before for one in old.values() if type(one) is list]
    try:
        yield
    finally:
        for now, old in before:
            now.clear()
            now.update(old)
        for one, values in lists:
            one[:] = values


@contextmanager
def with_arguments(trainer: Any, **given: Any) -> Iterator[None]:
    """Set arguments of a Trainer in the block, and the batch size that the Trainer has copied."""
    with unchanged(trainer, trainer.args):
        vars(trainer.args).update(given)
        vars(trainer).update(_train_batch_size=trainer.args.train_batch_size)
        yield


def short_training(trainer: Any, steps: int = 0) -> Callable[[], None]:
    """Return a function that trains for `steps` updates (0: about four batches, or one update).

    The function runs no evaluations, writes no files, and keeps only DefaultFlowCallback. It
    restores the Trainer afterwards, because measurements don't restore objects of libraries.
    """
    steps = steps or max(4 // trainer.args.gradient_accumulation_steps, 1)

    def train() -> None:
        handler, args = trainer.callback_handler, trainer.args
        flow = [one for one in handler.callbacks if type(one).__name__ == "DefaultFlowCallback"]
        # A Trainer first collects garbage, which takes as long as about ten small steps.
        module = inspect.getmodule(type(trainer.accelerator))
        lasting = patched(module, "release_memory", lambda _: lambda *objects: [*objects])
        with lasting, unchanged(trainer, handler, args, trainer.accelerator):
            handler.callbacks, args.max_steps = flow, steps
            args.save_strategy = args.eval_strategy = args.logging_strategy = "no"
            trainer.state, trainer.control = copy.copy(trainer.state), copy.copy(trainer.control)
            trainer.train()

    return train


def arguments_to_try(trainer: Any, budget_s: float) -> dict[str, dict[str, str]]:
    """Return arguments worth trying here, by variant name, that the Trainer does not use yet."""
    args, hardware, facts = trainer.args, Hardware.current(), Facts.read(trainer.model)
    precisions = named("precision").candidates(hardware, facts)
    compiles = named("compile").candidates(hardware, facts) and not args.torch_compile
    is_tried = {
        "bf16": "bf16" in precisions and not (args.bf16 or args.fp16),
        "fused_optimizer": args.optim == "adamw_torch" and trainer.optimizer is None,
        "compile": bool(compiles) and budget_s >= LEAST_COMPILING_S,
    }
    return {word: ARGUMENTS[word] for word, flag in is_tried.items() if flag}


def other_parts(args: Any) -> list[dict[str, int]]:
    """Return other pairs of batch size and accumulation steps with the same rows per update."""
    rows, parts = args.per_device_train_batch_size, args.gradient_accumulation_steps
    larger = [{ROWS: rows * n, PARTS: parts // n} for n in sorted({2, parts}) if not parts % n]
    halved = [{ROWS: rows // 2, PARTS: 2}] * (rows % 2 == 0)
    return larger if parts > 1 else halved


def gradients_of_an_update(trainer: Any, **given: int) -> dict[str, torch.Tensor]:
    """Train up to the first update; return float64 gradients by name (no dropout, no clipping)."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    found = dict[str, torch.Tensor]()

    def before_step(*_: Any) -> None:
        named = trainer.model.named_parameters()
        found.update({name: one.grad for name, one in named if one.grad is not None})
        raise Enough

    hook = register_optimizer_step_pre_hook(before_step)
    with ExitStack() as stack:
        stack.callback(hook.remove)
        stack.callback(trainer.model.zero_grad)  # float32 parameters can't keep these gradients
        stack.enter_context(with_arguments(trainer, max_grad_norm=0.0, **given))
        stack.enter_context(reference.without_dropout([trainer.model]))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(suppress(Enough))
        stack.enter_context(reference.in_float64([trainer.model]))
        short_training(trainer, 1)()
    return found


def same_update(trainer: Any, given: dict[str, int], restore: Callable[[], None]) -> Accuracy:
    """Compare an update under `given` with the Trainer's own update; restore state."""
    try:
        own = gradients_of_an_update(trainer)
        restore()
        other = gradients_of_an_update(trainer, **given)
    except Exception as error:  # the user's code may refuse float64
        return Accuracy("not checked", in_a_line(error))
    finally:
        restore()
    pairs = [(other.get(name), own.get(name)) for name in own | other]
    distance = deviations.total(deviations.sums(pairs)).deviation().distance
    # Rounding causes up to 1e-7, if the model itself computes parts in float32.
    is_same = own and distance <= 1e-5
    why = "" if is_same else OTHER_UPDATE.format(distance)
    return Accuracy("rounding" if is_same else "wrong", why, gradient_error=distance)


class TrainerAdvisor:
    """Measure arguments of a Trainer: drain `run()`, then read `result()` and `advice()`."""

    def __init__(self, trainer: Any, budget_s: float, command: str) -> None:
        self._trainer, words = trainer, arguments_to_try(trainer, budget_s)
        self._arguments = dict[str, Mapping[str, str]]()
        cheap = [word for word in words if word != "compile"]
        joined = [cheap] * (len(cheap) > 1) + [[*words]] * ("compile" in words)
        for some in (*([word] for word in cheap), *joined):
            parts = (words[word] for word in some)
            self._arguments["+".join(some)] = {name: one[name] for one in parts for name in one}
        tried = [variant(name) for name in self._arguments]
        cores, args = Hardware.current().cpu.usable_cores, trainer.args
        workers = [{WORKERS: cores - 1}] * (cores > 1 and not args.dataloader_num_workers)
        for given in (*workers, *other_parts(args)):
            name = ",".join(f"{word}={value}" for word, value in given.items())
            proof = partial(same_update, trainer, given) if ROWS in given else None
            around = partial(with_arguments, trainer, **given)
            tried.append(Variant(name, around=around, proof=proof))
            self._arguments[name] = {word: str(value) for word, value in given.items()}
        tried.sort(key=lambda one: "compile" in one.name)  # compile last, if time is left
        own = [getattr(trainer, name, None) for name in ("optimizer", "lr_scheduler")]
        own = [getattr(one, "scheduler", one) for one in own if one is not None]  # unwrapped
        step = step_of(short_training(trainer), trainer.model)
        step = replace(step, others=[*step.others, *own])
        self._benchmark = Benchmark(step, [Variant(BASELINE), *tried], budget_s, command=command)
        self.run, self.has_results = self._benchmark.run, self._benchmark.has_results

    def result(self) -> Comparison:
        return self._benchmark.result()

    def advice(self) -> Document:
        """Return a report on the arguments that are proven faster, and on avoidable padding."""
        found, content = self.result(), list[str]()
        if (padding := self._padding()) is not None:
            content.append(
                f"{share(padding[0])} of the words in batches are padding, "
                f"{share(padding[1])} if rows of similar length are together: "
                f"group_by_length=True (newer: train_sampling_strategy='group_by_length'); "
                "batches then have other rows, so the results are not compared"
            )
        faster = [one for one in found.records if found.verdict(one) == "faster"]
        fastest = dict[str, Mapping[str, str]]()  # by kind: plan, workers, batch size
        for one in sorted(faster, key=lambda one: -median(one.times_s)):
            first, sign, _ = one.name.partition("=")
            fastest[first if sign else ""] = self._arguments[one.name]
        arguments = {name: value for one in fastest.values() for name, value in one.items()}
        if len(fastest) > 1:
            content.append("each argument is proven alone; all together were not measured")
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        none = NOTHING if any(len(one.times_s) for one in found.records[1:]) else TOO_SHORT
        return Document(f"TrainingArguments(…, {given})" if given else none, content)

    def _padding(self) -> tuple[float, float] | None:
        """Return the share of padding before and after sorting by length; None if not halved."""
        lengths: list[int] = []
        with suppress(Exception):  # a data set without indices or with other fields
            data = self._trainer.train_dataset
            lengths = [len(data[at]["input_ids"]) for at in range(min(len(data), 1000))]
        if len({*lengths}) < 2:
            return None
        shares = []
        for rows in (lengths, sorted(lengths)):
            size = self._trainer.args.train_batch_size
            batches = [rows[at : at + size] for at in range(0, len(rows), size)]
            shares.append(1 - sum(lengths) / sum(len(batch) * max(batch) for batch in batches))
        return (shares[0], shares[1]) if shares[0] > 2 * shares[1] else None
