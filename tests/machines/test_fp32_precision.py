import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from speedkit_jupyter.machines import fp32_precision

PRECISIONS = ("none", "ieee", "tf32")
WAYS: dict[str, tuple[Any, str, tuple[Any, ...]]] = {
    "cuda.matmul.allow_tf32": (torch.backends.cuda.matmul, "allow_tf32", (True, False)),
    "cudnn.allow_tf32": (torch.backends.cudnn, "allow_tf32", (True, False)),
    "torch.backends": (torch.backends, "fp32_precision", PRECISIONS),
    "cuda.matmul": (torch.backends.cuda.matmul, "fp32_precision", PRECISIONS),
    "cudnn": (torch.backends.cudnn, "fp32_precision", PRECISIONS),
    "cudnn.conv": (torch.backends.cudnn.conv, "fp32_precision", PRECISIONS),
    "cudnn.rnn": (torch.backends.cudnn.rnn, "fp32_precision", PRECISIONS),
    "mkldnn.matmul": (torch.backends.mkldnn.matmul, "fp32_precision", (*PRECISIONS, "bf16")),
    "mkldnn.conv": (torch.backends.mkldnn.conv, "fp32_precision", (*PRECISIONS, "bf16")),
}
steps = st.sampled_from(
    [(way, value) for way, (_, _, values) in WAYS.items() for value in values]
    + [("set_float32_matmul_precision", value) for value in ("highest", "high", "medium")]
    + [("mkldnn.set_flags", value) for value in (*PRECISIONS, "bf16")]
)
sequences = st.lists(steps, max_size=8)


def run(sequence: list[tuple[str, Any]]) -> None:
    for way, value in sequence:
        if way == "set_float32_matmul_precision":
            torch.set_float32_matmul_precision(value)
        elif way == "mkldnn.set_flags":
            torch.backends.mkldnn.set_flags(_fp32_precision=value)
        else:
            owner, name, _ = WAYS[way]
            setattr(owner, name, value)


def outcome(reader: Callable[[], Any]) -> Any:
    try:
        return reader()
    except RuntimeError:
        return "raises"


def visible() -> dict[str, Any]:
    """Return the values of torch's public getters, and of the internal getters below them."""
    keys = [(one, two) for one in ("cuda", "mkldnn") for two in ("all", "matmul", "conv", "rnn")]
    return {
        **{str(key): torch._C._get_fp32_precision_getter(*key) for key in keys},
        "float32_matmul_precision": outcome(torch.get_float32_matmul_precision),
        "cuda.matmul.allow_tf32": outcome(lambda: torch.backends.cuda.matmul.allow_tf32),
        "cudnn.allow_tf32": outcome(lambda: torch.backends.cudnn.allow_tf32),
    }


pytestmark = pytest.mark.usefixtures("changing_flags")


def fresh() -> None:
    """Reset all settings, because hypothesis runs many examples in one test."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    run([(way, "none") for way in ("torch.backends", "cudnn", "cuda.matmul", "mkldnn.matmul")])
    run([("mkldnn.conv", "none"), ("mkldnn.set_flags", "none")])


@examples(100)
@given(wanted=sequences, meanwhile=sequences)
def test_a_restored_state_reads_like_the_one_that_was_read(wanted: Any, meanwhile: Any) -> None:
    fresh()
    run(wanted)
    seen = visible()
    values = fp32_precision.read()
    assert visible() == seen  # reading changes nothing
    run(meanwhile)
    fp32_precision.restore(values)
    assert visible() == seen
    assert fp32_precision.read() == values


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_old_setting_is_recovered_where_torch_cannot_read_it(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.matmul.fp32_precision = "ieee" if precision != "highest" else "tf32"
    assert fp32_precision.read()["float32_matmul_precision"] == precision


IN_A_NEW_PROCESS = """
import torch
from speedkit_jupyter.machines import flags

conv = torch.backends.cudnn.conv
untouched = conv.fp32_precision
before = flags.snapshot()
assert conv.fp32_precision == untouched, "reading switched TF32 in convolutions off"
torch.backends.fp32_precision = "ieee"
follows = conv.fp32_precision
flags.restore(before)
assert conv.fp32_precision == untouched
torch.backends.fp32_precision = "ieee"
assert conv.fp32_precision == follows, "reading or restoring cut the inheritance"
"""


@pytest.mark.slow
def test_a_new_process_keeps_its_default_for_convolutions() -> None:
    # The default can't be written back, so the test needs a process in which nothing was set.
    run = [sys.executable, "-W", "ignore", "-c", IN_A_NEW_PROCESS]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
