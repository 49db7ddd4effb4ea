"""Whether the accuracy check tells wrong plans from right ones.

Four tables. *Planted*: a variant computes something wrong (in its outputs, its gradients, its
optimizer's step, behind results of any type, in a stochastic model, only later), and must be
called wrong, or at least not checked, which can't win. *Honest*: nets of every family in bf16,
fp16, channels_last and so on, which must not be called wrong. *Amplifying*: nets that make much of
rounding, from five seeds each, with optimizers of six kinds. *A/A*: stochastic nets against
themselves, which must not be called wrong either.

    python tests/benchmarks/planted.py [--part planted|honest|amplifying|again] [--compile]
        [--file out.jsonl] [--only WORDS ...]

`--only` takes the nets and faults whose name has one of the words in it. Only the check runs, no
times are taken, but for what goes wrong later. About half an hour.
Exits 1 where a wrong variant could win, or a right one was called wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _amplifying import nets
from _beside import BESIDE
from _beside import HONEST as BESIDE_HONEST
from _coarse import COARSE
from _left import LEFT
from _nets import NAMES, net
from _packed import HONEST as PACKED_HONEST
from _packed import PACKED
from _planted import KINDS, LATE, STOCHASTIC, Planted
from _ratios import machine
from _rows import HONEST as ROWS_HONEST
from _rows import ROWS
from _whole import WHOLE

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.variants import variant

HONEST = ("bf16", "fp16", "tf32:medium", "channels_last", "fused_optimizer", "threads:2",
          "bf16+channels_last+fused_optimizer")  # fmt: skip
Chosen = Callable[[str], bool]
PARTS = ("planted", "honest", "amplifying", "again")
# The check ends long before; no load of the machine keeps it from being reached.
ENOUGH_S = 120.0


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--compile", action="store_true", help="compiled variants too: minutes")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the nets are small
    warnings.simplefilter("ignore")
    words = (*HONEST, "compile", "bf16+compile") if options.compile else HONEST
    parts: dict[str, Callable[[Chosen], Iterator[dict[str, Any]]]] = {
        "planted": planted,
        "honest": lambda chosen: honest(words, chosen),
        "amplifying": amplifying,
        "again": again,
    }

    def chosen(name: str) -> bool:
        return any(one in name for one in options.only)

    rows: list[dict[str, Any]] = []
    for part in [options.part] if options.part else list(parts):
        for row in parts[part](chosen):
            rows.append({"part": part, **row})
            print(f"{part:8} {row['name']:34} {row['verdict']:12} {row['reason']}", flush=True)
    print(f"\n{machine()}\n{summary(rows)}")
    if options.file:
        save(options.file, rows, whole=chosen(""))
    return 0 if all(row["ok"] for row in rows) else 1


def save(file: Path, rows: Sequence[dict[str, Any]], whole: bool) -> None:
    """Renews what was run, whole parts or single rows; what the file says of others stays."""
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    run = {row["part"] if whole else (row["part"], row["name"]) for row in rows}
    kept = [row for row in known if not {row["part"], (row["part"], row["name"])} & run]
    together = [*kept, *({"machine": machine(), **row} for row in rows)]
    together.sort(key=lambda row: PARTS.index(row["part"]))
    file.write_text("\n".join(map(json.dumps, together)) + "\n")


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many of each verdict, and what should not be."""
    lines = []
    for part in dict.fromkeys(row["part"] for row in rows):
        counts = Counter(row["verdict"] for row in rows if row["part"] == part)
        told = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        lines.append(f"{part}: {told}")
    bad = [f"{row['part']} {row['name']}: {row['verdict']}" for row in rows if not row["ok"]]
    return "\n".join([*lines, *(f"NOT AS IT SHOULD BE: {one}" for one in bad)])


def examined(
    step: Callable[[], object],
    words: Sequence[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> Comparison:
    """Up to the end of the accuracy check, without any times."""
    several = isinstance(optimizer, (list, tuple))
    optimizers = list(optimizer) if several else [optimizer] if optimizer is not None else []
    bench = Benchmark(
        step_of(step, model, optimizers), [variant(one) for one in ("baseline", *words)], ENOUGH_S
    )
    run = bench.run()
    for progress in run:
        if progress.text.startswith("memory of"):
            break
    run.close()
    return bench.result()


def word(record: Record) -> str:
    if record.failure:
        return "failed"
    return record.accuracy.verdict if record.accuracy else "not reached"


def planted(chosen: Chosen) -> Iterator[dict[str, Any]]:
    """Each kind of wrong; it must not be `exact` or `rounding`."""
    for one in (*KINDS, *BESIDE, *PACKED, *ROWS, *COARSE, *STOCHASTIC, *LATE, *WHOLE, *LEFT):
        if chosen(f"{one.group}: {one.name}"):
            yield {**judged(one), "name": f"{one.group}: {one.name}"}


def judged(one: Planted) -> dict[str, Any]:
    """The verdict on one planted fault."""
    torch.manual_seed(1)
    step, model, optimizer, plan = one.make()
    if one in LATE:
        bench = Benchmark(step_of(step, model, optimizer),
                          [variant(name) for name in ("baseline", plan)], 3.0)  # fmt: skip
        for _ in bench.run():
            pass
        found = bench.result()
    else:
        found = examined(step, [plan], model, optimizer)
    record = found.records[1]
    verdict = word(record)
    reason = record.accuracy.reason if record.accuracy else record.failure or ""
    return {"verdict": verdict, "reason": reason, "ok": verdict in ("wrong", "not checked")}


def honest(words: Sequence[str], chosen: Chosen) -> Iterator[dict[str, Any]]:
    """Each net in training and in evaluation, under each variant that its plan knows."""
    for name in filter(chosen, NAMES):
        for training in (True, False):
            model, forward, loss = net(name)
            model.train(training)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            step = training_step(model, forward, loss, optimizer)
            if not training:
                step = inference(forward)
            found = examined(step, words, model, optimizer)
            mode = "training" if training else "inference"
            yield from accused(found, f"{name}, {mode}")
    nets = {**BESIDE_HONEST, **PACKED_HONEST, **ROWS_HONEST}
    for name in filter(chosen, nets):
        torch.manual_seed(1)
        step, model, optimizer, _ = nets[name]()
        yield from accused(examined(step, words, model, optimizer), name)


def accused(found: Comparison, name: str) -> Iterator[dict[str, Any]]:
    """A row for each variant that is tried here: none is wrong."""
    for record in found.records[1:]:
        verdict = word(record)
        if verdict == "failed" or record.same_as_baseline:
            continue  # a plan that is declined here
        reason = record.accuracy.reason if record.accuracy else ""
        yield {
            "name": f"{name}, {record.name}",
            "verdict": verdict,
            "reason": reason,
            "ok": verdict not in ("wrong", "not reached"),
        }


OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.AdamW(p, 1e-3),
    lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    lambda p: torch.optim.RMSprop(p, 1e-3),
    lambda p: torch.optim.NAdam(p, 1e-3),
    lambda p: torch.optim.Adafactor(p, 1e-2),
    lambda p: torch.optim.Adagrad(p, 1e-2),
)


def amplifying(chosen: Chosen) -> Iterator[dict[str, Any]]:
    """Nets that amplify rounding, each from a few seeds and with another optimizer."""
    for number, (name, make) in enumerate(nets()):
        if not chosen(name):
            continue
        model, forward, loss = make()
        model.train()
        optimizer = OPTIMIZERS[number % len(OPTIMIZERS)](model.parameters())
        step = training_step(model, forward, loss, optimizer)
        words = ("bf16", "fp16", "tf32:medium", "channels_last", "fused_optimizer")
        yield from accused(examined(step, words, model, optimizer), name)


def training_step(
    model: torch.nn.Module, forward: Callable[[], Any], loss: Callable[[Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> Callable[[], None]:  # fmt: skip
    def step() -> None:
        optimizer.zero_grad()
        loss(forward()).backward()
        optimizer.step()

    return step


def inference(forward: Callable[[], Any]) -> Callable[[], Any]:
    def step() -> Any:
        with torch.no_grad():
            return forward()

    return step


def again(chosen: Chosen) -> Iterator[dict[str, Any]]:
    """Stochastic nets against themselves, and in bf16: nothing is wrong with them."""
    for one in STOCHASTIC:
        if not chosen(one.name):
            continue
        for plan in ("sdpa:math", "bf16", "channels_last"):
            torch.manual_seed(1)
            step, model, optimizer, _ = one.honest()
            record = examined(step, [plan], model, optimizer).records[1]
            if record.same_as_baseline or record.failure:
                continue
            verdict = word(record)
            reason = record.accuracy.reason if record.accuracy else ""
            ok = verdict != "wrong"
            yield {"name": f"{one.name}, {plan}", "verdict": verdict, "reason": reason, "ok": ok}


if __name__ == "__main__":
    sys.exit(main())
