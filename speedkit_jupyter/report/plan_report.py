"""Reports about plans: what was decided and why, what changed, what is left on the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.codegen.training_loop import Words, loop
from speedkit_jupyter.machines.flags import Change
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan, describe
from speedkit_jupyter.plans.reaching import to_write, trained_by
from speedkit_jupyter.report.attention_table import evidence
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Code, Hinted, Row, Section, Table, Tone
from speedkit_jupyter.report.units import size, word
from speedkit_jupyter.session import Found
from speedkit_jupyter.support.words import count

if TYPE_CHECKING:
    import torch

# So many names in a line.
MOST_NAMES = 12
SOURCES = {"auto": "auto", "user": "you", "env": "environment", "measured": "measured"}


def hardware_line(hardware: Hardware, device: str = "cpu") -> str:
    """The machine in one line."""
    parts = [describe(hardware, device)]
    gpu = hardware.accelerator(device)
    memory = hardware.cpu.memory_bytes if gpu is None else gpu.memory_bytes
    if memory:
        parts.append(size(memory))
    names = [accelerator.name for accelerator in hardware.accelerators if gpu is None]
    parts += [f"{name} idle" for name in names]
    return ", ".join([*parts, f"torch {hardware.torch}", f"Python {hardware.python}"])


def plan_report(plan: Plan, name: str = "model") -> Document:
    """What would be decided for a model; nothing is applied."""
    return Document(
        f"Plan for {name} on {hardware_line(plan.hardware, plan.facts.device)}",
        (Section(decisions(plan)), *worth_measuring(plan), *evidence(plan)),
        {"plan": plan.to_dict(), "hardware": plan.hardware.model_dump(mode="json")},
    )


def context_report(
    context: SpeedContext, name: str = "model", ctx: str = "ctx", found: Found | None = None
) -> Document:
    """Each decision with its reason, and the flags before and after."""
    plan, changes = context.plan, context.changes()
    sections = [
        Section(decisions(plan, context.restored)),
        *worth_measuring(plan, found),
        *evidence(plan),
        Section(changed(changes), "Before and after"),
    ]
    sections += _notes(context, ctx)
    return Document(f"{_state(context, name)} on {_machine(plan)}", tuple(sections), _data(context))


def applied_report(context: SpeedContext, words: Words) -> Document:
    """Return what to write in the user's loop, what applying did, and the loop to paste."""
    plan = context.plan
    shown = [d for d in plan if not _is_plainly_as_is(d)]
    sections = [Section(decisions(shown))] if shown else []
    if plan.config.why_left:
        again = "`--rules` applies what the rules say, `%%speedbench --tune` searches again."
        sections.append(Section(f"{plan.config.why_left.capitalize()}. {again}"))
    else:
        sections += _as_is(plan)
    sections += worth_measuring(plan)
    sections.append(Section(changed(context.changes()), "Before and after"))
    sections += _notes(context, words.ctx)
    title = "Your predictions" if plan["inference"].active else "Your training loop"
    if library := trained_by(context.model, words.names):
        sections.append(Section(_of_a_trainer(library, words.model), title))
    elif lines := loop(context, words):
        sections.append(Section(Code(lines), title))
    else:
        sections.append(Section("Nothing to edit: it runs under the plan as it is.", title))
    state = f"{_state(context, words.model)} on {_machine(plan)}"
    write = to_write(context, words.ctx, words.names)
    return Document(f"{write} {state}".lstrip(), tuple(sections), _data(context))


def _of_a_trainer(library: str, name: str) -> str:
    """Return what there is to say about a loop that is a library's."""
    told = f"{library} runs its own loop."
    if library == "transformers":
        return f"{told} `%speedkit code {name} --as transformers` writes the plan as arguments."
    return told


def status_report(
    hardware: Hardware,
    contexts: Sequence[tuple[str, SpeedContext]],
    planned: Iterable[tuple[str, Plan, Found | None]] = (),
    variable_of: Callable[[SpeedContext], str] = lambda context: "ctx",
    found_for: Callable[[torch.nn.Module], Found | None] = lambda model: None,
) -> Document:
    """Hardware, what is on, and what is left on the table."""
    sections = []
    for name, context in contexts:
        sections.append(Section(_state(context, name) + "."))
        sections += _notes(context, variable_of(context))
        idle = [d for d in context.plan if d.declined and not d.active]
        if idle:
            sections.append(Section(_reasons(idle), "Declined"))
        offer = worth_measuring(context.plan, found_for(context.model))
        sections += [*_as_is(context.plan), *offer]
    for name, plan, found in planned:
        shown = [d for d in plan if not _is_plainly_as_is(d)]
        body = decisions(shown) if shown else "Nothing here is known to help."
        sections.append(Section(body, f"`%speedkit apply {name}` would do this"))
        sections += [*_as_is(plan), *worth_measuring(plan, found)]
    if not sections:
        sections.append(
            Section(
                "No model here yet. Define one, then `%speedkit apply model`; "
                "`%speedkit help` lists the rest."
            )
        )
    return Document(
        f"SpeedKit · {hardware_line(hardware, _device(contexts))}",
        tuple(sections),
        {
            "hardware": hardware.model_dump(mode="json"),
            "applied": {name: _data(context) for name, context in contexts},
        },
    )


def decisions(plan: Iterable[Decision], restored: bool = False) -> Table:
    """One row per optimization: state, value, who decided, and why."""
    rows = []
    for decision in plan:
        state, tone = outcome(decision, restored)
        rows.append(
            Row(
                (
                    Hinted(decision.name, named(decision.name).summary),
                    state,
                    word(decision.value),
                    SOURCES[decision.source],
                    decision.reason,
                ),
                tone,
            )
        )
    return Table(("optimization", "state", "value", "by", "why"), tuple(rows))


def worth_measuring(plan: Plan, found: Found | None = None) -> list[Section]:
    """Return a line for all that may pay here and waits until it is measured, if there is any.

    Where tuning has measured it, the line says what was found in place of the plan.
    """
    if found is not None:
        return _found(plan, found)
    words = [k if v is True else f"{k} {word(v)}" for k, v in plan.worth_measuring.items()]
    offer = f"Worth measuring here: {', '.join(words)}: `%%speedbench --tune`"
    return [Section(offer)] if words else []


def _found(plan: Plan, found: Found) -> list[Section]:
    if found.config.to_dict() == plan.config.to_dict():
        return []  # each of its decisions says that it was measured
    if found.proof:
        return [Section(f"Tuned: {found.proof}. {found.line} puts it into force.")]
    rest = f" {found.line} takes this plan off." if plan.active_values() else ""
    return [Section(f"Tuned: nothing was proven faster than without a plan.{rest}")]


def _is_plainly_as_is(decision: Decision) -> bool:
    """Whether nothing is done, and nobody asked for anything."""
    return not decision.active and not decision.declined


def _as_is(plan: Plan) -> list[Section]:
    """A line for what nothing is done about; of a large catalog the first of them."""
    names = [d.name for d in plan if _is_plainly_as_is(d)]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    listed = f"{', '.join(names[:MOST_NAMES])}{more}"
    return [Section(f"As is: {listed}. `%speedkit report` has every reason.")] if names else []


def changed(changes: Sequence[Change]) -> Table | str:
    """Every flag and piece of state that differs."""
    if not changes:
        return "Every flag, the model and its optimizers are as they were."
    rows = tuple(Row((c.name, word(c.before), word(c.after))) for c in changes)
    return Table(("flag or state", "before", "after"), rows)


def outcome(decision: Decision, restored: bool = False) -> tuple[str, Tone]:
    """The state of a decision, with a sign before the word, and its tone."""
    if decision.active and restored:
        return "○ was on", "quiet"
    if decision.active:
        return ("◐ replaced", "plain") if decision.declined else ("● on", "good")
    return ("✕ declined", "bad") if decision.declined else ("○ as is", "quiet")


def _reasons(idle: Sequence[Decision]) -> Table:
    return Table(("optimization", "why"), tuple(Row((d.name, d.reason)) for d in idle))


def _state(context: SpeedContext, name: str) -> str:
    if context.restored:
        return f"Restored: {name}"
    on = [f"{d.name} {word(d.value)}" if d.value is not True else d.name for d in _active(context)]
    words = ", ".join(on) if on else "nothing, since nothing here is known to help"
    return f"{'Applied to' if context.active else 'Waiting for'} {name}: {words}"


def _notes(context: SpeedContext, ctx: str) -> list[Section]:
    lines = [f"{name}: {note}" for name, note in context.notes.items()]
    precision = context.plan["precision"]
    if context.active and precision.active and not context.autocast_entered:
        where = f"no forward pass has run inside {ctx}.autocast() yet"
        lines.append(f"precision: {precision.value} waits: {where}")
    lines += [f"{flag}: you changed it meanwhile, so it was left alone" for flag in context.kept]
    return [Section("\n".join(lines), "Please note")] if lines else []


def _active(context: SpeedContext) -> list[Decision]:
    return [decision for decision in context.plan if decision.active]


def _machine(plan: Plan) -> str:
    parameters = count(plan.facts.parameters, "parameter")
    return f"{hardware_line(plan.hardware, plan.facts.device)} ({parameters})"


def _device(contexts: Sequence[tuple[str, SpeedContext]]) -> str:
    return contexts[0][1].plan.facts.device if contexts else "cpu"


def _data(context: SpeedContext) -> dict[str, Any]:
    return {
        "plan": context.plan.to_dict(),
        "hardware": context.plan.hardware.model_dump(mode="json"),
        "changes": [
            {"name": c.name, "before": c.before, "after": c.after} for c in context.changes()
        ],
        "notes": dict(context.notes),
        "kept": list(context.kept),
        "autocast_entered": context.autocast_entered,
        "active": context.active,
    }
