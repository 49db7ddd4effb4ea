"""Arguments of a transformers Trainer, tried on a few of its own training steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.search.search import LEAST_COMPILING_S
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.step.variants import BASELINE, Variant, variant
from speedkit_jupyter.support.units import share

# The plans that compute like arguments of a Trainer, by the plan's word.
ARGUMENTS = {
    "bf16": {"bf16": "True"},
    "fused_optimizer": {"optim": '"adamw_torch_fused"'},
    "compile": {"torch_compile": "True"},
}
WORKERS = "dataloader_num_workers"
# The arguments of a short training without files, evaluations and reports.
QUIET = dict.fromkeys(("save_strategy", "eval_strategy", "logging_strategy"), "no")
NOTHING = "Nothing is proven faster: keep the arguments as they are"


def is_trainer(value: Any) -> bool:
    """Return whether this is a Trainer of transformers, or of a subclass such as trl's."""
    classes = ((base.__name__, base.__module__.partition(".")[0]) for base in type(value).__mro__)
    return ("Trainer", "transformers") in classes


@contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object in the block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def unchanged(*owners: Any) -> Iterator[None]:
    """Put attributes back after the block, and the contents of lists; a training leaves several."""
    before = [dict(vars(owner)) for owner in owners]
    lists = [(one, [*one]) for names in before for one in names.values() if type(one) is list]
    try:
        yield
    finally:
        for owner, names in zip(owners, before, strict=True):
            vars(owner).clear()
            vars(owner).update(names)
        for one, values in lists:
            one[:] = values


def short_training(trainer: Any, steps: int = 4) -> Callable[[], None]:
    """Return a training of a few steps, without callbacks of the user and of reports."""

    def train() -> None:
        handler = trainer.callback_handler
        flow = [one for one in handler.callbacks if type(one).__name__ == "DefaultFlowCallback"]
        with ExitStack() as stack:
            stack.enter_context(unchanged(trainer, handler, trainer.accelerator))
            stack.enter_context(changed(handler, callbacks=flow))
            stack.enter_context(changed(trainer.args, max_steps=steps, **QUIET))
            trainer.state, trainer.control = copy.copy(trainer.state), copy.copy(trainer.control)
            trainer.train()

    return train


def arguments_to_try(trainer: Any, budget_s: float | None) -> dict[str, dict[str, str]]:
    """Return the arguments that this machine has and the Trainer lacks, by the plan's word."""
    args, hardware, facts = trainer.args, Hardware.current(), Facts.read(trainer.model)
    precisions = named("precision").candidates(hardware, facts)
    compiles = named("compile").candidates(hardware, facts) and not args.torch_compile
    is_tried = {
        "bf16": "bf16" in precisions and not (args.bf16 or args.fp16),
        "fused_optimizer": args.optim == "adamw_torch" and trainer.optimizer is None,
        "compile": bool(compiles) and (budget_s or 0.0) >= LEAST_COMPILING_S,
    }
    return {word: ARGUMENTS[word] for word, flag in is_tried.items() if flag}


class TrainerAdvisor:
    """Measure arguments of a Trainer: drain `run()`, then read `result()` and `advice()`."""

    def __init__(self, trainer: Any, budget_s: float | None, command: str) -> None:
        self._trainer, words = trainer, arguments_to_try(trainer, budget_s)
        self._arguments: dict[str, Mapping[str, str]] = {**words}
        if len(words) > 1:
            joined = {name: value for one in words.values() for name, value in one.items()}
            self._arguments["+".join(words)] = joined
        tried = [variant(word) for word in self._arguments]
        cores = Hardware.current().cpu.usable_cores
        if not trainer.args.dataloader_num_workers and cores > 1:
            name, number = f"{WORKERS}={cores - 1}", cores - 1
            around = partial(changed, trainer.args, **{WORKERS: number})
            tried.append(Variant(name, around=around))
            self._arguments[name] = {WORKERS: str(number)}
        step = step_of(short_training(trainer), trainer.model)
        self._benchmark = Benchmark(step, [Variant(BASELINE), *tried], budget_s, command=command)
        self.run, self.has_results = self._benchmark.run, self._benchmark.has_results

    def result(self) -> Comparison:
        return self._benchmark.result()

    def advice(self) -> Document:
        """Return the line with the arguments that are proven faster, and the share of padding."""
        found, content = self.result(), list[str]()
        if (padding := self._padding()) is not None:
            content.append(
                f"{share(padding[0])} of the words in batches are padding, "
                f"{share(padding[1])} if rows of similar length are together: "
                f"group_by_length=True (newer: train_sampling_strategy='group_by_length'); "
                "batches then have other rows, so the results are not compared"
            )
        best, arguments = found.best, dict[str, str]()
        if best is not None:
            faster = [one.name for one in found.records if found.verdict(one) == "faster"]
            workers = [name for name in faster if name.startswith(WORKERS)]
            for name in (best.name, *workers):
                arguments |= self._arguments[name]
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        return Document(f"TrainingArguments(…, {given})" if given else NOTHING, content)

    def _padding(self) -> tuple[float, float] | None:
        """Return the shares of padding in batches of random and of similar rows, if they differ."""
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
            width = sum(len(batch) * max(batch) for batch in batches)
            shares.append(1 - sum(lengths) / width)
        return (shares[0], shares[1]) if shares[0] > 2 * shares[1] else None
