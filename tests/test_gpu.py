"""What only a CUDA device can show. Skipped elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import Hardware, SpeedConfig, apply_speedups, benchmark

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("made_time")]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 8 * 8, 10),
    )  # fmt: skip


def train(model: nn.Module, optimizer, context, steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(16, 3, 8, 8, generator=generator).to(context.device)
    y = torch.randint(10, (16,), generator=generator).to(context.device)
    for _ in range(steps):
        with context.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        context.grad_scaler.scale(loss).backward()
        context.grad_scaler.step(optimizer)
        context.grad_scaler.update()
        optimizer.zero_grad()


def test_detect_sees_the_gpu_as_torch_does():
    gpu = Hardware.detect().accelerator("cuda")
    assert gpu is not None
    assert gpu.name == torch.cuda.get_device_name(0)
    assert gpu.capability == torch.cuda.get_device_capability(0)


@pytest.mark.parametrize("with_state", [False, True])
def test_auto_moves_model_and_optimizer_there_and_back(with_state):
    model = network()
    buffers = [id(buffer) for buffer in model.buffers()]
    parameters = [id(parameter) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    if with_state:
        model(torch.rand(2, 3, 8, 8)).sum().backward()
        optimizer.step()
    _, context = apply_speedups(model, SpeedConfig(compile=False), optimizer=optimizer)
    assert context.device.type == "cuda"
    train(model, optimizer, context)
    context.restore()
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [v for state in optimizer.state.values() for v in state.values()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert buffers == [id(buffer) for buffer in model.buffers()]
    assert parameters == [id(parameter) for parameter in model.parameters()]
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    optimizer.step()  # the plain optimizer goes on with the state that it got


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_the_documented_loop_trains_at_every_precision(precision, make):
    plain, fast = network().cuda(), network().cuda()
    for model, config in (
        (plain, SpeedConfig(precision="fp32", fused_optimizer=False, channels_last=False,
                            compile=False, tf32="highest")),
        (fast, SpeedConfig(precision=precision, compile=False)),
    ):  # fmt: skip
        optimizer = make(model.parameters(), lr=3e-3)
        with apply_speedups(model, config, optimizer=optimizer)[1] as context:
            train(model, optimizer, context)
    for one, other in zip(plain.parameters(), fast.parameters(), strict=True):
        assert torch.allclose(one, other, atol=0.05)


@pytest.mark.parametrize(
    ("name", "value", "is_on"),
    [
        ("tf32", "high", lambda: torch.backends.cuda.matmul.allow_tf32),
        ("cudnn_benchmark", True, lambda: torch.backends.cudnn.benchmark),
    ],
)
def test_a_switch_is_set_and_put_back(name, value, is_on):
    model = nn.Conv2d(1, 1, 3).cuda()
    with apply_speedups(model, SpeedConfig(**{name: value, "compile": False}))[1] as context:
        if not context.plan[name].active:
            pytest.skip(context.plan[name].reason)
        assert is_on()
    assert not is_on()


@pytest.mark.compile
def test_auto_compiles_on_linux_and_trains():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with apply_speedups(model, optimizer=optimizer)[1] as context:
        train(model, optimizer, context)
        assert not context.notes
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "math"])
def test_every_attention_kernel_runs_what_the_others_can_take(backend):
    model = nn.TransformerEncoderLayer(64, 4, batch_first=True).cuda()
    mask = torch.zeros(16, 16, device="cuda")
    config = SpeedConfig(sdpa=backend, precision="fp16", compile=False)
    with apply_speedups(model, config)[1] as context, context.autocast():
        assert model(torch.rand(2, 16, 64, device="cuda")).isfinite().all()
        assert model(torch.rand(2, 16, 64, device="cuda"), mask).isfinite().all()


def test_a_comparison_has_the_memory_that_the_allocator_reserved(shell_on_gpu):
    shell_on_gpu.run_cell(
        "%%speedbench -q -v found --compare baseline,bf16 --budget 10\nmodel(x).sum().backward()"
    )
    for record in shell_on_gpu.user_ns["found"].records:
        assert record.memory.peak_bytes > record.memory.state_bytes


@pytest.fixture
def shell_on_gpu():
    """A plain IPython shell with a model on the GPU."""
    from IPython.testing.globalipapp import get_ipython

    shell = get_ipython()
    shell.run_line_magic("load_ext", "speedkit_jupyter")
    shell.user_ns.update(model=network().cuda(), x=torch.rand(16, 3, 8, 8, device="cuda"))
    yield shell
    shell.run_line_magic("unload_ext", "speedkit_jupyter")


def test_copies_that_do_not_fit_lie_in_main_memory(monkeypatch):
    from speedkit_jupyter.step import memory

    monkeypatch.setattr(memory, "LEAST_FREE", 1.0)
    model, x = network().cuda(), torch.rand(16, 3, 8, 8, device="cuda")
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    benchmark(step, "baseline,channels_last", budget_s=0.5)
    assert all(map(torch.equal, before, model.parameters()))
    assert next(model.parameters()).device.type == "cuda"
