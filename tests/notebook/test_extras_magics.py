"""Run %speedkit advise, loader, batch, free, verify, autotune and cache, and --profile."""

import json
import weakref
from dataclasses import asdict

import pytest
import torch
from IPython.core.error import UsageError
from torch import nn
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.autotune import ranking, tuner
from speedkit_jupyter.extras.autotune.plugin import counted_line
from speedkit_jupyter.extras.autotune.ranking import DeviceName, Input, KernelSearch, Problem
from speedkit_jupyter.extras.autotune.tuner import Counted
from speedkit_jupyter.extras.data.free import variables_table
from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.support import database

FROZEN = """
body, head = nn.Linear(256, 1024), nn.Linear(1024, 4)
net = nn.Sequential(body, head)
trained = torch.optim.SGD(head.parameters(), lr=0.1)
points, kinds = torch.randn(256, 256), torch.randint(4, (256,))
def step():
    loss = loss_fn(net(points), kinds)
    trained.zero_grad()
    loss.backward()
    trained.step()
"""
LINE = "%speedkit advise --step step --budget 1 -v advice"
LOADER = """
from torch.utils.data import DataLoader, TensorDataset
train_loader = DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)
def train(images, labels):
    loss_fn(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
def epoch():
    for images, labels in train_loader:
        train(images, labels)
"""


# On the simulated clock, the remedy would save no time, so its trial would show no gain.
@pytest.mark.real_time
@pytest.mark.smoke
def test_what_is_slow_stands_with_evidence_and_is_tried_by_its_number_or_its_rule(shell):
    shell.run(FROZEN)
    before = {name: one.clone() for name, one in shell.ip.ev("net").state_dict().items()}
    shown = shell.run(LINE)
    rules = [one.rule for one in shell.names["advice"].opportunities]
    found = rules.index("frozen_gradients") + 1
    assert "2 parameters require gradients, and no optimizer holds them" in shown.replace("\n", " ")
    assert f"--try {found}" in " ".join(shown.split())
    for wanted in (found, "frozen_gradients"):
        line = f"%speedkit advise --try {wanted} --budget 1 -v tried"
        assert "frozen_gradients" in shell.run(line)
        rows = shell.names["tried"].rows()
        assert [row["name"] for row in rows] == ["baseline", "frozen_gradients"]
        # Gradients that no optimizer reads are not compared. A busy machine may skip the check.
        assert rows[1]["accuracy"] in ("exact", None)
    assert all(one.requires_grad for one in shell.names["net"].parameters())
    after = shell.ip.ev("net").state_dict()
    assert all(one.equal(after[name]) for name, one in before.items())


def test_what_was_not_found_cant_be_tried(shell):
    shell.run(FROZEN)
    shell.run(LINE)
    for wanted in (99, "padding"):
        error = shell.fails(f"%speedkit advise --try {wanted}")
        assert isinstance(error, UsageError)
        assert f"there is no {wanted}: 1 or " in str(error)
    # For another step, advise first looks for slow parts.
    shell.run("def other():\n    step()")
    error = shell.fails("%speedkit advise --step other --try padding --budget 1")
    assert "there is no padding: 1 or " in str(error)


def test_a_step_that_takes_batches_gets_them_from_the_loader_that_is_named(shell):
    shell.run(f"{LOADER}\ndef by_one(batch):\n    train(*batch)")
    for name in ("train", "by_one"):
        shell.run(f"%speedkit advise --step {name} --loader train_loader --budget 1 -v advice")
        assert shell.names["advice"].profile.steps == 4
    error = shell.fails("%speedkit advise --step train --budget 1")
    assert "train takes 2 arguments: name its DataLoader by --loader" in str(error)


def values(shell):
    return [one.detach().clone() for one in shell.names["model"].parameters()]


@pytest.mark.real_time
@pytest.mark.smoke
@pytest.mark.parametrize("step", ["train", "epoch"])
def test_a_loader_is_measured_with_the_step_and_given_back_as_a_loader(shell, step):
    shell.run(LOADER)
    before = values(shell)
    shown = shell.run(f"%speedkit loader train_loader --step {step} --budget 0.5 -v quick")
    assert f"`{step}`" in shown
    assert "0 workers" in shown
    assert "as it is" in shown
    quick = shell.names["quick"]
    assert isinstance(quick, DataLoader)
    torch.manual_seed(3)
    own = [labels.tolist() for _, labels in shell.names["train_loader"]]
    torch.manual_seed(3)
    assert [labels.tolist() for _, labels in quick] == own
    assert all(map(torch.equal, before, values(shell)))


@pytest.mark.parametrize(
    "line", ["", "--step train --data x,y", "--step train --loader train_loader"]
)
def test_batch_sizes_are_in_a_table_and_change_nothing(shell, line):
    shell.run(LOADER)
    if not line:  # without options, batches come from the last cell's loader
        shell.run("%%speedbench -n1 -r1\nepoch()")
    before = values(shell)
    shown = shell.run(f"%speedkit batch {line} --range 4:32 --budget 1 -v sizes")
    assert "samples a second" in shown
    assert "Another batch size is another training" in " ".join(shown.split())
    found = shell.names["sizes"]
    assert [one.number for one in found.sizes] == [4, 8, 16, 32]
    assert found.fastest.rate >= found.knee.rate > 0
    assert all(map(torch.equal, before, values(shell)))
    assert shell.names["x"].shape[0] == 8


@pytest.mark.smoke
def test_free_releases_errors_outputs_and_masks_and_keeps_variables(shell):
    shell.run("from speedkit_jupyter import attention\n_ = 'mine'\nx * 2")
    shell.run("attention(*[torch.rand(1, 1, 99, 8)] * 3, 'sliding_window', window=3)")
    shell.run("import weakref\nkept = torch.ones(1_000_000)\nclass Out: 'a model returns it'")
    failing = "held = torch.zeros(9)\n    gone = weakref.ref(held)\n    raise ValueError"
    shell.fails(f"def run():\n    global gone\n    {failing}\nrun()")
    assert shell.names["gone"]() is not None
    shown = shell.run("%speedkit free")
    assert shell.names["gone"]() is None
    for part in ("the last error", "1 output (Out, _)", "masks of attention()", "kept  3.81 MiB"):
        assert part in shown
    assert "nothing was held but by your variables" in shell.run("%speedkit free")
    assert not shell.names["_oh"]
    assert shell.names["_"] == "mine"
    assert shell.names["kept"].sum() == 1_000_000


def test_variables_are_listed_with_their_memory_and_their_graphs() -> None:
    net, small = nn.Linear(512, 1024), nn.Linear(4, 4)
    losses = [small(torch.ones(2, 4)).sum() for _ in range(3)]
    names = {"losses": losses, "net": net, "small": small, "dead": weakref.proxy(nn.ReLU())}
    rows = [row.cells for row in variables_table(names).rows]
    assert rows[0] == ("net", "2 MiB", "–")
    assert rows[1][0] == "losses"
    assert rows[1][2].startswith("3 tensors with a graph")
    assert len(rows) == 2


STEP = "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"


@pytest.mark.smoke
def test_verify_takes_the_last_speedbench_cell(shell):
    before = values(shell)
    shell.run(f"%%speedbench -q -n 1 -r 1\n{STEP}")
    shown = shell.run("%speedkit verify --plan bf16 --steps 5 -v found")
    assert "same loss curve as the baseline over 5 calls" in " ".join(shown.split())
    assert shell.names["found"].plan == {"precision": "bf16"}
    assert all(map(torch.equal, before, values(shell)))
    assert "loss" not in shell.names


def test_verify_takes_a_function_by_name_and_the_plan_in_force(shell, machine):
    machine("cpu")
    shell.run(f"def train_step():\n    {STEP}")
    shell.run("%speedkit apply --precision bf16 --fused_optimizer false --channels_last false")
    shown = shell.run("%speedkit verify --step train_step --steps 4")
    assert "current (bf16)" in " ".join(shown.split())


EVALUATE = """
def evaluate(net):
    net.eval()
    with torch.no_grad():
        return float((net(x).argmax(1) == y).float().mean())
"""


def test_a_comparison_takes_a_function_as_its_accuracy(shell):
    line = "--compare baseline,bf16 --budget 0.1 -v found --accuracy evaluate"
    shell.run(f"{EVALUATE}\nget_ipython().run_cell_magic('speedbench', '{line}', 'model(x)')")
    assert all(0 <= record.score <= 1 for record in shell.names["found"].records)
    assert shell.names["model"].training


@pytest.mark.smoke
def test_the_parts_of_a_step_stand_in_a_table(shell):
    shown = shell.run(f"%%speedbench --profile --budget 0.5 -v found\n{STEP}")
    for word in ("forward", "backward", "optimizer", "rest", "share", "a step:"):
        assert word in shown
    found = shell.names["found"]
    assert sum(row["share"] for row in found.rows()) == pytest.approx(1)
    assert json.loads(found.to_json())["steps"] == 1
    assert "loss" not in shell.names


GPU = DeviceName("NVIDIA A100-SXM4-80GB", 108)


@pytest.fixture(autouse=True)
def off():
    yield
    tuner.off()


def keep(number: int = 1) -> None:
    """Store kernel searches of another GPU, where Triton's kernel is faster for small products."""
    for index in range(number):
        m, n, k = 64 * (index + 1), 512, 256
        inputs = Input((m, k), (k, 1), "float32"), Input((k, n), (n, 1), "float32")
        problem = Problem("mm", 0, inputs, (m, n), "highest", ranking.versions(), GPU)
        timings = {"mm()": 1.0 + 0.01 * index, "triton_mm(BLOCK_M=64)": 0.8 + 0.05 * index}
        found = KernelSearch(problem, tuple(timings), timings, 4.0)
        database.keep("search", GPU.model, problem.key, asdict(found))


def test_autotune_records_or_predicts_from_a_confidence_on_until_it_is_off(shell):
    text = shell.run("%speedkit autotune record")
    assert "recorded products are replayed" in text
    assert "Nothing is recorded yet: compile with mode='max-autotune'" in text
    assert "0 ns" not in shell.run("%speedkit autotune")
    assert "neither recorded" in shell.run("%speedkit autotune off")
    assert tuner.current() is None
    text = shell.run("%speedkit autotune predictions --confidence 0.9")
    assert "from a confidence of 90 % on" in text
    assert tuner.current().confidence == 0.9


@pytest.mark.slow
def test_a_trained_model_says_how_it_did_on_what_was_held_back(shell):
    keep(24)
    [model] = tuner.models()
    tuner.trained(model)
    text = shell.run("%speedkit autotune")
    assert "confident up to" in text
    assert "NVIDIA-A100-SXM4-80GB-matmul" in text
    [model] = tuner.models()
    assert model.calibration.shapes == 24
    assert model.calibration.right[-1] <= 24 / 25


def test_unloading_the_extension_takes_the_hooks_away(plain_shell):
    plain_shell.run("%load_ext speedkit_jupyter")
    plain_shell.run("%speedkit autotune record")
    plain_shell.run("%unload_ext speedkit_jupyter")
    assert tuner.current() is None


def test_what_happened_is_one_line():
    counted = Counted(2, 3, 1, 1, 1, 17.0, [0.9, 0.98, 1.0])
    assert counted_line(counted) == (
        "1 recorded, 2 replayed, 3 predicted, 1 not predicted, 1 out of date; 17 s saved."
    )


def test_cache_lists_and_deletes_code_and_names_a_folder_that_others_can_write_to(shell) -> None:
    assert ": 0 B" in shell.run("%speedkit cache")
    (compile_cache.prepare() / compile_cache.COMPILED / "code.py").write_bytes(b"code")
    assert ": 4 B" in shell.run("%speedkit cache status")
    assert "Deleted 4 B of compiled code" in shell.run("%speedkit cache clear")
    compile_cache.prepare()
    compile_cache.root().chmod(0o777)
    assert "neither saved nor loaded: other users can write to" in shell.run("%speedkit cache")
