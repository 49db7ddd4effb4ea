"""Remedies are in force for a while, and gone after it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from steps_of_rules import Table
from torch import nn
from torch.distributions import Distribution
from torch.utils.data import DataLoader, TensorDataset

from speedkit_jupyter.advice import trials
from speedkit_jupyter.advice.opportunity import Subject


def test_anomaly_detection_and_deterministic_kernels_are_off_where_the_step_asks_for_them():
    with trials.anomaly_mode_off(Subject()), torch.autograd.set_detect_anomaly(True):
        assert not torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with trials.deterministic_off(Subject()):
            torch.use_deterministic_algorithms(True)
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_distributions_check_nothing_for_a_while():
    with trials.unchecked_distributions(Subject()):
        assert not torch.distributions.Normal(0.0, 1.0)._validate_args
    assert Distribution._validate_args


def test_sparse_tables_are_dense_again_after_the_trial():
    model = Table()
    with trials.sparse_tables(Subject([model])):
        model(torch.arange(8)).sum().backward()
        assert model.table.weight.grad.is_sparse
    assert not model.table.sparse


def test_adam_of_the_rows_that_were_asked_for_is_adam_of_all_where_none_was_stepped_before():
    def steps(tried: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        subject = Subject([model], [optimizer])
        with trials.sparse_tables(subject) if tried else contextlib.nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.tensor([3, 3, 7])).pow(2).sum().backward()
                optimizer.step()
        gradients = [one.grad.to_dense() for one in model.parameters()]
        return [*model.parameters(), *gradients, optimizer.state[model[0].weight]["exp_avg_sq"]]

    for tried, plain in zip(steps(True), steps(False), strict=True):
        torch.testing.assert_close(tried, plain)


def test_what_nobody_trains_requires_no_gradient_for_a_while():
    body, head = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    with trials.without_gradients(Subject([body, head], [optimizer])):
        assert [one.requires_grad for one in body.parameters()] == [False, False]
        assert all(one.requires_grad for one in head.parameters())
    assert all(one.requires_grad for one in body.parameters())


def test_a_loader_gives_the_batches_of_another_one_for_a_while():
    loader = DataLoader(TensorDataset(torch.arange(8)), 2, shuffle=True)
    torch.manual_seed(0)
    plain = [batch[0].tolist() for batch in loader]
    torch.manual_seed(0)
    with trials.replaced(0, trials.whole_batches, Subject(loaders=[loader])):
        assert [batch[0].tolist() for batch in loader] == plain


@pytest.mark.parametrize(("lasting", "is_tried"), [(None, True), (1, True), (0, False)])
def test_a_loader_that_the_step_makes_itself_can_t_be_replaced(lasting, is_tried):
    trial = trials.other_loader(lasting, 0, trials.whole_batches)
    assert (trial is not None) == is_tried
