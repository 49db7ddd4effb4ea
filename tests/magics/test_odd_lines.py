"""Lines that were accepted in silence, or answered by what is no answer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import StepError, benchmark, tune, verify


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantized_model_is_said_to_have_no_parameters(shell):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    quantized = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    x = torch.rand(2, 4)
    for function in (benchmark, tune, verify):
        with pytest.raises(StepError, match="its weights are quantized"):
            function(lambda: quantized(x))
    shell.names["quantized"] = quantized
    error = shell.fails("%%speedbench --compare baseline,bf16\nquantized(x)")
    assert "its weights are quantized" in str(error)
