"""Test recording, replaying and predicting Inductor's kernel searches, here and for an H200."""

import itertools
import re
from dataclasses import asdict, replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from speedkit_jupyter.extras import autotune
from speedkit_jupyter.extras.autotune import tuner
from speedkit_jupyter.extras.autotune.ranking import LEAST_SEARCHES
from speedkit_jupyter.extras.autotune.tuner import Counted
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import SpeedKitError

SQUARE = (4096, 4096)
PRODUCTS = {
    "mm": (torch.mm, (SQUARE, SQUARE)),
    "addmm": (torch.addmm, ((4096,), SQUARE, SQUARE)),
    "bmm": (torch.bmm, ((8, 1024, 1024), (8, 1024, 1024))),
    "baddbmm": (torch.baddbmm, ((8, 1024, 1024),) * 3),
}
H200 = "NVIDIA-H200-matmul"
OFFERED = (21, 22)  # numbers of kernels in torch 2.11 and 2.13
INDUCTOR = "torch._inductor"
PROPERTIES = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9, minor=0)


class Config:
    """A stand-in for Triton's Config, which a torch that is built for CPUs lacks."""

    def __init__(self, kwargs, num_warps=4, num_stages=2, **more):
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


@pytest.fixture
def lowered(monkeypatch):
    """Return a function that has Inductor generate kernels for an H200, without loading them."""
    hints = import_module(f"{INDUCTOR}.runtime.hints")
    triton = import_module(f"{INDUCTOR}.template_heuristics.triton")
    if not hasattr(triton, "TritonConfig"):
        pytest.skip("this torch has Triton's own configs")
    handed = hints.DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, warp_size=32)
    numbers = itertools.count()
    import_module(f"{INDUCTOR}.select_algorithm").get_algorithm_selector_cache()  # before patches

    def loaded(*_, **__):
        return SimpleNamespace(key=f"kernel{next(numbers)}", __file__="kernel.py")

    given = {
        "torch.cuda.is_available": lambda: True,
        # A torch that is built for CUDA would start the driver.
        "torch._subclasses.fake_tensor.init_gpu_context": lambda *_: None,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.get_device_properties": lambda *_: PROPERTIES,
        "torch.utils._triton.triton_hash_with_backend": lambda: "",
        f"{INDUCTOR}.select_algorithm.PyCodeCache.load": loaded,
    }
    for name, value in given.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setattr(hints.DeviceProperties, "create", lambda *_: handed)
    monkeypatch.setattr(triton, "TritonConfig", Config)
    settings = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
    with torch._inductor.config.patch(**settings, compile_threads=1):
        yield _lowered
    autotune.off()


def _lowered(function, shapes, dtype=torch.bfloat16):
    """Lower one product of fake tensors, and return the kernels that Inductor would time."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = [torch.empty(*shape, dtype=dtype, device="cuda") for shape in shapes]
        graph = make_fx(function)(*inputs)
    numbers = []
    choose = import_module(f"{INDUCTOR}.select_algorithm").get_algorithm_selector_cache()

    def look(choices):
        numbers.append(choices)
        return choices[:1]

    choose.preprocessing_fns.append(look)
    try:
        lowering = GraphLowering(graph, example_inputs=inputs)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode):
            lowering.run(*inputs)
    finally:
        choose.preprocessing_fns.remove(look)
    return numbers[0]


def mm(m: int, n: int, k: int):
    return torch.mm, ((m, k), (k, n))


def cost(choice, shape) -> float:
    """Return a made-up time in ms, from the kernel's tile size and waves of tiles on an H200."""
    given = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", choice.description)}
    if not given:
        return 9.0
    (m, k), (_, n) = shape
    across, down = given["BLOCK_M"], given["BLOCK_N"]
    tiles = -(-m // across) * -(-n // down)
    waves = -(-tiles // 132)
    return waves * k * (across * down + 40 * (across + down)) * 1e-9 * (9 - given["num_warps"])


def searched(lowered, function, shapes) -> list:
    """Lower a product, report timings as Inductor's feedback hook would, and return the kernels."""
    choices = lowered(function, shapes)
    if len(choices) > 1:
        tuner.current()._measured({one: cost(one, shapes[-2:]) for one in choices})
    return choices


def recorded(lowered, number: int) -> None:
    autotune.record()
    sizes = [(m, n, k) for m in (256, 512, 1024, 2048) for n in (512, 1024, 3072)
             for k in (512, 2048)]  # fmt: skip
    for size in sizes[:number]:
        searched(lowered, *mm(*size))
    autotune.off()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_replay_leaves_one_of_all_kernels(lowered, name):
    autotune.record()
    choices = lowered(*PRODUCTS[name])
    assert len(choices) in OFFERED
    timings = {one: 1.0 + index % 7 for index, one in enumerate(choices)}
    timings[choices[5]] = 0.5
    tuner.current()._measured(timings)
    [kept] = database.kept("search", H200)
    assert kept.value["problem"]["op"] == name
    counted = autotune.record()  # reads the stored searches
    [left] = lowered(*PRODUCTS[name])
    assert left.description == choices[5].description
    assert (counted.replayed, counted.searched) == (1, 0)
    assert len(lowered(*PRODUCTS[name], torch.float16)) == len(choices)  # another dtype
    assert counted.replayed == 1


def test_an_entry_of_another_offer_is_stale_and_versions_are_apart(lowered, monkeypatch):
    autotune.record()
    choices = searched(lowered, *mm(512, 512, 512))
    current = tuner.current()
    [(key, entry)] = current._known.items()
    current._known[key] = replace(entry, offered=entry.offered[1:])
    assert len(lowered(*mm(512, 512, 512))) == len(choices)
    assert (current.counted.stale, current.counted.replayed) == (1, 0)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    counted = autotune.record()
    assert len(lowered(*mm(512, 512, 512))) == len(choices)
    assert counted.stale == 0


@pytest.mark.slow
def test_of_shapes_never_seen_few_kernels_are_timed(lowered):
    recorded(lowered, 24)
    choices = len(lowered(*mm(1536, 1024, 1024)))
    with autotune.predictions(confidence=0.5) as counted:
        assert len(searched(lowered, *mm(1536, 1024, 1024))) <= 3
        assert (counted.predictions, counted.fallbacks) == (1, 0)
        assert counted.mean_confidence >= 0.5
        far = lowered(*mm(65536, 1024, 1024))  # far from all that was recorded
        assert (len(far) >= choices, counted.fallbacks) == (True, 1)
    with autotune.predictions(confidence=1) as counted:
        assert len(lowered(*mm(1536, 1024, 512))) == choices
    assert counted.fallbacks == 1
    with autotune.predictions(confidence=1, fallback=False) as counted:
        assert len(lowered(*mm(1536, 1024, 512))) == 3
    assert tuner.current() is None
    [model] = autotune.models()
    assert model.calibration.right[-1] >= 0.9


def test_without_enough_searches_nothing_is_predicted(lowered, capsys):
    recorded(lowered, 2)
    with autotune.predictions() as counted:
        assert len(lowered(*mm(640, 640, 640))) in OFFERED
    assert (counted.predictions, counted.fallbacks) == (0, 1)
    said = "".join(capsys.readouterr())
    assert re.search(f"2 whole searches are recorded.*{LEAST_SEARCHES}", said)


def test_entries_that_are_damaged_are_left_out(lowered):
    recorded(lowered, 1)
    (model,) = autotune.models()
    database.keep("ranking", H200, model.versions, {"agreement": "high"})
    search = asdict(model.searches[0])
    for part in ({"output": 3}, {"left": "no"}, {"device": {"name": ""}}):
        database.keep("search", H200, str(part), {**search, "problem": search["problem"] | part})
    assert autotune.models() == [model]
    with autotune.predictions() as counted:
        lowered(*mm(512, 512, 512))
    assert tuner.current() is None
    assert counted.searched == 0


def test_an_error_of_ours_leaves_the_search_to_inductor(lowered, monkeypatch):
    autotune.record()
    monkeypatch.setattr("speedkit_jupyter.extras.autotune.ranking.problem_of", lambda _: 1 / 0)
    assert len(lowered(*mm(512, 512, 512))) in OFFERED
    assert "ZeroDivisionError" in tuner.current().problem


def test_options_are_checked():
    with pytest.raises(SpeedKitError, match="confidence must be from 0 to 1"):
        autotune.predictions(confidence=2).__enter__()


def compiled(model: nn.Module, x: torch.Tensor) -> Counted:
    """Compile a frozen model with an empty cache; return the counts of its searches."""
    torch._dynamo.reset()
    counted = autotune.record()
    try:
        fresh = torch._inductor.utils.fresh_inductor_cache()
        with torch.no_grad(), torch._inductor.config.patch(freezing=True), fresh:
            found = torch.compile(model, mode="max-autotune-no-cudagraphs")(x)
            torch.testing.assert_close(found, model(x), rtol=0.05, atol=0.5)
    finally:
        autotune.off()
    return counted


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_recorded_search_is_replayed(device):
    like = {"device": device, "dtype": torch.float32 if device == "cpu" else torch.bfloat16}
    model, x = nn.Linear(768, 512, bias=False, **like).eval(), torch.rand(1024, 768, **like)
    first = compiled(model, x)
    if first.searched == 0:
        pytest.skip("this device is offered one kernel only")
    [found] = autotune.models()
    assert found.name == autotune.detected(device)
    assert found.searches[0].problem.sizes == (1, 1024, 512, 768)
    assert len(found.searches[0].timings) > 1
    again = compiled(model, x)
    assert (again.searched, again.replayed) == (0, 1)
    assert again.seconds_saved == pytest.approx(found.searches[0].seconds)
