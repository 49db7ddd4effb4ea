"""Framework code pasted below the notebook's cells goes on with the objects that are there."""

from __future__ import annotations

from typing import Any

import pytest

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.notebook.commands import commands
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.support.wrappers import unwrapped

BEGIN = """
import torch
from torch import nn
torch.manual_seed(0)
"""
HUGGING_FACE = """
import transformers
net = transformers.BertForSequenceClassification(transformers.BertConfig(
    vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
))
given = ({"input_ids": torch.randint(20, (4, 5)), "labels": torch.tensor([0, 1, 1, 0])},)
"""
OPTIMIZER = "opt = torch.optim.AdamW(net.parameters(), 1e-3)\n"


def printed(names: dict[str, Any], file, config: SpeedConfig) -> str:
    """What `%speedkit code net` prints here."""
    _, context = apply_speedups(names["net"], config, optimizer=names["opt"])
    line = f"net --optimizer opt --as transformers --save {file} --force"
    commands()["code"].run(names, Session(names), commands()["code"].parse_line(line))
    context.restore()
    return file.read_text()


def test_trainer_is_given_the_users_own_optimizer(tmp_path):
    pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    exec(BEGIN + HUGGING_FACE + OPTIMIZER, names)
    config = SpeedConfig(fused_optimizer=True)
    text = printed(names, tmp_path / "code.txt", config)
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
