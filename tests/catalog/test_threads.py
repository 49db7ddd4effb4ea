"""Test `threads`, the number of intra-op threads."""

import pytest
import torch

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups
from speedkit_jupyter.catalog import named
from speedkit_jupyter.machines.hardware import Cpu, Hardware


def test_a_number_is_obeyed_and_put_back(two_threads):
    found = torch.get_num_threads()
    kept = torch.nn.Linear(2, 2)
    with apply_speedups(kept, SpeedConfig(threads=found + 1))[1] as context:
        assert torch.get_num_threads() == found + 1
        assert "more than the" in context.plan["threads"].reason
    assert torch.get_num_threads() == found


@pytest.mark.parametrize(
    ("step_s", "parameters", "cores", "offered"), [(0.002, 10_000_000, 4, (4, 2, 1)),
    (0.05, 1_000, 4, (4, 2, 1)),  # long because of many tiny operations
    (0.05, 10_000_000, 4, (4, 2)), (0.05, 10_000_000, 2, (2,)), (0.05, 10_000_000, 1, (1,))],
)  # fmt: skip
def test_one_thread_is_not_tried_for_long_steps_of_large_models(step_s, parameters, cores, offered):
    hardware = Hardware(cpu=Cpu(usable_cores=cores))
    facts = Facts(step_s=step_s, parameters=parameters)
    assert named("threads").candidates(hardware, facts) == offered


def test_no_number_of_threads_is_tried_for_a_model_on_a_gpu():
    facts = Facts(device="cuda:0", step_s=0.002)
    assert named("threads").candidates(Hardware(cpu=Cpu(usable_cores=4)), facts) == ()
