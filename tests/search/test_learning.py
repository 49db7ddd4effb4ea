"""Learned plans are kept, found for the same setting, task and engine, and dropped if they fail."""

import json
import sqlite3
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, apply_speedups, plan, tune, tuned
from speedkit_jupyter.notebook.namespace import proven_config
from speedkit_jupyter.report.tuning_report import tuned_list
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.pool import pooled
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.search import learning
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.step.variants import Variant
from speedkit_jupyter.support import database

pytestmark = [pytest.mark.usefixtures("trusted"), pytest.mark.long]

LATE = 0.02  # seconds of a slow step


@pytest.fixture
def made(work) -> Callable[..., tuple[nn.Module, Any, Callable[[], None]]]:
    """Return a function that makes a network, an optimizer, and a step of `seconds(fused)`."""

    def make(width=8, batch=4, seconds=lambda fused: LATE / 4 if fused else LATE):
        return work(lambda on: seconds(on.fused), linear=width, batch=(batch,))

    return make


def identified(step: Callable[[], None]) -> tuple[str, learning.Task]:
    measured = step_of(step)
    with pooled(measured, 1) as pool:
        reader = learning.StepReader(measured, Hardware.current())
        deque(pool.baseline([Variant("baseline")], Budget(10.0), reader.watching), maxlen=0)
    seen = reader.facts(pool.runners["baseline"])
    return seen.setting, seen.task


def test_a_second_search_checks_what_the_first_has_learned(made):
    assert tune(made()[2], budget_s=4).winner.name == "fused_optimizer"
    _, optimizer, step = made()  # other objects, as after a restart
    second = tune(step, budget_s=4)
    assert second.learned is not None
    assert second.confirmed
    assert [one.title for one in second.stages] == ["checking the learned plan"]
    assert optimizer.param_groups[0]["fused"] is None
    assert "Learned before" in " ".join(repr(second).split())
    assert tune(step, budget_s=2, fresh=True).stages[0].title != "checking the learned plan"


def test_a_learned_plan_that_fails_its_check_is_dropped_and_the_search_begins_anew(made):
    tune(made()[2], budget_s=4)
    assert len(database.learned()) == 1
    _, _, slower = made(seconds=lambda fused: 2 * LATE if fused else LATE)
    tuning = tune(slower, budget_s=10)
    assert not tuning.helped
    assert [one.value["values"] for one in database.learned()] == [{}]
    assert tuning.notes[0] == "The learned plan fused_optimizer was dropped"
    assert len(tuning.stages) > 1


@pytest.mark.parametrize("at_most_s", [None, 1.0])
def test_a_plan_proven_here_alone_or_under_a_limit_applies_unlearned(made, monkeypatch, at_most_s):
    if at_most_s is None:
        gain = Ratio(1.19, 0.93, 1.52, 50)
        monkeypatch.setattr(Comparison, "in_any_process", lambda self, record: gain)
    network, optimizer, step = made()
    tuning = tune(step, budget_s=4, at_most_s=at_most_s)
    assert tuning.where == ("" if at_most_s else " in this process")
    assert tuned(network, optimizer) is None
    assert proven_config([network], [optimizer]) == tuning.config


@pytest.mark.parametrize(
    "other", [{"width": 9}, {"batch": 5}], ids=["another shape of the parameters", "another batch"]
)
def test_another_model_or_batch_finds_nothing(made, other):
    known = identified(made()[2])
    assert identified(made()[2]) == known
    assert identified(made(**other)[2]) != known


def test_the_setting_knows_structure_dtype_and_torch_but_no_values():
    hardware = Hardware.current()

    def of(*layers: nn.Module) -> str:
        return learning.setting([nn.Sequential(*layers)], hardware)

    torch.manual_seed(0)
    plain = of(nn.Linear(4, 4), nn.ReLU())
    torch.manual_seed(1)
    assert of(nn.Linear(4, 4), nn.ReLU()) == plain
    assert of(nn.Linear(4, 4), nn.GELU()) != plain
    assert of(nn.Linear(4, 4).double(), nn.ReLU()) != plain
    assert of(nn.Linear(4, 4, bias=False), nn.ReLU()) != plain
    other = hardware.model_copy(update={"torch": "2.99.0"})
    assert learning.setting([nn.Sequential(nn.Linear(4, 4), nn.ReLU())], other) != plain


@pytest.mark.parametrize(
    ("shapes", "read"),
    [([(4, 8), (4, 6)], "4x* float32"), ([(4, 8), (3, 8)], "4x8 float32"),
     ([(4, 8), (4, 8, 8)], "4x8 float32"), ([(4, 8, 6), (2, 9, 6)], "4x*x6 float32")],
)  # fmt: skip
def test_lengths_that_vary_are_read_as_any_and_numbers_of_samples_are_not(shapes, read):
    model, batches = nn.ReLU(), [torch.rand(shape) for shape in shapes]
    model.weight = nn.Parameter(torch.rand(1))

    def step():
        return [model(batch) for batch in batches]

    assert identified(step)[1].inputs == (read,)


def test_what_was_learned_applies_by_itself_with_number_and_day_as_its_reason(made):
    tune(made()[2], budget_s=4)
    network, optimizer, _ = made()
    _, context = apply_speedups(network, tuned(network, optimizer), optimizer=optimizer)
    with context:
        decision = context.plan["fused_optimizer"]
        assert decision.active
        assert decision.source == "measured"
        assert "measured: fused_optimizer" in decision.reason
        assert "4x8 float32" in decision.reason
    assert tuned(nn.Linear(3, 3)) is None


def test_that_nothing_helped_is_learned_so_that_no_rule_turns_it_on_and_a_search_goes_on(made):
    tune(made(seconds=lambda fused: 2 * LATE if fused else LATE)[2], budget_s=4)
    network, optimizer, step = made()
    _, context = apply_speedups(network, tuned(network, optimizer), optimizer=optimizer)
    with context:
        assert not any(decision.active for decision in context.plan)
        assert "nothing was proven faster" in context.plan["fused_optimizer"].reason
        assert context.plan["fused_optimizer"].source == "measured"
        assert context.plan["tf32"].source == "auto", "what no rule turns on was not measured"
    assert tuned(network) is None, "it says nothing about inference"
    again = tune(step, budget_s=4)
    assert again.learned is None
    assert again.winner.name == "fused_optimizer"
    assert len(database.learned()) == 1


def test_a_store_that_cannot_be_written_costs_the_memory_alone(made, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    _, _, step = made()
    monkeypatch.setenv("SPEEDKIT_DATA", str(tmp_path / "file" / "data"))
    tuning = tune(step, budget_s=4)
    assert tuning.helped
    assert any("could not be stored" in note for note in tuning.notes)


def learned(model: nn.Module) -> learning.Task:
    """Store a plan as a search by this version does, and return its task."""
    task, gain = learning.Task("Linear", ("4x8 float32",)), Ratio(1.25, 1.2, 1.31, 50)
    where, made = learning.setting([model], Hardware.current()), plan(facts=Facts.read(model))
    learning.store(where, task, made, {"threads": 1}, "threads:1", gain)
    return task


def as_found_by(engine: Any) -> None:
    """Rewrite the store's rows as if this engine had stored them; None removes the engine."""
    with sqlite3.connect(database.folder() / "speedkit.sqlite") as connection:
        for number, text in connection.execute("SELECT id, value FROM entries").fetchall():
            row = {k: v for k, v in json.loads(text).items() if k != "engine"}
            row |= {} if engine is None else {"engine": engine}
            new = json.dumps(row), number
            connection.execute("UPDATE entries SET value = ? WHERE id = ?", new)
    connection.close()


@pytest.mark.parametrize("engine", [None, 1, "0.1.0", 99])
def test_a_plan_of_an_earlier_version_is_not_used(engine):
    model = nn.Linear(8, 2)
    task = learned(model)
    assert tuned(model) is not None
    as_found_by(engine)
    assert tuned(model) is None
    assert learning.find(learning.setting([model], Hardware.current()), task) is None
    (kept,) = database.learned()
    assert "of an earlier version, not used" in " ".join(tuned_list([kept]).to_text().split())


@pytest.mark.parametrize("values", [{"warp": 9}, {"precision": "fp7"}, {"compile": {"to": 1}}])
def test_a_plan_with_an_option_of_another_version_is_not_used(values):
    model = nn.Linear(8, 2)
    task = learned(model)
    (kept,) = database.learned()
    database.learn(kept.name, kept.task, {**kept.value, "values": values})
    assert tuned(model) is None
    assert learning.find(kept.name, task) is None
    shown = " ".join(tuned_list(database.learned()).to_text().split())
    assert "of another version, not used" in shown
