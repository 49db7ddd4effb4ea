"""Test `gemm`, which chooses the library that multiplies float32 matrices on CPUs."""

import warnings

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, SpeedConfig, SpeedKitError, apply_speedups, code, plan
from speedkit_jupyter.catalog import gemm as entry
from speedkit_jupyter.machines import flags, gemm_rates
from speedkit_jupyter.machines.gemm_rates import GemmRates
from speedkit_jupyter.torchglue import private as torch_private

SLOW_BLAS = GemmRates(blas=2e11, onednn=4.3e11)
EQUAL = GemmRates(blas=4.2e11, onednn=4.3e11)


def with_rates(rates: GemmRates | None) -> Hardware:
    machine = Hardware.from_json("cpu")
    return machine.model_copy(update={"cpu": machine.cpu.model_copy(update={"gemm": rates})})


@pytest.fixture
def by_onednn(monkeypatch) -> list[torch.Size]:
    """Return a list that collects the shapes of the products that oneDNN computes."""
    product, shapes = torch_private.linear_by_onednn(), []

    def counted(x, weight, *more):
        # A strided weight would get oneDNN's reference kernel, over 200 times as slow.
        assert weight.is_contiguous() or weight.t().is_contiguous()
        shapes.append(x.shape)
        return product(x, weight, *more)

    monkeypatch.setattr(torch_private, "linear_by_onednn", lambda: counted)
    return shapes


@pytest.fixture
def onednn(monkeypatch):
    """Let oneDNN compute products of every size, so that tests can use small matrices."""
    monkeypatch.setattr(gemm_rates, "LEAST_PRODUCT", 1)
    gemm_rates.use(gemm_rates.ONEDNN)
    yield
    gemm_rates.use(gemm_rates.BLAS)


def test_auto_offers_what_is_faster_here_and_turns_nothing_on():
    decision = plan(SpeedConfig(), with_rates(SLOW_BLAS), Facts())["gemm"]
    assert (decision.active, decision.worth_measuring) == (False, "onednn")
    assert "430 GFLOP/s" in decision.reason
    assert "200" in decision.reason
    for rates in (EQUAL, None, GemmRates(failure="signal 8")):
        decision = plan(SpeedConfig(), with_rates(rates), Facts())["gemm"]
        assert (decision.active, decision.worth_measuring) == (False, None)


@pytest.mark.parametrize(
    ("facts", "wish", "rates", "why"),
    [
        (Facts(device="cuda:0"), {}, SLOW_BLAS, "for CPUs"),
        (Facts(), {"precision": "bf16"}, SLOW_BLAS, "no float32 product inside bf16 autocast"),
        (Facts(parameters=1, dtypes=("float64",)), {}, SLOW_BLAS, "parameters are float64"),
        (Facts(), {}, GemmRates(failure="ended with signal 8"), "signal 8"),
    ],
)
def test_it_is_declined_where_it_means_nothing_or_died(facts, wish, rates, why):
    decision = plan(SpeedConfig(gemm="onednn", **wish), with_rates(rates), facts)["gemm"]
    assert decision.declined
    assert why in decision.reason


def test_by_request_on_a_machine_that_was_never_measured_it_is_measured_first(monkeypatch):
    dies = GemmRates(failure="oneDNN ended its process with signal 8")
    monkeypatch.setattr(gemm_rates, "_measure", lambda *given: dies)
    entry._require_onednn.cache_clear()
    kernels = set(torch.library._impls)
    with pytest.raises(SpeedKitError, match="signal 8"):
        apply_speedups(nn.Linear(2, 2), SpeedConfig(gemm="onednn").alone())
    assert set(torch.library._impls) == kernels


def test_it_acts_until_restored_and_training_is_the_same_within_rounding(monkeypatch, by_onednn):
    monkeypatch.setattr(entry, "_require_onednn", lambda: None)  # accept any rates

    def trained(config: SpeedConfig) -> tuple[list[torch.Tensor], str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(256, 256)
        with apply_speedups(model, config, optimizer=optimizer)[1]:
            library = gemm_rates.in_use()
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()], library

    plain, first = trained(SpeedConfig().alone())
    assert not by_onednn
    found, second = trained(SpeedConfig(gemm="onednn").alone())
    assert (first, second, gemm_rates.in_use()) == ("blas", "onednn", "blas")
    assert by_onednn
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-6)


def test_where_the_user_switches_onednn_off_products_are_torchs_own(by_onednn, onednn):
    a = torch.randn(200, 200)
    a @ a
    with torch.backends.mkldnn.flags(enabled=False):
        off = a @ a
    assert by_onednn == [a.shape]
    gemm_rates.use(gemm_rates.BLAS)
    assert torch.equal(off, a @ a)


def test_kernels_of_the_users_own_are_not_replaced():
    mine = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine.impl("mm", lambda a, b: torch.zeros(a.shape[0], b.shape[1]), "CPU")
    try:
        with pytest.raises(SpeedKitError, match="replaced torch's kernels: aten/mm"):
            apply_speedups(nn.Linear(2, 2), SpeedConfig(gemm="onednn").alone())
        assert not (torch.ones(300, 300) @ torch.ones(300, 300)).any()
    finally:
        mine._destroy()
    assert gemm_rates.in_use() == "blas"


LAYOUTS = {
    "plain": lambda rows, columns: torch.randn(rows, columns),
    "transposed": lambda rows, columns: torch.randn(columns, rows).t(),
    "one row": lambda rows, columns: torch.randn(1, columns).expand(rows, columns),
    "one column": lambda rows, columns: torch.randn(rows, 1).expand(rows, columns),
    "every second column": lambda rows, columns: torch.randn(rows, 2 * columns)[:, ::2],
    "part of a column": lambda rows, columns: torch.randn(columns, rows + 5)[:, 3:-2].t(),
    "a head": lambda rows, columns: torch.randn(rows, 4, columns)[:, 1],
}
SHAPES = [(1, 1, 1), (1, 7, 5), (5, 1, 7), (33, 17, 65), (0, 3, 4), (3, 0, 4), (3, 4, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_of_every_shape_are_torchs_within_rounding(by_onednn, onednn, shape, layout):
    m, k, n = shape
    matrix = LAYOUTS[layout]
    a, b, row, full = matrix(m, k), matrix(k, n), torch.randn(n), torch.randn(m, n)
    wide = a.double() @ b.double()
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(a @ b, wide.float(), **close)
    torch.testing.assert_close(torch.addmm(row, a, b), (wide + row).float(), **close)
    torch.testing.assert_close(torch.addmm(full, a, b), (wide + full).float(), **close)
    scaled = torch.addmm(full, a, b, beta=0.5, alpha=2)
    torch.testing.assert_close(scaled, (0.5 * full + 2 * wide).float(), **close)
    nothing = torch.addmm(torch.full((m, n), float("nan")), a, b, beta=0)
    torch.testing.assert_close(nothing, wide.float(), **close)
    for out in (torch.empty(m, n), torch.empty(n, m).t(), torch.empty(0)):
        assert torch.mm(a, b, out=out) is out
        torch.testing.assert_close(out, wide.float(), **close)
        assert torch.addmm(row, a, b, out=out) is out
        torch.testing.assert_close(out, (wide + row).float(), **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64])
def test_other_dtypes_are_torchs_own(onednn, dtype):
    a = torch.ones(40, 40, dtype=dtype)
    assert (a @ a).dtype is dtype
    assert torch.equal(a @ a, torch.full((40, 40), 40, dtype=dtype))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a: torch.mm(a, torch.ones(4, 5)),
        lambda a: torch.mm(a, torch.ones(3)),
        lambda a: torch.mm(a, a.double()),
        lambda a: torch.addmm(torch.ones(7), a, a),
        lambda a: torch.addmm(torch.ones(3).expand(5, 3), a, a),
        lambda a: torch.mm(a, a, out=torch.empty(3, 3, dtype=torch.float64)),
    ],
)
def test_what_is_wrong_is_said_as_torch_says_it(onednn, wrong):
    with pytest.raises(RuntimeError) as found:
        wrong(torch.ones(3, 3))
    gemm_rates.use(gemm_rates.BLAS)
    with pytest.raises(RuntimeError) as plain:
        wrong(torch.ones(3, 3))
    assert str(found.value) == str(plain.value)


def test_inference_mode_vmap_fake_tensors_and_subclasses_go_through(onednn):
    from torch._subclasses import FakeTensorMode

    a = torch.randn(8, 8)
    with torch.inference_mode():
        assert (a @ a).is_inference()
    batch = torch.randn(3, 8, 8)
    vmapped = torch.func.vmap(lambda one: one @ a)(batch)
    torch.testing.assert_close(vmapped, torch.stack([one @ a for one in batch]))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(a)
        assert (fake @ fake).shape == (8, 8)

    class Mine(torch.Tensor):
        pass

    assert type(a.as_subclass(Mine) @ a) is Mine


@pytest.mark.filterwarnings("ignore:Warning only once")
def test_the_code_to_take_along_does_the_same(monkeypatch):
    monkeypatch.setattr(gemm_rates, "known", lambda machine: SLOW_BLAS)
    source = code(plan(SpeedConfig(gemm="onednn").alone(), with_rates(SLOW_BLAS), Facts()))
    setup = source[source.index("gemm = ") : source.index("def predict")]
    a, row, plain = torch.randn(256, 256), torch.randn(256), torch.nn.Linear(256, 256)
    products = {
        "mm": lambda: a @ a.t(),
        "strided": lambda: a @ torch.cat([a, a], 1)[:, ::2],
        "mm.out": lambda: torch.mm(a, a, out=torch.empty(256, 256)),
        "addmm": lambda: plain(a),
        "expanded": lambda: torch.addmm(row.expand(256, 256), a, a),
        "addmm.out": lambda: torch.addmm(row, a, a, out=torch.empty(256, 256)),
        "full": lambda: torch.addmm(a, a, a),
        "scaled": lambda: torch.addmm(row, a, a, alpha=2),
        "double": lambda: a.double() @ a.double(),
        "small": lambda: a[:2] @ a,
    }
    before = {name: product() for name, product in products.items()}
    calls: list[object] = []

    def counted(*given):
        calls.append(given)
        return torch_private.linear_by_onednn()(*given)

    names: dict[str, object] = {"torch": torch, "counted": counted}
    exec(setup.replace(torch_private.ONEDNN_LINEAR, "counted"), names)
    after, by_onednn = {}, []
    try:
        for name, product in products.items():
            after[name] = product()
            by_onednn += [name] * len(calls)
            calls.clear()
        with pytest.raises(RuntimeError, match="size"):
            a @ torch.ones(3)
    finally:
        del names["gemm"]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert by_onednn == ["mm", "strided", "mm.out", "addmm", "expanded", "addmm.out"]
    assert flags.snapshot()["gemm"] == "blas"
    assert torch.equal(a @ a.t(), before["mm"])


@pytest.mark.compile
@pytest.mark.slow
def test_compiled_code_goes_through_it_too(by_onednn, onednn):
    linear, x = nn.Linear(256, 256), torch.randn(3, 256, 256, requires_grad=True)
    compiled, calls = torch.compile(linear), []
    for library in (gemm_rates.BLAS, gemm_rates.ONEDNN):
        gemm_rates.use(library)
        found = compiled(x)
        calls.append((found, *torch.autograd.grad(found.square().sum(), x)))
        assert bool(by_onednn) == (library == gemm_rates.ONEDNN)
    torch.testing.assert_close(*calls, rtol=1e-4, atol=1e-3)
