"""What an earlier engine has found is told apart: listed and shown, never used or compared."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import pytest
from torch import nn

from speedkit_jupyter import Facts, Hardware, plan, tuned
from speedkit_jupyter.report.tuning_report import tuned_list
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.search import learning
from speedkit_jupyter.support import database


def learned(model: nn.Module) -> learning.Task:
    """A plan as a search of now keeps it."""
    task = learning.Task("Linear", ("4x8 float32",))
    where = learning.setting([model], Hardware.current())
    values = {"threads": 1}
    made, gain = plan(facts=Facts.read(model)), Ratio(1.25, 1.2, 1.31, 50)
    learning.store(where, task, made, values, "threads:1", gain)
    return task


def as_found_by(engine: Any) -> None:
    """Everything in the store, as another engine would have left it; None: before it had one."""
    with sqlite3.connect(database.folder() / "speedkit.sqlite") as connection:
        for number, text in connection.execute("SELECT id, value FROM entries").fetchall():
            row = {k: v for k, v in json.loads(text).items() if k != "engine"}
            row |= {} if engine is None else {"engine": engine}
            connection.execute(
                "UPDATE entries SET value = ? WHERE id = ?", (json.dumps(row), number)
            )
    connection.close()


EARLIER = [None, 1, "0.1.0", 99]


@pytest.mark.parametrize("engine", EARLIER)
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
