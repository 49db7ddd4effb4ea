"""Fixtures for all tests: plan for the machine of `--profile` and restore global state."""

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

# Skip Inductor's test compilation for vector instructions, which takes seconds in every process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Code that is compiled for one test is cached for other tests, in this run and in later runs.
USER = os.getuid() if hasattr(os, "getuid") else os.getlogin()
# torch's cache keys leave out the allowed instructions, so the folder's name contains them.
ALLOWED = os.environ.get("ATEN_CPU_CAPABILITY", "")
COMPILED = Path(tempfile.gettempdir(), f"speedkit_tests_{USER}{ALLOWED}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Most profiles' machines have two cores, so plans for them keep this number of threads.
os.environ["OMP_NUM_THREADS"] = "2"

# Two test processes share the cores: threads that spin while they wait would stall each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# If a shell starts the tests in the background, they ignore SIGINT, which some tests raise.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REALLY_INSTALLED = detection.installed_versions

# A profile (`pytest --profile NAME`) has the machine that plans are made for ("" for this machine)
# and the precision on CPUs ("" leaves it to the rule). Tests must pass with each profile anywhere:
# bf16 works without bf16 units, but slowly, and fp16 works with torch's GradScaler for CPUs.
PROFILES = {
    "cpu": ("cpu", ""),
    "bf16": ("cpu_avx512_bf16", "bf16"),
    "fp16": ("cpu", "fp16"),
    "one_core": ("one_core", ""),
    "here": ("", ""),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--regenerate-plans`, which rewrites files made from the catalog, and `--profile`."""
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
    """Set the first profile's machine for the process, before fixtures start kernels or servers."""
    for name in [name for name in os.environ if name.startswith("SPEEDKIT_")]:
        del os.environ[name]
    os.environ["SPEEDKIT_HARDWARE"] = PROFILES[config.getoption("--profile")[0]][0]


def pytest_report_header(config: pytest.Config) -> str:
    """Return a line with the profiles that tests plan for, which may differ from this machine."""
    return f"plans are made for: {', '.join(config.getoption('--profile'))} (--profile)"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize each test by profile if `--profile` names several."""
    profiles = metafunc.config.getoption("--profile")
    if len(profiles) > 1:
        metafunc.parametrize("profile", profiles, indirect=True)


def _on_its_machines(items: list[pytest.Item], profiles: list[str]) -> Iterator[pytest.Item]:
    """Yield `every_machine` tests with each profile, other tests with one chosen by their name."""
    for item in items:
        function = cast(pytest.Function, item)
        indices = {**function.callspec.indices}
        which = indices.pop("profile")
        alike = f"{item.path.name} {function.originalname} {sorted(indices.items())}"
        own = zlib.crc32(alike.encode()) % len(profiles)
        if which == own or item.get_closest_marker("every_machine"):
            yield item


@pytest.hookimpl(tryfirst=True)  # before -m deselects tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all but every Nth case of `sampled(N)` tests thorough; skip `gpu` tests without CUDA."""
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
    one = torch.zeros(1, 1, 1, 8, device="cuda")  # the first SDPA call sets a flag
    torch.nn.functional.scaled_dot_product_attention(one, one, one)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Exempt loaded libraries from garbage collection, which would take half a second longer."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return an iterator of paths, one for each test. No folder is created, which saves time."""
    root = tmp_path_factory.mktemp("data")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, data_folders: Iterator[Path]) -> None:
    """Isolate each test from saved results and from the width of the terminal."""
    monkeypatch.setenv("SPEEDKIT_DATA", str(next(data_folders)))
    monkeypatch.setenv("COLUMNS", "200")


@functools.cache
def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Return `detection.installed_versions(names)`, cached, because no test installs a library."""
    return REALLY_INSTALLED(names)


@pytest.fixture(autouse=True)
def no_search_for_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache the versions of libraries: each plan would search the whole environment for them."""
    monkeypatch.setattr(detection, "installed_versions", lambda of: dict(installed(tuple(of))))


@pytest.fixture(autouse=True)
def profile(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    """Apply the profile; yield its patch, which tests undo in order to plan for another machine."""
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
    """Return a function: after `machine("t4")`, plans are for a T4, whatever the profile is."""

    def pin(name: str) -> Hardware:
        profile.undo()
        monkeypatch.setenv("SPEEDKIT_HARDWARE", name)
        return Hardware.current()

    return pin


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, profile: pytest.MonkeyPatch) -> None:
    """Plan for the machine that the test runs on, whatever the profile is."""
    profile.undo()
    monkeypatch.delenv("SPEEDKIT_HARDWARE", raising=False)


@pytest.fixture(autouse=True)
def clean_flags() -> Iterator[None]:
    """After the test, restore all flags; fail if it left a flag changed or a plan applied."""
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
    """Restore all flags after a test that sets them as a user would."""
    before = flags.snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its old TF32 API is deprecated
        yield
    flags.restore(before)


@pytest.fixture(autouse=True)
def made_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MadeTime | None:
    """Install a clock of 5 ms per reading, except in `real_time` tests without `made_time`."""
    return clock_installed(request, monkeypatch, tick_s=5e-3)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed all random generators, so that a test does not depend on the tests before it."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # else torch queues the call and its stack trace
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: two threads would wait for each other longer than a tiny step takes."""
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
    """Initialize a torch.distributed process group with only this process."""
    from torch import distributed

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def two_threads(one_thread: None) -> None:
    """Use two threads, for tests that depend on the number of threads."""
    import torch

    torch.set_num_threads(2)


@pytest.fixture
def trusted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the slow accuracy checks and call each variant exact, except in `checked` tests."""
    from speedkit_jupyter.right.judge import Accuracy
    from speedkit_jupyter.rounds.accuracy_check import AccuracyCheck

    if not request.node.get_closest_marker("checked"):
        exact = Accuracy("exact")
        monkeypatch.setattr(AccuracyCheck, "check", lambda self, runner: exact)
        monkeypatch.setattr(AccuracyCheck, "baseline_accuracy", exact)


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer no plans with threads, which depend on the machine, or with compile, which is slow."""
    from speedkit_jupyter.catalog.compile import Compile
    from speedkit_jupyter.catalog.threads import Threads

    for one in (Compile, Threads):
        monkeypatch.setattr(one, "candidates", lambda self, hardware, facts: ())


@pytest.fixture
def hardware() -> Callable[[str], Hardware]:
    """Return a function: `hardware("t4")` returns the stored machine of that name."""
    return Hardware.from_json
