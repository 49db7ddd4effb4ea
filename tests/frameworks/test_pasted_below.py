"""Framework code pasted below the notebook's cells goes on with the objects that are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speedkit_jupyter import SpeedConfig
from speedkit_jupyter.notebook.commands import commands
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.support.wrappers import unwrapped

BEGIN = """
import torch
from torch import nn
torch.manual_seed(0)
"""
MLP = """
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
given = (torch.randn(4, 8), torch.randint(2, (4,)), nn.functional.cross_entropy)
"""
HUGGING_FACE = """
import transformers
net = transformers.BertForSequenceClassification(transformers.BertConfig(
    vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
))
given = ({"input_ids": torch.randint(20, (4, 5)), "labels": torch.tensor([0, 1, 1, 0])},)
"""
MADE = {
    "one": "opt = torch.optim.AdamW(net.parameters(), 1e-3)\nwords = ['opt']\n",
    "groups": """
weights = [p for p in net.parameters() if p.ndim > 1]
rest = [p for p in net.parameters() if p.ndim < 2]
opt = torch.optim.SGD([{"params": weights}, {"params": rest, "lr": 0.1}], 1e-3, momentum=0.9)
words = ['opt']
""",
    "begun, with a schedule": """
opt = torch.optim.Adam(net.parameters(), 1e-3)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
for p in net.parameters():
    p.grad = torch.ones_like(p)
opt.step()
sched.step()
opt.zero_grad()
words = ['opt']
""",
    "closure": "solver = torch.optim.LBFGS(net.parameters(), 0.01)\nwords = ['solver']\n",
    "two": """
every = list(net.parameters())
opt_a, opt_b = torch.optim.AdamW(every[:2], 1e-3), torch.optim.SGD(every[2:], 1e-3, 0.9)
words = ['opt_a', 'opt_b']
""",
    "in a list": "opts = [torch.optim.AdamW(net.parameters(), 1e-3)]\nwords = ['opts[0]']\n",
    "in an object": """
from types import SimpleNamespace
self = SimpleNamespace(opt=torch.optim.AdamW(net.parameters(), 1e-3))
words = ['self.opt']
""",
    "named as the code names others": """
scaler = torch.optim.AdamW(net.parameters(), 1e-3)
words = ['scaler']
""",
}  # fmt: skip
NEEDED = {"accelerate": "accelerate", "fabric": "lightning"}


def printed(names: dict[str, Any], form: str, words: list[str], file, config: SpeedConfig) -> str:
    """What `%speedkit code net` prints here."""
    session = Session(names)
    session.config = config
    line = f"net --optimizer {','.join(words)} --as {form} --save {file} --force"
    commands()["code"].run(names, session, commands()["code"].parse_line(line))
    return file.read_text()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", MADE)
@pytest.mark.parametrize("form", NEEDED)
def test_the_users_own_optimizers_are_trained(tmp_path, form, optimizer):
    pytest.importorskip(NEEDED[form])
    names: dict[str, Any] = {}
    exec(BEGIN + MLP + MADE[optimizer], names)
    words, net = names["words"], names["net"]
    optimizers = [eval(word, names) for word in words]
    config = SpeedConfig(precision="bf16", fused_optimizer=True)
    text = printed(names, form, words, tmp_path / "code.txt", config)
    exec(compile(text, "pasted", "exec"), names)
    assert "torch.optim." not in text
    assert unwrapped(names["net"]) is unwrapped(net)

    old = [p.detach().clone() for p in net.parameters()]
    losses = [names["train_step"](*names["given"]).item() for _ in range(4)]
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    assert any(not torch.equal(a, b) for a, b in zip(old, net.parameters(), strict=True))
    for one in map(unwrapped, optimizers):
        assert one.state, "another optimizer has stepped"
    if "sched" in names:
        names["sched"].step()
        assert optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 / 4)
        assert {int(s["step"]) for s in optimizers[0].state.values()} == {5}


def test_trainer_is_given_the_users_own_optimizer(tmp_path):
    pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    exec(BEGIN + HUGGING_FACE + MADE["one"], names)
    config = SpeedConfig(fused_optimizer=True)
    text = printed(names, "transformers", ["opt"], tmp_path / "code.txt", config)
    assert "torch.optim." not in text
    exec(text, names)
    arguments = names["arguments"]
    arguments.max_steps, arguments.disable_tqdm, arguments.report_to = 2, True, []
    arguments.save_strategy, arguments.output_dir = "no", str(tmp_path)
    (batch,) = names["given"]
    rows = [{name: one[n] for name, one in batch.items()} for n in range(4)]
    trainer = names["train"](rows)
    assert unwrapped(trainer.optimizer) is names["opt"]
    assert {int(state["step"]) for state in names["opt"].state.values()} == {2}
