"""What is sent arrives as it was: tensors, views, functions of a namespace."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from speedkit_jupyter.extras.processes.launching import names_of
from speedkit_jupyter.extras.processes.packing import State, pack, put, state_of, unpack

pytest.importorskip("cloudpickle")


def sent(value, is_here=True, there=None):
    parcel = pack(value, {}, is_here)
    try:
        return unpack(parcel, {} if there is None else there)
    finally:
        parcel.close()


@pytest.mark.parametrize("is_here", [True, False])
def test_tensors_arrive_with_their_strides_and_what_they_share(is_here):
    base = torch.arange(12.0).view(3, 4)
    net = nn.Linear(4, 4)
    tied = nn.Sequential(net, nn.Linear(4, 4))
    tied[1].weight = net.weight
    empty, view, whole, model = sent((torch.empty(0, 3), base.t()[1:], base, tied), is_here)
    assert empty.shape == (0, 3)
    assert torch.equal(view, base.t()[1:])
    assert view.stride() == base.t()[1:].stride()
    whole.zero_()
    assert not view.any()
    assert base.any()
    assert model[0].weight is model[1].weight
    assert model[0].weight.requires_grad


def test_an_optimizer_arrives_with_the_parameters_of_its_model():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    net, adam = sent((model, optimizer))
    assert adam.param_groups[0]["params"][0] is net.weight
    assert torch.equal(adam.state[net.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_nothing_stays_open_once_a_parcel_is_closed():
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc") else 0
    sent(torch.ones(100))
    assert (len(os.listdir("/proc/self/fd")) if before else 0) <= before  # others' may be closed


def test_results_are_written_into_the_objects_that_exist():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    weight, listed = model.weight, [1]
    assert put(model, state_of(other)) is model
    assert model.weight is weight
    assert torch.equal(weight, other.weight)
    assert put(listed, [2, 3]) is listed
    assert listed == [2, 3]
    assert put(1, 2) == 2


def test_a_state_that_does_not_fit_is_torchs_own_error():
    with pytest.raises(RuntimeError, match="size mismatch"):
        put(nn.Linear(2, 2), State(nn.Linear(3, 3).state_dict()))


def test_the_names_of_a_cell_are_those_that_it_and_its_functions_read():
    read, bound = names_of("import os\ndef f(a):\n    return a + b\nc = f(d)\ne += 1\n")
    assert {"b", "d", "e", "f"} <= set(read)
    assert "a" not in read
    assert bound == {"os", "f", "c", "e"}
