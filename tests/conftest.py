"""What every test shares: the machine of `--profile`, and process-wide state that is left clean."""

import argparse
import functools
import gc
import itertools
import os
import random
import signal
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import examples
import pytest
from made_time import MadeTime
from made_time import installed as clock_installed

from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines import hardware as detection
from speedkit_jupyter.machines.hardware import Hardware

examples.register()

# Inductor asks the C++ compiler which vector instructions work, for seconds in every process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# What was compiled for one test serves the others, in this run and in later ones.
USER = os.getuid() if hasattr(os, "getuid") else os.getlogin()
# torch's keys for compiled code leave out which instructions it may use.
ALLOWED = os.environ.get("ATEN_CPU_CAPABILITY", "")
COMPILED = Path(tempfile.gettempdir(), f"speedkit_tests_{USER}{ALLOWED}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# As many threads as the machines of the profiles have cores, so that plans leave them alone.
os.environ["OMP_NUM_THREADS"] = "2"

# Two test processes share the cores: threads that spin while they wait would stall each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts the tests in the background has them ignore Ctrl-C, which some are about.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REALLY_INSTALLED = detection.installed_versions

# The machine that is planned for under `pytest --profile NAME`, and the precision that its rule
# takes where it is not the machine's own. Everything must hold under each of them, wherever it
# runs: bf16 works without the units too, slowly, and fp16 with torch's GradScaler for CPUs.
PROFILES = {
    "cpu": ("cpu", ""),
    "bf16": ("cpu_avx512_bf16", "bf16"),
    "fp16": ("cpu", "fp16"),
    "one_core": ("one_core", ""),
    "here": ("", ""),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/plans --regenerate-plans` writes what follows from the catalog anew."""
    parser.addoption(
        "--regenerate-plans",
        action="store_true",
        help="write tests/plans/decisions.yaml and configs/auto.yaml",
    )
    parser.addoption(
        "--profile",
        default="cpu",
        type=_profiles,
        help=f"machines that plans are made for, by comma: {', '.join(PROFILES)}",
    )


def _profiles(names: str) -> list[str]:
    if unknown := set(names.split(",")) - set(PROFILES):
        raise argparse.ArgumentTypeError(f"there is no profile {', '.join(sorted(unknown))}")
    return names.split(",")


def pytest_configure(config: pytest.Config) -> None:
    """The first profile, for kernels and servers too that start before any test does."""
    for name in [name for name in os.environ if name.startswith("SPEEDKIT_")]:
        del os.environ[name]
    os.environ["SPEEDKIT_HARDWARE"] = PROFILES[config.getoption("--profile")[0]][0]


def pytest_report_header(config: pytest.Config) -> str:
    """Say which machine the tests plan for: it need not be the one that they run on."""
    return f"plans are made for: {', '.join(config.getoption('--profile'))} (--profile)"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Under several profiles a test may run as on each machine."""
    profiles = metafunc.config.getoption("--profile")
    if len(profiles) > 1:
        metafunc.parametrize("profile", profiles, indirect=True)


def _on_its_machines(items: list[pytest.Item], profiles: list[str]) -> Iterator[pytest.Item]:
    """Under several profiles: tests for `every_machine` on each, others on one, always the same."""
    for item in items:
        function = cast(pytest.Function, item)
        indices = {**function.callspec.indices}
        which = indices.pop("profile")
        alike = f"{item.path.name} {function.originalname} {sorted(indices.items())}"
        own = zlib.crc32(alike.encode()) % len(profiles)
        if which == own or item.get_closest_marker("every_machine"):
            yield item


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of `sampled` lists most are thorough; `gpu` tests are skipped where there is no CUDA."""
    if len(profiles := config.getoption("--profile")) > 1:
        items[:] = _on_its_machines(items, profiles)
    counts: Counter[object] = Counter()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) is not None:
            function = getattr(item, "function", None)
            if counts[function] % sampled.args[0]:
                item.add_marker(pytest.mark.thorough)
            counts[function] += 1
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        return
    one = torch.zeros(1, 1, 1, 8, device="cuda")  # the first call sets torch's order of kernels
    torch.nn.functional.scaled_dot_product_attention(one, one, one)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """What libraries have loaded is no garbage: looking for some would take half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that is not there yet, another for each test: to make it would take some time."""
    root = tmp_path_factory.mktemp("data")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, data_folders: Iterator[Path]) -> None:
    """Saved results and the terminal of the one who runs the tests decide nothing here."""
    monkeypatch.setenv("SPEEDKIT_DATA", str(next(data_folders)))
    monkeypatch.setenv("COLUMNS", "200")


@functools.cache
def installed(names: tuple[str, ...]) -> dict[str, str]:
    """What `detection.installed_versions` says, asked once: no test installs a library."""
    return REALLY_INSTALLED(names)


@pytest.fixture(autouse=True)
def no_search_for_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through all of the environment, each time that a test plans for a machine."""
    monkeypatch.setattr(detection, "installed_versions", lambda of: dict(installed(tuple(of))))


@pytest.fixture(autouse=True)
def profile(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    """What the profile changes for the test, to be undone where the test pins another machine."""
    name = getattr(request, "param", request.config.getoption("--profile")[0])
    hardware, precision = PROFILES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEEDKIT_HARDWARE", hardware)
        if precision:
            from speedkit_jupyter.catalog import precision as entry

            by_profile = precision, "by the profile of the tests", True
            patch.setattr(entry, "_on_cpu", lambda hardware: by_profile)
        yield patch


@pytest.fixture
def machine(monkeypatch, profile) -> Callable[[str], Hardware]:
    """`machine("t4")`: from here on the test plans as for that one, whatever the profile."""

    def pin(name: str) -> Hardware:
        profile.undo()
        monkeypatch.setenv("SPEEDKIT_HARDWARE", name)
        return Hardware.current()

    return pin


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, profile: pytest.MonkeyPatch) -> None:
    """For the tests whose subject is this very machine."""
    profile.undo()
    monkeypatch.delenv("SPEEDKIT_HARDWARE", raising=False)


@pytest.fixture(autouse=True)
def clean_flags() -> Iterator[None]:
    """Put all flags back, then assert that the test left none changed and no plan applied."""
    before = flags.snapshot()
    yield
    changes = flags.diff(before, flags.snapshot())
    layers = len(flags.OVERRIDES._layers)
    if "speedkit_jupyter.plans.context" in sys.modules:
        from speedkit_jupyter.plans.context import restore_all

        restore_all()
    flags.OVERRIDES._layers.clear()
    flags.OVERRIDES._originals.clear()
    if changes:
        flags.restore(before)
    assert not changes, f"the test left flags changed: {changes}"
    assert not layers, f"the test left {layers} overrides applied"


@pytest.fixture
def changing_flags(clean_flags: None) -> Iterator[None]:
    """For tests that play a user who sets flags: puts all of them back."""
    before = flags.snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its old TF32 API is deprecated
        yield
    flags.restore(before)


@pytest.fixture(autouse=True)
def made_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MadeTime | None:
    """Steps take what they sleep on this clock, and 5 ms each where nothing sleeps."""
    return clock_installed(request, monkeypatch, tick_s=5e-3)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """For each test, whichever others its process has run before."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # torch.manual_seed would note a call for later, with its stack
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tiny steps: two threads that wait for one another would take longer than the steps."""
    import torch

    found = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(found)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Forget compiled code before the test and after it."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A group of torch.distributed that has this process alone."""
    from torch import distributed

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def two_threads(one_thread: None) -> None:
    """For what is about the number of threads."""
    import torch

    torch.set_num_threads(2)


@pytest.fixture
def trusted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take each variant for right, which saves most of the time; `checked` tests check results."""
    from speedkit_jupyter.right.judge import Accuracy
    from speedkit_jupyter.rounds.accuracy_check import AccuracyCheck

    if not request.node.get_closest_marker("checked"):
        exact = Accuracy("exact")
        monkeypatch.setattr(AccuracyCheck, "check", lambda self, runner: exact)
        monkeypatch.setattr(AccuracyCheck, "baseline_accuracy", exact)


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are the machine's own affair, and compiling takes long: neither is tried."""
    from speedkit_jupyter.catalog.compile import Compile
    from speedkit_jupyter.catalog.threads import Threads

    for one in (Compile, Threads):
        monkeypatch.setattr(one, "candidates", lambda self, hardware, facts: ())


@pytest.fixture
def hardware() -> Callable[[str], Hardware]:
    """`hardware("t4")` is the machine of that name, for tests that plan by hand."""
    return Hardware.from_json
