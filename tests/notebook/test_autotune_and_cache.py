"""`%speedkit autotune` and `%speedkit cache`: what they put in force, list and delete."""

from dataclasses import asdict

import pytest

from speedkit_jupyter.extras.autotune import tuner
from speedkit_jupyter.extras.autotune.plugin import counted_line
from speedkit_jupyter.extras.autotune.ranking import (
    DeviceName,
    Input,
    KernelSearch,
    Problem,
    versions,
)
from speedkit_jupyter.extras.autotune.tuner import Counted
from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.support import database

GPU = DeviceName("NVIDIA A100-SXM4-80GB", 108)


@pytest.fixture(autouse=True)
def off():
    yield
    tuner.off()


def keep(number: int = 1) -> None:
    """Keep searches of another device, whose second kernel is the fastest for narrow products."""
    for index in range(number):
        m, n, k = 64 * (index + 1), 512, 256
        inputs = Input((m, k), (k, 1), "float32"), Input((k, n), (n, 1), "float32")
        problem = Problem("mm", 0, inputs, (m, n), "highest", versions(), GPU)
        timings = {"mm()": 1.0 + 0.01 * index, "triton_mm(BLOCK_M=64)": 0.8 + 0.05 * index}
        found = KernelSearch(problem, tuple(timings), timings, 4.0)
        database.keep("search", GPU.model, problem.key, asdict(found))


def test_it_records_until_it_is_off(shell):
    text = shell.run("%speedkit autotune record")
    assert "recorded products are replayed" in text
    assert "Nothing is recorded yet: compile with mode='max-autotune'" in text
    assert tuner.current() is not None
    assert "0 ns" not in shell.run("%speedkit autotune")
    assert "neither recorded" in shell.run("%speedkit autotune off")
    assert tuner.current() is None


def test_predictions_have_a_least_confidence(shell):
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
    counted = Counted(2, 3, 1, 1, 1, 4.2, 17.0, [0.9, 0.98, 1.0])
    assert counted_line(counted) == (
        "1 recorded, 2 replayed, 3 predicted, 1 not predicted, 1 out of date; 17 s saved."
    )


def test_code_is_listed_and_deleted(shell) -> None:
    assert ": 0 B" in shell.run("%speedkit cache")
    folder = compile_cache.prepare()
    (folder / compile_cache.COMPILED / "code.py").write_bytes(b"code")
    assert ": 4 B" in shell.run("%speedkit cache status")
    assert "Deleted 4 B of compiled code" in shell.run("%speedkit cache clear")


def test_a_folder_that_others_can_write_to_is_named(shell) -> None:
    compile_cache.prepare()
    compile_cache.root().chmod(0o777)
    assert "neither saved nor loaded: other users can write to" in shell.run("%speedkit cache")
