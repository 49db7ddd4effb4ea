"""Test the package on an accelerator: a GPU, or the device of sim.cpp (`make device`)."""

import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import speedkit_jupyter as sk
from speedkit_jupyter import Hardware, SpeedConfig, apply_speedups, benchmark
from speedkit_jupyter.extras.auto import run_watch
from speedkit_jupyter.extras.auto.auto import Auto
from speedkit_jupyter.extras.autotune import ranking
from speedkit_jupyter.extras.data import batch_sizes
from speedkit_jupyter.extras.rollouts import way_choice
from speedkit_jupyter.machines import devices
from speedkit_jupyter.notebook import session
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.rounds import busy_machine, clock, timing
from speedkit_jupyter.step import memory

KIND = "sim" if "sim" in sys.modules else "cuda"
pytestmark = [pytest.mark.usefixtures("here", "made_time")]
if KIND == "cuda":
    pytestmark.append(pytest.mark.gpu)
KERNEL_S = 1e-3


class Training:
    def __init__(self, device: str = KIND) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
            nn.Flatten(), nn.Linear(4 * 8 * 8, 10),
        ).to(device)  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x, self.y = torch.rand(4, 3, 8, 8).to(device), torch.arange(4).to(device)

    def on(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def step(self) -> torch.Tensor:
        return self.on(self.x, self.y)

    def tensors(self) -> list[torch.Tensor]:
        states = self.optimizer.state.values()
        found = [*self.model.parameters(), *self.model.buffers()]
        return found + [value for state in states for value in state.values()]

    def values(self) -> list[torch.Tensor]:
        return [tensor.cpu().clone() for tensor in self.tensors()]


@pytest.fixture
def training() -> Training:
    made = Training()
    made.step()
    return made


@pytest.fixture
def sim():
    if KIND == "cuda":
        pytest.skip("needs the device that sim.cpp imitates")
    yield sys.modules["sim"]
    sys.modules["sim"].reset()


def test_detect_sees_it_as_torch_does():
    gpu = Hardware.detect().accelerator(KIND)
    assert gpu.memory_bytes == torch.get_device_module(KIND).mem_get_info()[1]


@pytest.mark.parametrize("with_state", [False, True])
def test_auto_moves_model_gradients_and_optimizer_there_and_back(with_state):
    made = Training("cpu")
    if with_state:
        made.step()
        made.model(made.x).sum().backward()
    before, objects = made.values(), [id(one) for one in made.tensors()]
    config = SpeedConfig(compile=False)
    with apply_speedups(made.model, config, optimizer=made.optimizer)[1] as context:
        assert context.device.type == KIND
        assert {one.device.type for one in made.model.parameters()} == {KIND}
        assert all(map(torch.equal, before, made.values()))
    assert objects == [id(one) for one in made.tensors()]
    gradients = [one.grad for one in made.model.parameters() if with_state]
    assert {one.device.type for one in (*made.tensors(), *gradients)} == {"cpu"}
    made.step()  # the optimizer continues with the state it got back


def test_a_model_that_does_not_fit_is_put_back_whole(sim):
    made = Training("cpu")
    before = made.values()
    sim.reset(limit=sim.memory_allocated() + 600)
    with pytest.raises(torch.OutOfMemoryError):
        apply_speedups(made.model, optimizer=made.optimizer)
    assert {one.device.type for one in made.tensors()} == {"cpu"}
    assert all(map(torch.equal, before, made.values()))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_the_documented_loop_trains_at_every_precision(precision, make):
    trained = []
    plain = {"precision": "fp32", "tf32": "highest"}
    plain |= dict.fromkeys(("fused_optimizer", "channels_last"), False)
    for config in (plain, {"precision": precision}):
        made = Training()
        made.model[3].p = 0.0  # other layouts draw other dropout masks
        made.optimizer = make(made.model.parameters(), lr=3e-3)
        config = SpeedConfig(compile=False, **config)
        with apply_speedups(made.model, config, optimizer=made.optimizer)[1] as context:
            for _ in range(3):
                with context.autocast():
                    loss = nn.functional.cross_entropy(made.model(made.x), made.y)
                context.grad_scaler.scale(loss).backward()
                context.grad_scaler.step(made.optimizer)
                context.grad_scaler.update()
                made.optimizer.zero_grad()
            with context.autocast():
                dtype = made.model(made.x).dtype
        trained.append([*made.model.parameters()])
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}
    assert dtype is low.get(precision, torch.float32)
    assert all(torch.allclose(*pair, atol=0.05) for pair in zip(*trained, strict=True))


@pytest.mark.parametrize("is_known", [True, False])
def test_random_numbers_come_back_whether_the_kind_is_known_or_not(training, monkeypatch, is_known):
    if not is_known:
        monkeypatch.delitem(devices.KINDS, KIND)
    module = torch.get_device_module(KIND)
    before = module.get_rng_state()
    found = benchmark(training.step, "baseline", budget_s=0.5)
    assert (f"{KIND}:0" in str(found)) == (not is_known)  # a known kind has its chip's name
    assert torch.equal(module.get_rng_state(), before)
    sk.check(torch.relu, lambda x: x.clamp(0), lambda size: [torch.rand(size, device=KIND)])
    assert torch.equal(module.get_rng_state(), before)


@pytest.fixture
def late(sim, made_time):
    """Make a kernel take KERNEL_S seconds. The simulated clock moves when code waits for it."""
    sim.reset(KERNEL_S, nap=made_time.sleep)
    return made_time


def test_a_time_holds_the_kernels_that_a_step_only_launches(late):
    x = torch.rand(3, 3, device="sim")
    torch.accelerator.synchronize()
    launched_s = late.now_s()
    x.relu()
    assert late.now_s() == launched_s
    assert clock.timed(lambda: [x.relu() for _ in range(7)], x.device) > 8 * KERNEL_S
    watch = timing.Stopwatch(x.device, late.perf_counter, busy_machine.Interruptions())
    watch.begin()
    x.relu()
    watch.end()
    assert watch.wall_s > KERNEL_S


def test_a_benchmark_times_each_variants_own_kernels_and_puts_back_every_value(training, late):
    before = training.values()

    def times_s(calls: int) -> list[float]:
        step = lambda: [training.model(training.x) for _ in range(calls)]  # noqa: E731
        return benchmark(step, "baseline", model=training.model, budget_s=2).records[0].times_s

    assert min(times_s(3)) > 2 * max(times_s(1)) > 10 * KERNEL_S
    assert all(map(torch.equal, before, training.values()))


def test_the_peak_of_a_step_is_the_allocators(sim):
    x = torch.rand(256, 256, device="sim")
    assert memory.needed(lambda: (x + 1).sum(), x.device, [x]).peak_bytes == 2 * x.nbytes + 4
    free = sim.mem_get_info()[0]
    assert memory.fits(free // 4, x.device)
    assert not memory.fits(free, x.device)


def test_copies_that_do_not_fit_lie_in_main_memory(training, monkeypatch):
    monkeypatch.setattr(memory, "LEAST_FREE", 1.0)
    before = training.values()
    found = benchmark(training.step, "baseline,channels_last", budget_s=0.5)
    assert all(record.memory.peak_bytes > record.memory.state_bytes for record in found.records)
    assert all(map(torch.equal, before, training.values()))
    assert next(training.model.parameters()).device.type == KIND


def test_a_step_that_runs_out_of_memory_leaves_all_as_it_was(training, sim):
    before = training.values()
    sim.reset(limit=2**24)
    step = lambda: (training.step(), torch.empty(2**28, device="sim"))  # noqa: E731
    with pytest.raises(torch.OutOfMemoryError):
        benchmark(step, "baseline", budget_s=1)
    assert all(map(torch.equal, before, training.values()))


def test_a_profile_has_copies_and_waiting_and_a_busy_share_only_if_kernels_are_seen(training):
    def step() -> None:
        x = torch.rand(4, 3, 8, 8).to(KIND)
        training.on(x, training.y).item()

    found = sk.profile(step, budget_s=3)
    shares = found.shares()
    assert min(shares[part] for part in ("host to device", "backward", "synchronizations")) > 0
    assert any(one.call == "item" for one in found.waits())
    assert ("The device was busy" in str(found)) == (KIND == "cuda")


def test_batches_grow_until_the_device_is_full(training, sim):
    sim.reset(limit=2**22)
    given = training.x, training.y
    *_, last = sk.batch_sizes(training.on, given, sizes=(4, 4096), budget_s=5).rows()
    assert "memory" in last["note"]
    assert last["batch"] < 4096
    assert next(training.model.parameters()).device.type == "sim"


def test_a_micro_batch_under_the_devices_autocast_is_as_close_as_halves_are():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(KIND)
    x = 100 * torch.rand(32, 64).to(KIND)
    with torch.autocast(KIND, dtype=torch.bfloat16):
        loss = sk.micro_batch(lambda x: model(x).mean(), 3)(x)
        assert torch.allclose(loss.float(), model(x).mean().float(), rtol=0.05)


def test_a_loader_pins_its_batches_for_the_device(training):
    loader = DataLoader(TensorDataset(training.x.cpu(), training.y.cpu()), batch_size=2)

    def step() -> None:
        for x, y in loader:
            training.on(x.to(KIND), y.to(KIND))

    found = sk.tune_loader(loader, step, budget_s=3)
    assert any(one.settings.pin_memory for one in found.tuning.race.ways)


def test_auto_reads_losses_after_the_device_has_computed_them(training, monkeypatch):
    seen, noted = [], run_watch.Signal.noted

    def note(signal, plan, value):
        seen.extend([value] * (signal._name == "loss"))
        return noted(signal, plan, value)

    monkeypatch.setattr(run_watch.Signal, "noted", note)
    monkeypatch.setattr(run_watch.Memory, "noted", lambda *_: "memory grew" * (len(seen) > 30))
    monkeypatch.setattr(run_watch, "EVERY", 1)
    monkeypatch.setattr(run_watch, "APART_S", 0.0)
    auto = Auto(say=lambda line: None)
    auto.begin()
    try:
        auto.begin_cell()
        truth = [training.step().item() for _ in range(40)]
    finally:
        auto.end()
    assert len(seen) > 20
    assert set(seen) <= set(truth)
    assert not applied_to(training.model)


def test_a_device_without_counters_is_measured_without_them(training, monkeypatch):
    module, where = torch.get_device_module(KIND), torch.device(KIND)
    assert batch_sizes.free_bytes(where) > 0
    for name in ("mem_get_info", "max_memory_allocated"):  # torch.mps lacks both
        monkeypatch.delattr(module, name)
    assert batch_sizes.free_bytes(where) is None
    assert memory.needed(training.step, where, training.model.parameters()).peak_bytes is None
    assert run_watch.used_bytes(where) == module.memory_allocated()
    monkeypatch.setattr(module, "current_allocated_memory", lambda: 7, raising=False)
    monkeypatch.delattr(module, "memory_allocated")
    assert run_watch.used_bytes(where) == 7


def test_samples_on_the_device_keep_their_loader_in_this_process(training):
    loader = DataLoader(TensorDataset(training.x, training.y), batch_size=2)
    found = sk.tune_loader(loader, lambda: [training.on(x, y) for x, y in loader], budget_s=2)
    assert KIND in found.tuning.declined


def test_the_device_is_named_for_rollouts_and_recorded_searches():
    assert way_choice.has_bf16(torch.device(KIND)) == Hardware.detect().accelerator(KIND).bf16
    assert ranking.device_of(torch.device(KIND)).name != ranking.device_of(torch.device("cpu")).name
    assert ranking.device_of().name


@pytest.fixture
def shell(training):
    from IPython.testing.globalipapp import get_ipython

    shell = get_ipython()
    shell.run_line_magic("load_ext", "speedkit_jupyter")
    shell.user_ns.update(model=training.model, train_step=training.step)
    session.begin(shell.user_ns)
    yield shell
    shell.run_line_magic("unload_ext", "speedkit_jupyter")


def test_the_panel_measures_applies_and_restores(shell):
    panel = sk.Panel(shell.user_ns["model"], step="train_step", budget_s=0.5)
    panel.buttons["Measure"].click()
    assert panel.result is not None, panel.status.value
    assert Hardware.detect().accelerators[0].name in str(panel.result)
    panel.buttons["Apply"].click()
    panel.buttons["Restore"].click()
    assert "Nothing is applied" in panel.state.value


def test_the_magics_name_the_device_and_its_memory(shell, capsys):
    shell.run_line_magic("speedkit", "apply model --compile false")
    shell.run_line_magic("speedkit", "free")
    said = capsys.readouterr().out
    assert Hardware.detect().accelerators[0].name in said
    assert f"{KIND}: " in said
