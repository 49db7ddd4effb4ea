"""Test `auto` on several kinds of training loops, and on cells that contain loops."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import speedkit_jupyter
from speedkit_jupyter.extras.auto import plugin
from speedkit_jupyter.machines import flags
from speedkit_jupyter.plans.applying import applied_to

STEPS = 240

LOOP = """
import torch
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for number in range(8):
    optimizer.zero_grad()
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def shell(monkeypatch):
    from IPython.testing.globalipapp import get_ipython

    ip = get_ipython()
    before = dict(ip.user_ns)
    ip.run_line_magic("load_ext", "speedkit_jupyter")
    yield ip
    plugin.off()
    ip.run_line_magic("unload_ext", "speedkit_jupyter")
    for name in ip.user_ns.keys() - before:
        del ip.user_ns[name]


def batches(steps=STEPS):
    for _ in range(steps):
        x = torch.rand(4, 8)
        yield x, (x.sum(1) > 4).long()


def loss_of(net, x, y):
    return nn.functional.cross_entropy(net(x), y)


def train(net, given=None, before=lambda: None, after=lambda: None, per_step=1, optimizer=None):
    """Train; `before` and `after` are called around each step of the optimizer."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), 0.05)
    for number, (x, y) in enumerate(given or batches(per_step * STEPS)):
        loss = loss_of(net, x, y) / per_step
        loss.backward()
        if (number + 1) % per_step == 0:
            before()
            optimizer.step()
            optimizer.zero_grad()
            after()
    return loss


def gan(net):
    judge, up = copy.deepcopy(net), nn.Linear(2, 8)
    makes, judges = (torch.optim.SGD(one.parameters(), 1e-3) for one in (net, judge))
    real, made = torch.ones(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    for x, _ in batches():
        judges.zero_grad()
        (loss_of(judge, x, real) + loss_of(judge, up(net(x)).detach(), made)).backward()
        judges.step()
        makes.zero_grad()
        loss = loss_of(judge, up(net(x)), real)
        loss.backward()
        makes.step()
    return loss


def teacher_and_student(net):
    teacher = copy.deepcopy(net).eval()

    @torch.no_grad()
    def taught(x):
        return x, (teacher(x) + torch.tensor([0.0, 0.2])).argmax(1)

    return train(net, (taught(x) for x, _ in batches()))


def moving_average_by_data(net):
    mean = copy.deepcopy(net)

    def follow():
        for ours, theirs in zip(mean.parameters(), net.parameters(), strict=True):
            ours.data.mul_(0.99).add_(theirs.data, alpha=0.01)

    train(net, after=follow)
    return loss_of(mean, *next(batches()))


def one_cycle(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS)
    return train(net, after=rates.step, optimizer=optimizer)


def validation(net):
    losses = []
    for _ in range(STEPS // 100):
        train(net, batches(100))
        with torch.no_grad():
            losses.append(loss_of(net.eval(), *next(batches())))
        net.train()
    return sum(losses)


def variable_lengths(net):
    pairs = enumerate(batches())
    return train(net, ((x[: 1 + number % 4], y[: 1 + number % 4]) for number, (x, y) in pairs))


def rollouts_and_epochs(net):
    for _ in range(STEPS // 80):
        with torch.no_grad():
            seen = [(x, net(x).argmax(1)) for x, _ in batches(40)]
        loss = train(net, [*seen, *seen])
    return loss


def closures(net):
    optimizer = torch.optim.LBFGS(net.parameters(), 0.01, max_iter=3)
    x, y = next(batches())

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net, x, y)
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(STEPS // 4)][-1]


def data_of(steps):
    return TensorDataset(*(torch.cat(one) for one in zip(*batches(steps), strict=True)))


def workers(net):
    return train(net, DataLoader(data_of(STEPS), 4, num_workers=2))


def by_accelerate(net):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    given = torch.optim.SGD(net.parameters(), 0.05), DataLoader(data_of(STEPS), 4)
    net, optimizer, loader = accelerator.prepare(net, *given)
    for x, y in loader:
        loss = loss_of(net, x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def by_lightning(net):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, number):
            self.loss = loss_of(self.net, *batch)
            return self.loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

    module, names = Module(), ("logger", "enable_checkpointing", "enable_progress_bar")
    quiet = dict.fromkeys((*names, "enable_model_summary"), False)
    fit = lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit
    fit(module, DataLoader(data_of(STEPS), 4))
    return module.loss


def by_trainer(net, tmp_path):
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, labels):
            return {"loss": loss_of(self.net, x, labels)}

    rows = [{"x": x, "labels": y} for x, y in data_of(STEPS)]
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    options = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=1, per_device_train_batch_size=4, **quiet
    )
    trainer = transformers.Trainer(Model(), options, train_dataset=rows)
    return torch.tensor(trainer.train().training_loss)


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(self[0], x, use_reentrant=False)


OTHERS = (teacher_and_student, moving_average_by_data, validation, rollouts_and_epochs, workers)
FRAMEWORKS = (by_accelerate, by_lightning, by_trainer)
LOOPS = {
    "plain, with tqdm": lambda net: train(net, pytest.importorskip("tqdm").tqdm([*batches()])),
    "checkpoint": lambda net: train(Recomputed(net)),
    "accumulation": partial(train, per_step=2),
    "clipping": lambda net: train(
        net, before=partial(nn.utils.clip_grad_norm_, [*net.parameters()], 0.5)
    ),
    **{one.__name__: one for one in (gan, one_cycle, variable_lengths, closures)},
}
SLOW = [pytest.param(one, id=one.__name__, marks=pytest.mark.slow) for one in OTHERS + FRAMEWORKS]


@pytest.mark.long
@pytest.mark.parametrize("loop", [*(pytest.param(LOOPS[one], id=one) for one in LOOPS), *SLOW])
def test_plans_race_in_a_loop_that_trains_as_it_did(loop, make_net, tmp_path):
    if loop is by_trainer:
        loop = partial(by_trainer, tmp_path=tmp_path)

    def trained():
        torch.manual_seed(0)
        net = make_net()
        return net, float(loop(net))

    _, expected = trained()
    before, lines = flags.snapshot(), []
    with speedkit_jupyter.auto(say=lines.append) as running:
        net, loss = trained()
        reasons = [work.race.reasons for work in running.loops]
    assert loss == pytest.approx(expected, rel=0.05, abs=0.02)
    why = f"{lines} {reasons}"  # rounding matters more to a GAN as it trains
    is_refused = loop is gan and ("tried again: its loss" in why or "bf16 explains" in why)
    assert "by bf16" in lines[-1] or is_refused, why
    assert flags.snapshot() == before
    assert applied_to(net) is None


class Writer(nn.Module):
    """A small language model that generates as libraries do, with one call for each token."""

    def __init__(self, clock):
        super().__init__()
        self.embedding, self.head, self.clock = nn.Embedding(11, 8), nn.Linear(8, 11), clock

    def forward(self, tokens):
        self.clock.sleep(0.01 if torch.is_autocast_enabled("cpu") else 0.02)
        return self.head(self.embedding(tokens))

    @torch.no_grad()
    def generate(self, tokens, length):
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def test_generating_between_steps_is_evaluation_and_makes_no_step(made_time, running):
    torch.manual_seed(0)
    net = Writer(made_time)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    expected = net.generate(torch.zeros(1, 1, dtype=torch.long), 5)
    for number in range(60):
        optimizer.zero_grad()
        net(torch.randint(11, (4, 6))).sum().backward()
        optimizer.step()
        if number % 10 == 0:
            assert net.generate(torch.zeros(1, 1, dtype=torch.long), 5).equal(expected)
    (work,) = running.loops
    assert work.trains
    assert sum(work.totals.steps.values()) == 60


@pytest.mark.parametrize("is_called", [True, False], ids=["a module", "raw tensors"])
def test_steps_that_are_written_by_hand_run_as_they_are_and_one_line_says_why(running, is_called):
    net = nn.Linear(4, 2, bias=False)
    call = net if is_called else net.weight.mv
    for _ in range(40):
        net.zero_grad()
        call(torch.rand(4)).sum().backward()
        net.weight.data -= 0.01 * net.weight.grad
    assert not running.loops
    (line,) = running.end_cell()
    assert line == "auto leaves this loop as it is: no optimizer of torch makes its steps."


def test_a_known_loop_is_known_in_the_next_cell(made_time, running):
    net = nn.Linear(4, 2)
    net.parameters = lambda: [net.weight, net.bias]  # as in "Dive into Deep Learning"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        running.begin_cell()
        nn.Sequential(net)(torch.rand(3, 4))  # once, as notebooks show a shape
        for _ in range(20):
            optimizer.zero_grad()
            net(torch.rand(3, 4)).sum().backward()
            optimizer.step()
        assert not any("leaves this loop" in line for line in running.end_cell())
        assert running.latest.plans.live_models == [net]


def test_training_by_torch_func_runs_as_it_is_and_one_line_says_why(made_time, running):
    net = nn.Linear(4, 2)
    parameters = dict(net.named_parameters())
    loss = lambda given: torch.func.functional_call(net, given, (torch.rand(3, 4),)).sum()  # noqa: E731
    for _ in range(5):
        torch.func.grad(loss)(parameters)
    assert not running.loops
    assert "torch.func" in running.end_cell()[0]


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize("error", ["1 / 0", "raise KeyboardInterrupt"])
def test_a_cell_that_raises_shows_the_users_lines_only(shell, capsys, error, is_on):
    if is_on:
        shell.run_cell("%speedkit auto")
    capsys.readouterr()
    assert not shell.run_cell(f"%%speedkit\ndef mine():\n    {error}\nmine()").success
    shown = re.sub(r"\x1b\[[\d;]*m", "", "".join(capsys.readouterr()))
    assert shown.count("Traceback (most recent call last)") == 1
    assert f"----> 2     {error}" in shown
    assert "speedkit_jupyter" not in shown
    assert "run_cell_magic" not in shown


@pytest.mark.parametrize("place", ["stepped", "differentiated", "_begin"])
def test_ctrl_c_in_a_hook_shows_the_users_lines_only(shell, capsys, monkeypatch, place):
    def interrupted(*args):
        raise KeyboardInterrupt

    shell.run_cell("%speedkit auto")
    shell.run_cell(LOOP)
    (work,) = plugin._RUNNING[0].auto.loops
    owner, name = (work.plans, "look_up") if place == "_begin" else (work, place)
    monkeypatch.setattr(owner, name, interrupted)
    capsys.readouterr()
    assert not shell.run_cell("net(torch.ones(3, 4)).sum().backward()\noptimizer.step()").success
    shown = "".join(capsys.readouterr())
    assert "KeyboardInterrupt" in shown
    assert "speedkit_jupyter" not in shown


def test_a_report_without_a_plan_tells_the_race_that_is_undecided(shell, capsys, make_net):
    shell.run_cell("%speedkit auto")
    shell.user_ns["net"] = make_net()
    loop = LOOP.replace("net = torch.nn.Linear(4, 2)", "").replace("range(8)", "range(30)")
    assert shell.run_cell(loop.replace("3, 4", "3, 8")).success
    capsys.readouterr()
    shell.run_cell("%speedkit report net")
    shown = " ".join(capsys.readouterr().out.split())
    assert "30 steps in" in shown
    assert "no plan is proven yet" in shown
    assert "`%speedkit auto status` shows the race" in shown
    assert "● on" not in shown


def test_in_a_terminal_the_summary_follows_the_output_of_the_cell(shell, capsys):
    shell.run_cell("%speedkit auto")
    capsys.readouterr()
    shell.run_cell(f"{LOOP.replace('range(8)', 'range(300)')}print('trained')")
    shown = capsys.readouterr().out
    assert 0 <= shown.index("trained") < shown.index(" steps in ")


@pytest.mark.slow
def test_a_cell_that_several_processes_run_is_left_to_them(shell, capsys):
    from speedkit_jupyter.extras.processes import workers

    shell.run_cell("%speedkit auto")
    try:
        result = shell.run_cell(f"%%speedkit launch\n{LOOP}\nprint('trained', number)")
    finally:
        workers.stop()
    shown = capsys.readouterr().out
    assert result.success, shown
    assert "trained 7" in shown
    assert not plugin._RUNNING[0].auto.loops
