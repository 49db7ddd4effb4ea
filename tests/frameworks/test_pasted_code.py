"""Printed code, pasted as a whole beside the user's own definitions."""

from __future__ import annotations

from typing import Any

import fresh
import pytest
from IPython.core.error import UsageError

from speedkit_jupyter.codegen.forms import FORMS
from speedkit_jupyter.magics.commands import COMMANDS
from speedkit_jupyter.session import Session

pytestmark = pytest.mark.slow

PLAIN = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
x, y, loss_fn = torch.randn(4, 8), torch.randint(2, (4,)), nn.functional.cross_entropy
given = (x, y, loss_fn)
"""
HF = """
import torch
import transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, intermediate_size=20,
)
net = transformers.LlamaForCausalLM(config)
x = torch.randint(0, 99, (2, 8))
given = (dict(input_ids=x, labels=x),)
"""
ONE = "inner = torch.optim.AdamW(net.parameters(), 1e-3)\n"
GROUPS = """
parts = [one for one in net.parameters() if one.ndim > 1]
rest = [one for one in net.parameters() if one.ndim < 2]
inner = torch.optim.AdamW([{"params": parts}, {"params": rest, "lr": 0.1}], 1e-3)
"""
TRAINER = """
trainer = transformers.Trainer(model=%s, args=transformers.TrainingArguments(use_cpu=True))
"""
UNWRAPPED = "model, optimizer = net, inner\n"

FRAMEWORKS = ("torch", "lightning.fabric", "accelerate", "transformers")
# Definitions, the words for model and optimizer.
USERS = {
    "plain": (PLAIN + ONE + UNWRAPPED, "model", "optimizer"),
    "plain, groups": (PLAIN + GROUPS + UNWRAPPED, "model", "optimizer"),
    "hugging face": (HF + GROUPS + UNWRAPPED, "model", "optimizer"),
    "trainer": (HF + TRAINER % "net", "trainer.model", ""),
    "trainer of a model without a name": (
        HF + "made, net = net, None\n" + TRAINER % "made" + "del made\n", "trainer.model", "",
    ),
}  # fmt: skip
LINE = "{model}{optimizer} --as {form} --save {file} --force"
RUN = {
    "trains": "losses = [train_step(*given).item() for _ in range(5)]\n",
    "predicts": "predict(*given[:1])\n",
    "trainer": """
rows = [{name: one[0] for name, one in given[0].items()}] * 4
arguments.max_steps, arguments.disable_tqdm, arguments.report_to = 2, True, []
arguments.save_strategy = "no"
assert train(rows).state.global_step == 2
""",
}


@pytest.fixture
def users(monkeypatch):
    """`users(source)`: the names that the definitions give, in this process."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(source: str) -> dict[str, Any]:
        names: dict[str, Any] = {}
        exec(source, names)
        return names

    return run


def end_of(form: str, source: str, text: str) -> str:
    if form != "transformers":
        return RUN["predicts" if "def predict" in text else "trains"]
    return RUN["trainer"] if "transformers" in source else "assert callable(train)\n"


@pytest.mark.sampled(10)
@pytest.mark.parametrize("user", USERS)
def test_it_runs_in_a_fresh_process(tmp_path, users, monkeypatch, user):
    source, model, optimizer = USERS[user]
    names, session = users(source), Session()
    for form in FORMS:
        if form == "yaml":
            continue
        file = tmp_path / f"{form}.txt"
        given = f" --optimizer {optimizer}" if optimizer else ""
        try:
            line = LINE.format(model=model, optimizer=given, form=form, file=file)
            COMMANDS["code"].run(names, session, COMMANDS["code"].parse(line))
        except UsageError as error:
            pytest.fail(f"{form}: {error}")
        text = file.read_text()
        program = tmp_path / f"run_{form}.py"
        begin = f"import os\nos.environ['HF_HUB_OFFLINE'] = '1'\n{source}"
        program.write_text(f"{begin}\n{text}\n{end_of(form, source, text)}")
        exit_code, printed = fresh.run(program, preload=FRAMEWORKS)
        assert exit_code == 0, f"{form}: {printed[-2000:]}\n{text}"
