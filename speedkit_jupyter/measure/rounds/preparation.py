"""A variant's plan, prepared for its runner."""

from __future__ import annotations

from contextlib import nullcontext

from speedkit_jupyter.measure.checks import memory
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.subject.variants import CURRENT, Variant, changes_some, config_of
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.plans.planning import together


def prepared(step: Step, variant: Variant, record: Record, walk: Walk, is_baseline: bool) -> Runner:
    """The variant's runner; what its plan holds is written into the record."""
    configs = [config_of(variant, model) for model in step.models]
    contexts = [
        prepare(model, config, step.holders(model), step.made)
        for model, config in zip(step.models, configs, strict=True)
    ]
    plan = together([context.plan for context in contexts])
    record.plan = plan.active_values()
    record.applied = {d.name: d.value for d in plan if d.active}
    for context in contexts:
        record.changes_model |= context.plan.changes_model()
    record.declines = {d.name: d.reason for d in plan if d.declined}
    is_planned = any(config is not None for config in configs)
    if is_planned and not record.applied and not is_baseline:
        _nothing_to_measure(record)
    if of_some := changes_some(contexts, walk):
        record.notes["models"] = of_some
    return Runner(
        step,
        contexts,
        record,
        around=variant.around or nullcontext,
        is_guarded=not is_baseline,
        is_planned=is_planned,
        is_routed=variant.name != CURRENT,
    )


def keep_copies_where_they_fit(step: Step, copies: int) -> None:
    """Optimizer state that does not exist yet counts as the two tensors that Adam keeps."""
    model = step.models[0]
    device = next(model.parameters()).device if any(True for _ in model.parameters()) else None
    state = memory.size(memory.state_tensors(step.models, step.optimizers))
    parameters = memory.size([p for module in step.models for p in module.parameters()])
    size = max(state, 4 * parameters if step.optimizers else 0)
    step.off_device = device is not None and not memory.fits(copies * size, device)


def _nothing_to_measure(record: Record) -> None:
    """A plan that changes nothing is the baseline; a wish that was declined is no variant."""
    record.declined, record.same_as_baseline = bool(record.declines), not record.declines
    if record.declined:
        reasons = (f"{name} declined: {reason}" for name, reason in record.declines.items())
        record.failure = "; ".join(reasons)
