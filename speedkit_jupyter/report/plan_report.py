"""Reports about plans and the catalog: what is decided and why, and what an entry does."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.codegen.training_loop import Words, loop
from speedkit_jupyter.machines.flags import Change
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.results.statistics import INTERVAL
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.facts.attention import Call, Measured, Timed
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan, describe
from speedkit_jupyter.plans.reaching import to_write, trained_by
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Code, Hinted, Row, Section, Table, Tone
from speedkit_jupyter.report.units import ratio, seconds, size, word
from speedkit_jupyter.session import Found
from speedkit_jupyter.support.words import count

if TYPE_CHECKING:
    import torch

# So many names in a line.
MOST_NAMES = 12
SOURCES = {"auto": "auto", "user": "you", "env": "environment", "measured": "measured"}
NO_MODEL = (
    "No model here yet. Define one, then `%speedkit apply model`; `%speedkit help` lists the rest."
)


def hardware_line(hardware: Hardware, device: str = "cpu") -> str:
    """Return the machine in one line."""
    gpu = hardware.accelerator(device)
    memory = hardware.cpu.memory_bytes if gpu is None else gpu.memory_bytes
    idle = [f"{one.name} idle" for one in hardware.accelerators if gpu is None]
    sizes = [size(memory)] if memory else []
    versions = [f"torch {hardware.torch}", f"Python {hardware.python}"]
    return ", ".join([describe(hardware, device), *sizes, *idle, *versions])


def spoken(values: Mapping[str, Any] | Iterable[Decision]) -> str:
    """Return what is on, or offered, in the words of options: `precision bf16, channels_last`."""
    if not isinstance(values, Mapping):
        values = {decision.name: decision.value for decision in values if decision.active}
    return ", ".join(k if v is True else f"{k} {word(v)}" for k, v in values.items())


def plan_report(plan: Plan, name: str = "model") -> Document:
    """Return what would be decided for a model; nothing is applied."""
    return Document(
        f"Plan for {name} on {hardware_line(plan.hardware, plan.facts.device)}",
        (Section(decisions(plan)), *worth_measuring(plan), *evidence(plan)),
        {"plan": plan.to_dict(), "hardware": plan.hardware.model_dump(mode="json")},
    )


def context_report(
    context: SpeedContext, name: str = "model", ctx: str = "ctx", found: Found | None = None
) -> Document:
    """Return each decision with its reason, and the flags before and after."""
    sections = (
        Section(decisions(context.plan, context.restored)),
        *worth_measuring(context.plan, found),
        *evidence(context.plan),
        Section(changed(context.changes()), "Before and after"),
        *_notes(context, ctx),
    )
    return Document(_headline(context, name), sections, _data(context))


def applied_report(context: SpeedContext, words: Words) -> Document:
    """Return what to write in the user's loop, what applying did, and the loop to paste."""
    plan = context.plan
    again = "`--rules` applies what the rules say, `%%speedbench --tune` searches again."
    left = plan.config.why_left
    sections = (
        *_of_interest(plan),
        *([Section(f"{left.capitalize()}. {again}")] if left else _as_is(plan)),
        *worth_measuring(plan),
        Section(changed(context.changes()), "Before and after"),
        *_notes(context, words.ctx),
        _loop(context, words),
    )
    write = to_write(context, words.ctx, words.names)
    headline = f"{write} {_headline(context, words.model)}".lstrip()
    return Document(headline, sections, _data(context))


def _loop(context: SpeedContext, words: Words) -> Section:
    """What to paste, or that there is nothing to edit."""
    title = "Your predictions" if context.plan["inference"].active else "Your training loop"
    if library := trained_by(context.model, words.names):
        more = f" `%speedkit code {words.model} --as transformers` writes the plan as arguments."
        told = f"{library} runs its own loop."
        return Section(f"{told}{more if library == 'transformers' else ''}", title)
    if lines := loop(context, words):
        return Section(Code(lines), title)
    return Section("Nothing to edit: it runs under the plan as it is.", title)


def status_report(
    hardware: Hardware,
    contexts: Sequence[tuple[str, SpeedContext]],
    planned: Iterable[tuple[str, Plan, Found | None]] = (),
    variable_of: Callable[[SpeedContext], str] = lambda context: "ctx",
    found_for: Callable[[torch.nn.Module], Found | None] = lambda model: None,
) -> Document:
    """Return hardware, what is on, and what is left on the table."""
    sections: list[Section] = []
    for name, context in contexts:
        idle = [Row((d.name, d.reason)) for d in context.plan if d.declined and not d.active]
        declined = Section(Table(("optimization", "why"), tuple(idle)), "Declined")
        sections += [Section(f"{_state(context, name)}."), *_notes(context, variable_of(context))]
        sections += [declined] * bool(idle) + _as_is(context.plan)
        sections += worth_measuring(context.plan, found_for(context.model))
    for name, plan, found in planned:
        shown = _of_interest(plan) or [Section("Nothing here is known to help.")]
        sections.append(replace(shown[0], title=f"`%speedkit apply {name}` would do this"))
        sections += [*_as_is(plan), *worth_measuring(plan, found)]
    device = contexts[0][1].plan.facts.device if contexts else "cpu"
    return Document(
        f"SpeedKit · {hardware_line(hardware, device)}",
        tuple(sections or [Section(NO_MODEL)]),
        {
            "hardware": hardware.model_dump(mode="json"),
            "applied": {name: _data(context) for name, context in contexts},
        },
    )


def decisions(plan: Iterable[Decision], restored: bool = False) -> Table:
    """Return one row per optimization: state, value, who decided, and why."""
    rows = []
    for one in plan:
        state, tone = outcome(one, restored)
        cells = (called(one), state, word(one.value), SOURCES[one.source], one.reason)
        rows.append(Row(cells, tone))
    return Table(("optimization", "state", "value", "by", "why"), tuple(rows))


def called(decision: Decision) -> Hinted:
    """Return the name of an optimization, with what it does as a tooltip."""
    return Hinted(decision.name, named(decision.name).summary)


def worth_measuring(plan: Plan, found: Found | None = None) -> list[Section]:
    """Return a line for all that may pay here and waits until it is measured, if there is any.

    Where tuning has measured it, the line says what was found in place of the plan.
    """
    if found is None:
        offer = f"Worth measuring here: {spoken(plan.worth_measuring)}: `%%speedbench --tune`"
        return [Section(offer)] if plan.worth_measuring else []
    if found.config.to_dict() == plan.config.to_dict():
        return []  # each of its decisions says that it was measured
    if found.proof:
        return [Section(f"Tuned: {found.proof}. {found.line} puts it into force.")]
    rest = f" {found.line} takes this plan off." if plan.active_values() else ""
    return [Section(f"Tuned: nothing was proven faster than without a plan.{rest}")]


def _of_interest(plan: Plan) -> list[Section]:
    """The decisions that do something, or that somebody has asked for."""
    shown = [decision for decision in plan if decision.active or decision.declined]
    return [Section(decisions(shown))] if shown else []


def _as_is(plan: Plan) -> list[Section]:
    """A line for what nothing is done about; of a large catalog the first of them."""
    names = [decision.name for decision in plan if not (decision.active or decision.declined)]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    listed = f"{', '.join(names[:MOST_NAMES])}{more}"
    return [Section(f"As is: {listed}. `%speedkit report` has every reason.")] if names else []


def changed(changes: Sequence[Change]) -> Table | str:
    """Return every flag and piece of state that differs."""
    if not changes:
        return "Every flag, the model and its optimizers are as they were."
    rows = tuple(Row((c.name, word(c.before), word(c.after))) for c in changes)
    return Table(("flag or state", "before", "after"), rows)


def outcome(decision: Decision, restored: bool = False) -> tuple[str, Tone]:
    """Return the state of a decision, with a sign before the word, and its tone."""
    if decision.active and restored:
        return "○ was on", "quiet"
    if decision.active:
        return ("◐ replaced", "plain") if decision.declined else ("● on", "good")
    return ("✕ declined", "bad") if decision.declined else ("○ as is", "quiet")


def _headline(context: SpeedContext, name: str) -> str:
    plan = context.plan
    machine = hardware_line(plan.hardware, plan.facts.device)
    parameters = count(plan.facts.parameters, "parameter")
    return f"{_state(context, name)} on {machine} ({parameters})"


def _state(context: SpeedContext, name: str) -> str:
    if context.restored:
        return f"Restored: {name}"
    words = spoken(context.plan) or "nothing, since nothing here is known to help"
    return f"{'Applied to' if context.active else 'Waiting for'} {name}: {words}"


def _notes(context: SpeedContext, ctx: str) -> list[Section]:
    lines = [f"{name}: {note}" for name, note in context.notes.items()]
    precision = context.plan["precision"]
    if context.active and precision.active and not context.autocast_entered:
        where = f"no forward pass has run inside {ctx}.autocast() yet"
        lines.append(f"precision: {precision.value} waits: {where}")
    lines += [f"{flag}: you changed it meanwhile, so it was left alone" for flag in context.kept]
    return [Section("\n".join(lines), "Please note")] if lines else []


def _data(context: SpeedContext) -> dict[str, Any]:
    changes = context.changes()
    return {
        "plan": context.plan.to_dict(),
        "hardware": context.plan.hardware.model_dump(mode="json"),
        "changes": [{"name": c.name, "before": c.before, "after": c.after} for c in changes],
        "notes": dict(context.notes),
        "kept": list(context.kept),
        "autocast_entered": context.autocast_entered,
        "active": context.active,
    }


TITLE = "Attention kernels on the calls of the step"
NOTE = (
    "Seconds of one call, with its backward pass where it trains; over torch's own choice, in "
    "shuffled rounds; error against the math kernel in float64."
)


def evidence(decisions: Iterable[Decision]) -> list[Section]:
    """Return the tables behind the numbers of a plan; none where nothing was measured."""
    rows = [row for decision in decisions for row in decision.evidence]
    return [Section(attention_table(rows), TITLE), Section(NOTE)] if rows else []


def attention_table(rows: Sequence[Measured]) -> Table:
    """Return a row for each kernel of each kind of call."""
    columns = ("call", "a step", "kernel", "time", "speed-up", INTERVAL, "error")
    every = [
        _attention_row(row, timed, first=number == 0)
        for row in rows
        for number, timed in enumerate(
            sorted(row.kernels, key=lambda timed: timed.kernel != row.own)
        )
    ]
    return Table(columns, tuple(every), ("a step", "time", "speed-up", INTERVAL, "error"),
                 wraps=("call",))  # fmt: skip


def _attention_row(row: Measured, timed: Timed, first: bool) -> Row:
    is_own = timed.kernel == row.own
    known = not is_own and not math.isinf(timed.high)
    return Row(
        (
            describe_call(row.call, row.engine) if first else "",
            f"{row.calls:,}×" if first else "",
            f"{timed.kernel} (torch's own choice)" if is_own else timed.kernel,
            seconds(timed.seconds),
            "–" if is_own else ratio(timed.speedup),
            f"{ratio(timed.low)} to {ratio(timed.high)}" if known else "–",
            "–" if timed.error is None else f"{timed.error:.1g}",
        ),
        "good" if not is_own and timed.low > 1 else "bad" if timed.high < 1 else "plain",
    )


def describe_call(call: Call, engine: str = "") -> str:
    """Return `8×12×128×64 float32, causal, training`."""
    sizes = {"query": call.query, "key": call.key, "value": call.value}
    if call.query == call.key == call.value:
        text = _sizes(call.query)
    elif call.key == call.value:
        text = f"{_sizes(call.query)} by {_sizes(call.key)}"
    else:
        text = ", ".join(f"{name} {_sizes(size)}" for name, size in sizes.items())
    options = [
        "causal" if call.is_causal else "",
        f"mask {call.mask}" if call.mask else "",
        f"dropout {call.dropout:g}" if call.dropout else "",
        f"scale {call.scale:.3g}" if call.scale is not None else "",
        "grouped heads" if call.enable_gqa else "",
        "training" if call.trains else "inference",
        f"products by {engine}" if engine else "",
    ]
    return ", ".join([f"{text} {call.dtype}", *filter(None, options)])


def _sizes(size: Sequence[int]) -> str:
    return "×".join(map(str, size))


def catalog_report(plan: Plan, name: str) -> Document:
    """Return every entry: what it does, and what would be on, as is or declined here."""
    rows = []
    for one in plan:
        state, tone = outcome(one)
        cells = (one.name, named(one.name).summary, state, word(one.value), one.reason)
        rows.append(Row(cells, tone))
    columns = ("optimization", "what it does", "state", "value", "why")
    table = Table(columns, tuple(rows), wraps=("what it does",), least_last=38)
    more = Section("`%speedkit explain NAME` says where one helps, its risk, and how it is undone.")
    return Document(
        f"The catalog for {name} on {hardware_line(plan.hardware, plan.facts.device)}",
        (Section(table), *worth_measuring(plan), more),
        {"plan": plan.to_dict()},
    )


def explain_report(optimization: Optimization, decision: Decision, name: str) -> Document:
    """Return one entry, and what is decided about it for this model."""
    state, _ = outcome(decision)
    about = {
        "what": " ".join(inspect.cleandoc(optimization.__doc__ or "").split()),
        "helps": optimization.helps,
        "risk": optimization.risk,
        "numbers": optimization.effect.value,
        "undone": optimization.undone,
        "values": _values(optimization),
        "here": f"{name} {state.partition(' ')[2]}: {word(decision.value)}; {decision.reason}",
        "more": optimization.page,
    }
    table = Table(("", ""), tuple(Row(row) for row in about.items()))
    return Document(
        f"{optimization.name}: {optimization.summary}",
        (Section(table), *evidence([decision])),
        about
        | {"name": optimization.name, "effect": optimization.effect.value}
        | ({"evidence": [row.to_dict() for row in decision.evidence]} if decision.evidence else {}),
    )


def _values(optimization: Optimization) -> str:
    """What its option takes; of several fields the first one's values, then the others by name."""
    first, *others = [(name, info.description) for name, info in optimization.fields.items()] or [
        ("", ", ".join(optimization.words) or optimization.free)
    ]
    return "; ".join([str(first[1]), *(f"{name}: {values}" for name, values in others)])
