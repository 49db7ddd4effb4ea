"""Remedies are in force for a while, and gone after it."""

from __future__ import annotations

import pytest
import torch
from steps_of_rules import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from speedkit_jupyter.extras.advise import trials
from speedkit_jupyter.extras.advise.advice import Subject
from speedkit_jupyter.extras.data.loader_settings import LoaderSettings


def test_anomaly_detection_is_off_where_the_step_asks_for_it():
    with trials.anomaly_mode_off(Subject()), torch.autograd.set_detect_anomaly(True):
        assert not torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()


def test_tables_and_what_nobody_trains_are_as_before_after_the_trial():
    model, head = Table(), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    subject = Subject([model, head], [optimizer])
    with trials.sparse_tables(subject):
        model(torch.arange(8)).sum().backward()
        assert model.table.weight.grad.is_sparse
    assert not model.table.sparse
    with trials.without_gradients(subject):
        assert not any(one.requires_grad for one in model.parameters())
        assert all(one.requires_grad for one in head.parameters())
    assert all(one.requires_grad for one in model.parameters())


@pytest.mark.parametrize("settings", [LoaderSettings(whole_batches=True), LoaderSettings(1, 2)])
def test_a_loader_gives_the_same_batches_with_other_settings_for_a_while(settings):
    loader = DataLoader(TensorDataset(torch.arange(8)), 2, shuffle=True)

    def drawn():
        torch.manual_seed(0)
        return [batch[0].tolist() for _ in range(2) for batch in loader]

    plain, trial = drawn(), trials.other_loader(1, 0, settings)
    with trial(Subject(loaders=[loader])):
        assert drawn() == plain
    # One that the step makes itself can't be replaced.
    assert trials.other_loader(0, 0, settings) is None
