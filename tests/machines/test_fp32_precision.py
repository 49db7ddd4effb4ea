from __future__ import annotations

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

OLD_WAYS: dict[str, tuple[Callable[[Any], None], tuple[Any, ...]]] = {
    "set_float32_matmul_precision": (
        torch.set_float32_matmul_precision,
        ("highest", "high", "medium"),
    ),
    "cuda.matmul.allow_tf32": (
        lambda value: setattr(torch.backends.cuda.matmul, "allow_tf32", value),
        (True, False),
    ),
    "cudnn.allow_tf32": (
        lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
        (True, False),
    ),
}
NEW_WAYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "torch.backends": (torch.backends, ("none", "ieee", "tf32")),
    "cuda.matmul": (torch.backends.cuda.matmul, ("none", "ieee", "tf32")),
    "cudnn": (torch.backends.cudnn, ("none", "ieee", "tf32")),
    "cudnn.conv": (torch.backends.cudnn.conv, ("none", "ieee", "tf32")),
    "cudnn.rnn": (torch.backends.cudnn.rnn, ("none", "ieee", "tf32")),
    "mkldnn.matmul": (torch.backends.mkldnn.matmul, ("none", "ieee", "tf32", "bf16")),
    "mkldnn.conv": (torch.backends.mkldnn.conv, ("none", "ieee", "tf32", "bf16")),
}

old_steps = st.sampled_from([(way, v) for way, (_, values) in OLD_WAYS.items() for v in values])
new_steps = st.sampled_from([(way, v) for way, (_, values) in NEW_WAYS.items() for v in values])
# What no Python attribute reaches, such as oneDNN's own value for all its operations.
raw_steps = st.sampled_from(
    [
        (key, value)
        for key in fp32_precision.KEYS
        for value in fp32_precision.PRECISIONS.get(key[0], ("none", "ieee", "tf32", "bf16"))
    ]
)
sequences = st.lists(old_steps | new_steps | raw_steps, max_size=8)


def run(sequence: list[tuple[Any, Any]]) -> None:
    for way, value in sequence:
        if way in OLD_WAYS:
            OLD_WAYS[way][0](value)
        elif way in NEW_WAYS:
            NEW_WAYS[way][0].fp32_precision = value
        else:
            torch._C._set_fp32_precision_setter(*way, value)


def outcome(reader: Callable[[], Any]) -> Any:
    try:
        return reader()
    except RuntimeError:
        return "raises"


def visible() -> dict[str, Any]:
    """All that torch's own readers say, the ones that raise included."""
    readers: dict[str, Callable[[], Any]] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
        "mkldnn.allow_tf32": torch._C._get_onednn_allow_tf32,
    }
    said = {name: outcome(reader) for name, reader in readers.items()}
    for key in fp32_precision.KEYS:
        said[fp32_precision.name_of(*key)] = torch._C._get_fp32_precision_getter(*key)
    return said


pytestmark = pytest.mark.usefixtures("changing_flags")


def fresh() -> None:
    """The same start for every example: hypothesis runs many of them in one test."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for key in fp32_precision.KEYS:
        if key not in (("cuda", "conv"), ("cuda", "rnn")):
            torch._C._set_fp32_precision_setter(*key, "none")


@examples(100)
@given(sequence=sequences)
def test_reading_changes_nothing_visible(sequence: Any) -> None:
    fresh()
    run(sequence)
    before = visible()
    first = fp32_precision.own()
    assert visible() == before
    assert fp32_precision.own() == first


@examples(100)
@given(wanted=sequences, meanwhile=sequences, later=sequences)
def test_a_written_state_reads_and_behaves_like_the_one_that_was_read(
    wanted: Any, meanwhile: Any, later: Any
) -> None:
    fresh()
    run(wanted)
    values, seen = fp32_precision.own(), visible()
    run(later)
    seen_later = visible()

    fresh()
    run(meanwhile)
    fp32_precision.write(values)
    assert fp32_precision.own() == values
    assert visible() == seen
    run(later)  # an inheritance that was cut would show now
    assert visible() == seen_later


def test_an_inherited_value_is_read_as_none_and_goes_on_following() -> None:
    torch.backends.fp32_precision = "tf32"
    values = fp32_precision.own()
    assert values["fp32_precision"] == "tf32"
    assert values["cuda.matmul.fp32_precision"] == "none"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    fp32_precision.write(values)
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_old_setting_is_recovered_where_torch_cannot_read_it(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.matmul.fp32_precision = "ieee" if precision != "highest" else "tf32"
    assert fp32_precision.own()["float32_matmul_precision"] == precision


IN_A_NEW_PROCESS = """
import torch
from speedkit_jupyter.machines import flags, fp32_precision

conv = torch.backends.cudnn.conv
untouched = conv.fp32_precision
before = flags.snapshot()
assert conv.fp32_precision == untouched, "reading switched TF32 in convolutions off"
torch.backends.fp32_precision = "ieee"
follows = conv.fp32_precision
fp32_precision.own()
flags.restore(before)
assert conv.fp32_precision == untouched
torch.backends.fp32_precision = "ieee"
assert conv.fp32_precision == follows, "reading or restoring cut the inheritance"
flags.restore(before)
torch.backends.cuda.matmul.fp32_precision = "tf32"  # old readers raise from here on
mixed = flags.snapshot()
assert conv.fp32_precision == untouched
flags.restore(before)
torch.set_float32_matmul_precision("medium")
torch.backends.cudnn.allow_tf32 = False
flags.restore(mixed)
assert flags.snapshot() == mixed and conv.fp32_precision == untouched
"""


@pytest.mark.slow
def test_a_new_process_keeps_its_default_for_convolutions() -> None:
    # A value that can't be written again, so it takes a process in which nothing was written.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_A_NEW_PROCESS],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
