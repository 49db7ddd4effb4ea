"""Generated code that compiles blocks, or by another backend, in fresh processes of every form."""

from __future__ import annotations

from pathlib import Path

import fresh
import pytest
import torch

from speedkit_jupyter import Facts, SpeedConfig, code, plan

pytestmark = [pytest.mark.slow, pytest.mark.compile]
MODEL = """
import sys, torch
from torch import nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        return x + torch.relu(self.layer(x))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.Sequential(*[Block() for _ in range(3)]), nn.Linear(4, 1)
    def forward(self, x, labels=None):
        outputs = self.head(self.layers(x))
        if labels is None:
            return outputs
        return {"loss": nn.functional.mse_loss(outputs.float(), labels), "logits": outputs}
model = Model()
keys = list(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.rand(8, 4), torch.rand(8, 1)
"""
LOOP = """
losses = [train_step(x, y, nn.functional.mse_loss) for _ in range(3)]
"""
TRAINER = """
dataset = [{"x": one, "labels": other} for one, other in zip(x, y)]
arguments.max_steps, arguments.disable_tqdm, arguments.report_to = 3, True, []
arguments.per_device_train_batch_size = 8
trainer = train(dataset)
losses = [torch.tensor(trainer.state.global_step)]
"""
END = """
from torch._dynamo.utils import counters
assert counters["stats"]["unique_graphs"] >= 1
assert [key.replace("_forward_module.", "").replace("_orig_mod.", "").replace("module.", "")
        for key in model.state_dict()] == keys
torch.save({"losses": torch.stack(losses)}, sys.argv[1])
"""
PLAIN = """
losses = []
for _ in range(3):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
torch.save({"losses": torch.stack(losses)}, sys.argv[1])
"""
NEEDS = {"torch": "torch", "accelerate": "accelerate", "fabric": "lightning",
         "transformers": "transformers"}  # fmt: skip
WISHES = {
    "blocks": {"enabled": True, "scope": "blocks", "backend": "aot_eager"},
    "backend": {"enabled": True, "backend": "aot_eager"},
}


def losses(folder: Path, name: str, source: str) -> torch.Tensor:
    """Of three steps in a process of its own."""
    program, result = folder / f"{name}.py", folder / f"{name}.pt"
    program.write_text(source, encoding="utf-8")
    exit_code, printed = fresh.run(program, str(result))
    assert exit_code == 0, printed[-3000:] + source
    return torch.load(result)["losses"]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("form", NEEDS)
@pytest.mark.parametrize("wish", WISHES)
def test_it_trains_as_plain_code_does(tmp_path, form, wish):
    pytest.importorskip(NEEDS[form])
    names: dict = {}
    exec(MODEL, names)
    facts = Facts.read(names["model"], [names["optimizer"]])
    found = plan(SpeedConfig(compile=WISHES[wish], fused_optimizer=False), facts=facts)
    text = code(found, form, [names["optimizer"]])
    assert ("block.compile(" in text or "block.forward = " in text) == (wish == "blocks")
    end = TRAINER if form == "transformers" else LOOP
    trained = losses(tmp_path, form, MODEL + text + end + END)
    if form == "transformers":
        assert trained == 3
        return
    assert torch.allclose(trained, losses(tmp_path, "plain", MODEL + PLAIN), atol=1e-5)
