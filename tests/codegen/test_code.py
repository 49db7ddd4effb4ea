"""Check the text of generated code, and that it does the same as its plan, without SpeedKit."""

import copy
import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, SpeedConfig, SpeedKitError, code, machines, plan
from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.codegen.forms import FORMS

MACHINES = machines.names()
PYTHON_FORMS = [form for form in FORMS if form not in ("yaml", "torchrun")]
FACTS = Facts(parameters=11_000_000, convolutions=20, optimizers=(OptimizerFacts("AdamW"),))
every_machine = pytest.mark.parametrize("machine", MACHINES)


def plans(machine: str):
    """Yield auto plans, plans with one value (alone and with auto options), and combinations."""
    hardware = Hardware.from_json(machine)
    device = hardware.accelerators[0].kind if hardware.accelerators else "cpu"
    there = FACTS.moved(device)
    for facts in (FACTS, there, Facts(parameters=5), FACTS.moved(f"{device}:1")):
        yield plan(SpeedConfig(), hardware, facts)
        for optimization in CATALOG:
            extra = {"sdpa": ("math",), "threads": (64,), "tf32": ("highest",)}
            tried = optimization.candidates(hardware, facts)
            for value in (*tried, *extra.get(optimization.name, ())):
                config = SpeedConfig(**{optimization.name: value})
                yield plan(config, hardware, facts)
                yield plan(config.alone(), hardware, facts)
    details = {"enabled": True, "mode": "max-autotune", "fullgraph": True, "dynamic": False}
    for precision, compile in itertools.product(("fp32", "bf16", "fp16"), (True, details)):
        config = SpeedConfig(precision=precision, compile=compile, sdpa="flash", threads=3)
        yield plan(config, hardware, FACTS)


def written(one, form: str) -> str | None:
    """Return the code, or None if the form refuses the plan and points to `--as torch`."""
    try:
        return code(one, form)
    except SpeedKitError as error:
        refused = str(error)
    assert refused.endswith("use --as torch")
    assert form == "transformers"
    return None


@pytest.mark.sampled(7)
@every_machine
@pytest.mark.parametrize("form", PYTHON_FORMS)
def test_every_plan_is_code_that_compiles_and_names_what_is_active_and_no_more(machine, form):
    number = 0
    for one in plans(machine):
        text = written(one, form)
        if text is None:
            continue
        number += 1
        compile(text, machine, "exec")
        for decision in one:
            assert (f"# {decision.name}: " in text) == decision.active, text
        for word in ("ctx", "%%", "speedkit_jupyter"):
            assert word not in text
        assert all(len(line) <= 88 for line in text.splitlines() if line[:1] == "#")
    assert number


@pytest.mark.sampled(6)
@pytest.mark.slow
@every_machine
def test_the_code_knows_every_name_and_has_no_unused_import(tmp_path, machine):
    texts = {written(one, form) for form in PYTHON_FORMS for one in plans(machine)} - {None}
    assert len(texts) > 10
    for number, text in enumerate(sorted(texts)):
        (tmp_path / f"{number}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F,I"]
    names = 'builtins=["model", "optimizer"]'
    done = subprocess.run([*command, "--config", names, str(tmp_path)], capture_output=True)
    assert done.returncode == 0, done.stdout[:3000]


def test_a_plan_that_changes_nothing_says_so_and_gives_the_plain_loop():
    text = code(plan(SpeedConfig().alone(), Hardware(), Facts(optimizers=(OptimizerFacts(),))))
    assert "changes nothing here" in text
    assert "    loss = loss_fn(model(inputs), targets)\n    loss.backward()\n" in text
    assert "with " not in text


def test_without_an_optimizer_it_predicts_and_scales_no_loss(hardware):
    text = code(plan(SpeedConfig(), hardware("t4"), Facts(parameters=5)))
    assert "def predict(inputs):" in text
    assert "backward" not in text
    assert "scaler" not in text.replace("# grad_scaler", "")


def test_trainer_is_told_the_device_wherever_the_model_is(hardware):
    found = plan(SpeedConfig(), hardware("a100"), FACTS.moved("cuda:1"))
    assert not found["device"].active
    assert 'os.environ["CUDA_VISIBLE_DEVICES"] = "1"' in code(found, "transformers")
    for config in (SpeedConfig(device="cpu"), SpeedConfig(threads=3).alone()):
        assert "use_cpu=True" in code(plan(config, hardware("a100"), FACTS), "transformers")


def test_trainer_is_told_not_to_switch_tf32_on_where_the_plan_does_not(hardware):
    found = plan(SpeedConfig(compile=True).alone(), hardware("a100"), FACTS.moved("cuda:0"))
    assert not found["tf32"].active
    assert "tf32=False" in code(found, "transformers")


def planned(model: nn.Module, *optimizers: torch.optim.Optimizer, **wishes):
    return plan(SpeedConfig(**wishes), Hardware.current(), Facts.read(model, optimizers))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda p: torch.optim.AdamW(p, lr=3e-4, betas=(0.8, 0.9)),
         "AdamW(model.parameters(), lr=0.0003, betas=(0.8, 0.9), fused=True)"),
        (lambda p: torch.optim.SGD(p, 0.1), "SGD(model.parameters(), lr=0.1, fused=True)"),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.5)),
         "AdamW(model.parameters(), lr=torch.tensor(0.5), fused=True)"),
    ],
)  # fmt: skip
def test_an_optimizer_is_made_with_the_users_own_hyperparameters(make, line):
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    text = code(planned(model, optimizer), "torch", [optimizer])
    assert f"optimizer = torch.optim.{line}" in text


@pytest.mark.parametrize("form", ["torch", "transformers"])
def test_an_optimizer_that_the_plan_leaves_alone_stays_the_users_own(form):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    found = planned(model, optimizer, fused_optimizer=False, threads=1)
    text = code(found, form, {"opt": optimizer})
    assert "torch.optim" not in text
    assert "`opt`" in text.partition("\n\n")[0]


class Mine(torch.optim.AdamW):
    """User's optimizer class, which generated code can't construct."""


@pytest.mark.parametrize("kind", ["groups", "own class", "a part of the model"])
def test_what_one_line_can_not_make_is_switched_in_place(kind):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parts = [{"params": one.parameters()} for one in model]
    optimizer = {
        "groups": lambda: torch.optim.AdamW(parts, foreach=True),
        "own class": lambda: Mine(model.parameters(), foreach=True),
        "a part of the model": lambda: torch.optim.AdamW(model[0].parameters(), foreach=True),
    }[kind]()
    text = code(planned(model, optimizer, fused_optimizer=True), "torch", {"opt": optimizer})
    assert "torch.optim" not in text
    assert "`model`, `opt`" in text.partition("\n\n")[0]
    names = {"model": model, "opt": optimizer}
    exec(text, names)
    settings = {(group["fused"], group["foreach"]) for group in optimizer.param_groups}
    assert settings == {(True, False)}
    names["train_step"](torch.ones(1, 2), torch.ones(1, 2), nn.functional.mse_loss)


def test_other_optimizers_than_the_plans_are_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(SpeedKitError, match="made with 1 optimizers, not 2"):
        code(planned(model, optimizer), "torch", [optimizer, copy.deepcopy(optimizer)])


BEGIN = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
"""
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


@pytest.mark.slow
def test_trainer_does_what_was_planned(two_threads, tmp_path):
    pytest.importorskip("transformers")
    names: dict = {}
    made = "torch.optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.1, eps=1e-6)"
    exec(f"{BEGIN}{TRAINER}optimizer = {made}", names)
    facts = Facts.read(names["model"], [names["optimizer"]])
    found = plan(SpeedConfig(precision="bf16", threads=1), facts=facts)
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
    program = f"{BEGIN}{TRAINER}{text}{end}assert 'speedkit_jupyter' not in sys.modules"
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:] + program
