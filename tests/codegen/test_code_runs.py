"""Generated code in a fresh process: the same switches and numerics as the applied plan."""

from __future__ import annotations

from pathlib import Path

import fresh
import pytest
import torch

from speedkit_jupyter import Facts, SpeedConfig, code, plan
from speedkit_jupyter.machines import flags

pytestmark = pytest.mark.slow

MODELS = {
    "cnn": """
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1),
    nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8 * 36, 1),
)
x, y = torch.rand(8, 1, 10, 10), torch.rand(8, 1)
""",
    "attention": """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 1)
    def forward(self, x):
        q, k, v = self.into(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2).mean(1))
model = Attention()
x, y = torch.rand(4, 10, 16), torch.rand(4, 1)
""",
}
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)"
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)"

BEGIN = """
import sys, warnings
import torch
from torch import nn
torch.manual_seed(0)
"""
# Flags are read where a batch meets its loss: inside whatever surrounds the forward pass.
END = """
def loss_fn(outputs, targets):
    import speedkit_jupyter.catalog
    from speedkit_jupyter.machines import flags
    inside.update(flags.snapshot())
    return nn.functional.mse_loss(outputs, targets)
inside, losses = {}, []
for _ in range(3):
    losses.append(train_step(x, y, loss_fn))
found = {"inside": inside, "losses": torch.stack(losses), "parameters": dict(model.state_dict())}
torch.save(found, sys.argv[1])
"""
WITH_SPEEDKIT = """
from pathlib import Path
from speedkit_jupyter import SpeedConfig, apply_speedups, code
_, ctx = apply_speedups(model, SpeedConfig.from_dict({wishes!r}), optimizer=optimizer)
Path(sys.argv[2]).write_text(code(ctx, "torch"))
def train_step(inputs, targets, loss_fn):
    with ctx.sdpa():
        loss = loss_fn(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
"""
WITHOUT = """
assert "speedkit_jupyter" not in sys.modules
"""


def run(folder: Path, name: str, source: str) -> dict:
    program, result = folder / f"run_{name}.py", folder / f"{name}.pt"
    program.write_text(source, encoding="utf-8")
    exit_code, printed = fresh.run(program, str(result), str(folder / "code.txt"))
    assert exit_code == 0, printed[-3000:] + source
    return torch.load(result) if result.exists() else {}


# Switches of code that SpeedKit compiles.
UNLIKE = {"dynamo.skip_nnmodule_hook_guards", "compiler.cache_key_tag"}


@pytest.mark.parametrize(
    ("model", "optimizer", "wishes"),
    [
        ("cnn", SGD, {"channels_last": True}),
        ("attention", ADAMW, {"sdpa": "math", "precision": "bf16", "threads": 1}),
    ],
)
def test_the_same_switches_and_the_same_bits(tmp_path, model, optimizer, wishes):
    begin = BEGIN + MODELS[model]
    with_speedkit = WITH_SPEEDKIT.format(wishes=wishes)
    applied = run(tmp_path, "applied", begin + optimizer + with_speedkit + END)
    text = (tmp_path / "code.txt").read_text(encoding="utf-8")
    yours = "" if "torch.optim" in text else optimizer
    plain = run(tmp_path, "plain", begin + yours + "\n" + text + WITHOUT + END)
    changes = flags.diff(applied["inside"], plain["inside"])
    assert applied["inside"].keys() & plain["inside"].keys()
    assert [change for change in changes if change.name not in UNLIKE] == []
    assert torch.equal(applied["losses"], plain["losses"])
    assert applied["losses"][0] != applied["losses"][2]
    assert applied["parameters"].keys() == plain["parameters"].keys()
    for name, value in applied["parameters"].items():
        assert torch.equal(value, plain["parameters"][name]), name
        assert value.stride() == plain["parameters"][name].stride(), name


# --- Trainer ---

TRAINER = """
class Supervised(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(20, 1)
    def forward(self, x, labels):
        outputs = self.layer(x)
        dtypes.append(outputs.dtype)
        return {"loss": nn.functional.mse_loss(outputs.float(), labels), "logits": outputs}
dtypes, model = [], Supervised()
dataset = [{"x": torch.rand(20), "labels": torch.rand(1)} for _ in range(16)]
"""


def test_trainer_does_what_was_planned(two_threads, tmp_path):
    pytest.importorskip("transformers")
    names: dict = {}
    made = "torch.optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.1, eps=1e-6)"
    exec(f"{BEGIN}{TRAINER}optimizer = {made}", names)
    found = plan(
        SpeedConfig(precision="bf16", threads=1),
        facts=Facts.read(names["model"], [names["optimizer"]]),
    )
    text = code(found, "transformers", [names["optimizer"]])
    end = f"""
arguments.max_steps, arguments.disable_tqdm, arguments.report_to = 3, True, []
arguments.output_dir = {str(tmp_path)!r}
before = model.layer.weight.detach().clone()
trainer = train(dataset)
assert arguments.bf16 and arguments.use_cpu and arguments.device.type == "cpu"
assert set(dtypes) == {{torch.bfloat16}}
assert all(group["fused"] for group in trainer.optimizer.param_groups)
assert trainer.state.global_step == 3 and not torch.equal(before, model.layer.weight)
assert torch.get_num_threads() == 1
assert trainer.optimizer.optimizer is optimizer
group = optimizer.param_groups[0]  # Trainer's own decay is another
assert (group["initial_lr"], group["eps"], group["weight_decay"]) == (0.002, 1e-6, 0.1)
"""
    run(tmp_path, "trainer", BEGIN + TRAINER + text + WITHOUT + end)
