import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.flags import OverrideStack

pytestmark = pytest.mark.usefixtures("changing_flags")

# Each flag's setter, as a user would call it, and values other than torch's own.
OTHER_VALUES: dict[str, tuple[Callable[[Any], None], tuple[Any, ...]]] = {
    **{name: (flag.write, flag.others) for name, flag in flags.all_flags().items()},
    "float32_matmul_precision": (torch.set_float32_matmul_precision, ("high", "medium")),
    "cuda.matmul.fp32_precision": (
        lambda v: setattr(torch.backends.cuda.matmul, "fp32_precision", v),
        ("ieee", "tf32"),
    ),
}
anything = st.lists(
    st.sampled_from([(name, one) for name, (_, every) in OTHER_VALUES.items() for one in every]),
    max_size=10,
)


def set_all(wanted: list[tuple[str, Any]]) -> None:
    for name, value in wanted:
        OTHER_VALUES[name][0](value)


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_changed_switch_is_seen_and_put_back(name: str, two_threads: None) -> None:
    change, values = OTHER_VALUES[name]
    before = flags.snapshot()
    for value in values:
        change(value)
        assert flags.snapshot()[name] == value
        changed = [one.name for one in flags.diff(before, flags.snapshot())]
        # The environment may already set the value, as TORCHINDUCTOR_VEC_ISA_OK does.
        assert (name in changed) == (value != before[name])
        flags.restore(before)
        assert flags.snapshot() == before


def test_every_switch_has_other_values_and_an_owner_or_none() -> None:
    assert all(values for _, values in OTHER_VALUES.values())
    owned = [name for one in CATALOG for name in one.process_flags()]
    assert len(owned) == len(set(owned))
    others = {name for name in flags.all_flags() if name.startswith("cuda.matmul.allow_")}
    assert len(others) == 3
    assert set(flags.all_flags()) == {"default_dtype", "cudnn.deterministic", *others, *owned}


@examples(60)
@given(first=anything, second=anything)
def test_restore_comes_back_to_any_state_from_any_other(first: Any, second: Any) -> None:
    set_all(first)
    wanted = flags.snapshot()
    set_all(second)
    flags.restore(wanted)
    assert flags.snapshot() == wanted


# Switches that do not depend on each other.
INDEPENDENT = ("num_threads", "default_dtype", "sdp.flash", "cudnn.benchmark")
wishes = st.dictionaries(st.sampled_from(INDEPENDENT), st.integers(0, 2), min_size=1).map(
    lambda wish: {n: OTHER_VALUES[n][1][i % len(OTHER_VALUES[n][1])] for n, i in wish.items()}
)
# A dict is pushed as a layer; a number selects the layer to remove.
moves = st.lists(wishes | st.integers(0, 9), max_size=12)


def push(stack: OverrideStack, wish: dict[str, Any]) -> flags.FlagOverride:
    return stack.push(wish, lambda: set_all(list(wish.items())))


@examples(100)
@given(sequence=moves)
def test_in_any_order_the_latest_still_applied_is_in_force(sequence: Any) -> None:
    stack, original = OverrideStack(), flags.snapshot()
    applied: list[tuple[flags.FlagOverride, dict[str, Any]]] = []

    def check() -> None:
        expected = dict(original)
        for _, wish in applied:
            expected |= wish
        assert flags.snapshot() == expected

    for move in sequence:
        if isinstance(move, dict):
            applied.append((push(stack, move), move))
        elif applied:
            layer, _ = applied.pop(move % len(applied))
            assert stack.pop(layer) == ()
        check()
    while applied:
        assert stack.pop(applied.pop(0)[0]) == ()
        check()
    assert not stack._layers
    assert not stack._originals


@examples(100)
@given(before=moves, after=moves)
def test_what_the_user_set_meanwhile_survives_any_order(before: Any, after: Any) -> None:
    stack, original = OverrideStack(), flags.snapshot()
    applied: list[flags.FlagOverride] = []
    reported: list[str] = []

    def play(sequence: Any) -> None:
        for move in sequence:
            if isinstance(move, dict):
                applied.append(push(stack, move))
            elif applied:
                reported.extend(stack.pop(applied.pop(move % len(applied))))

    play(before)
    overridden = any("num_threads" in layer.values for layer in applied)
    torch.set_num_threads(4)
    play(after)
    while applied:
        reported.extend(stack.pop(applied.pop()))
    assert flags.snapshot() == {**original, "num_threads": 4}
    assert set(reported) == ({"num_threads"} if overridden else set())
    flags.restore(original)


@pytest.mark.parametrize("ends", ["error", "signal"])
def test_what_ends_a_change_leaves_all_as_before(ends: str) -> None:
    stack = OverrideStack()
    first = stack.push(["num_threads"], lambda: torch.set_num_threads(1))

    original = flags.snapshot()

    def change() -> None:
        if ends == "signal":
            signal.raise_signal(signal.SIGINT)
        torch.set_num_threads(5)
        torch.backends.cudnn.benchmark = True
        if ends == "error":
            raise ValueError

    with pytest.raises((ValueError, KeyboardInterrupt)):
        stack.push(["num_threads", "cudnn.benchmark"], change)
    assert flags.snapshot() == original
    assert stack._layers == [first]
    stack.pop(first)
