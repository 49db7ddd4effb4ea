"""Test that rewrites pass only if all parts of results, inputs and calls were compared."""

import itertools
import math
import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from _rewrites import Lazy, softmax
from torch import nn
from torch.nn import functional

from speedkit_jupyter import SpeedKitError, check


def square():
    return torch.randn(16, 16)


def judged(candidate, reference, inputs=square, gradients=False, budget_s=0.01, **more):
    return check(candidate, reference, inputs, gradients=gradients, budget_s=budget_s, **more)


class Tensor(torch.Tensor):
    """A subclass of torch.Tensor that has the same name."""


@pytest.mark.parametrize(
    ("candidate", "reference", "verdict"),
    [
        (lambda x: (x * 2, float(x.sum())), lambda x: (x + x, x.sum().item()), "right"),
        (lambda x: (x * 2, 1.0), lambda x: (x + x, x.sum().item()), "wrong"),
        (lambda x: {"a": [x * 2, "b"]}, lambda x: {"a": [x + x, "b"]}, "right"),
        (lambda x: {"a": [x * 2, "c"]}, lambda x: {"a": [x + x, "b"]}, "wrong"),
        (lambda x: x[:0] * 2, lambda x: x[:0] + x[:0], "right"),
        (lambda x: x[:0, :3], lambda x: x[:0], "wrong"),
        (lambda x: (x * 2).numpy(), lambda x: (x + x).numpy(), "not checked"),
        (lambda x: None, lambda x: x + x, "wrong"),
        (lambda x: float(x.sum()), torch.sum, "wrong"),
        (lambda x: [x * 2], lambda x: (x + x,), "wrong"),
        (lambda x: softmax(x).as_subclass(Tensor), softmax, "wrong"),
        (lambda x: (x * 2, {1}), lambda x: (x + x, {2}), "not checked"),
        (lambda x: iter(x), lambda x: iter(x), "not checked"),
        (lambda x: SimpleNamespace(x=x), lambda x: SimpleNamespace(x=x), "not checked"),
        (lambda x: "text", lambda x: "text", "not checked"),
        (lambda x: None, lambda x: None, "not checked"),
        (lambda x: x.to_sparse(), lambda x: x.to_sparse(), "not checked"),
        (lambda x: x.as_subclass(Tensor), lambda x: x.as_subclass(Tensor), "not checked"),
    ],
)
def test_each_part_of_a_result_is_compared_or_nothing_is_right(candidate, reference, verdict):
    found = judged(candidate, reference)
    assert found.verdict == verdict, found.faults
    assert found.passed == (verdict == "right")
    assert f"is {verdict}" in repr(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wrong", [(..., slice(-1, None)), (3, 77)], ids=["column", "element"])
def test_a_single_wrong_column_or_element_counts(dtype, wrong):
    def candidate(x, weight):
        out = x @ weight
        out[wrong] = 99  # far from any product
        return out

    def inputs():
        return torch.randn(8, 64).to(dtype), torch.randn(64, 5000).to(dtype)

    faults = judged(candidate, torch.matmul, inputs).faults
    assert any(" that is off by " in fault for fault in faults)


def without_strides(x):
    """Return twice x, but read its memory as contiguous, like a kernel that ignores strides."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset()) * 2


@pytest.mark.parametrize(
    "inputs", [lambda: (torch.randn(8, 96)[:, :32],),
    lambda: torch.randn(8, 96).chunk(3, -1)[1:2], lambda: (torch.randn(32, 8).T,),
    lambda: (torch.randn(8, 1).expand(8, 32),)],
    ids=["slice", "chunk", "transposed", "expanded"],
)  # fmt: skip
def test_inputs_keep_their_strides(inputs):
    assert judged(lambda x: x * 2, lambda x: x + x, inputs).passed
    assert judged(without_strides, lambda x: x + x, inputs).faults


def test_inputs_keep_their_conjugate_bit():
    def inputs():
        return torch.randn(4, 8, dtype=torch.complex64).conj()

    def by_pairs(x):  # view_as_real() refuses conjugates
        return torch.view_as_complex(torch.view_as_real(x) * 2)

    def without_bit(x):
        return torch.view_as_complex(torch.view_as_real(x.conj()) * 2)

    def reference(x):
        return x + x

    assert "view_as_real" in str(judged(by_pairs, reference, inputs).faults)
    assert "off by" in str(judged(without_bit, reference, inputs).faults)
    assert judged(lambda x: 2 * x, reference, inputs, gradients=True).passed


class Doubled(torch.autograd.Function):
    backwards = staticmethod(without_strides)

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @classmethod
    def backward(cls, ctx, gradient):
        return cls.backwards(gradient)


class DoubledInPlace(Doubled):
    backwards = staticmethod(lambda gradient: gradient.mul_(2))


def test_gradients_that_go_backward_have_strides_too_and_are_not_written_to():
    for wrong in (Doubled, DoubledInPlace):
        assert judged(wrong.apply, lambda x: x + x, gradients=True).faults


def repeating():
    batches = itertools.cycle([square() for _ in range(3)])
    return lambda: next(batches)


@pytest.mark.parametrize(
    ("inputs", "names"), [(lambda: (square(), torch.eye(16)), "y"),
    (lambda: (square(), torch.randint(3, ())), "y"), (repeating(), "x"),
    (lambda: (square(), 0.5), "")], ids=["a constant", "few integers", "a cycle", "a setting"],
)  # fmt: skip
def test_what_repeats_is_named_and_no_speed_is_told(inputs, names):
    found = judged(lambda x, y=2: x * y, lambda x, y=2: y * x, inputs, budget_s=0.5)
    assert found.passed
    (size,) = found.sizes
    assert (size.ratio is None) == bool(names)
    assert (f"come again in {names}," in size.no_speed) == bool(names)
    assert ("no speed-up is given" in repr(found)) == bool(names)


def test_weights_are_new_in_each_call_and_torch_counts_that():
    class Kept(nn.Linear):
        seen, version = SimpleQueue(), None  # check() restores no queues

        def forward(self, x):
            self.seen.put(self.weight.sum().item())
            if self.version != self.weight._version:
                self.version, self.kept = self.weight._version, self.weight.detach().t().clone()
            return x @ self.kept + self.bias

    found = judged(Kept(16, 16), nn.Linear(16, 16), budget_s=1.0)
    assert found.passed, found.faults
    seen = [Kept.seen.get() for _ in range(Kept.seen.qsize())]
    assert len({*seen}) == len(seen) > 8


def test_a_weight_of_zeros_counts():
    class WithoutBias(nn.LayerNorm):
        def forward(self, x):
            return functional.layer_norm(x, self.normalized_shape, self.weight)

    assert judged(WithoutBias(16), nn.LayerNorm(16)).faults


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*:UserWarning")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: square().to_sparse(), "sparse_coo"),
        (lambda: torch.nested.nested_tensor([square()], layout=torch.jagged), "jagged"),
        (lambda: torch.quantize_per_tensor(square(), 0.1, 0, torch.quint8), "Tensor"),
    ],
)
def test_inputs_that_can_not_be_copied_are_one_line(make, kind):
    with pytest.raises(SpeedKitError, match=f"the input x is a {kind}.*: give") as raised:
        judged(lambda x: x * 2, lambda x: x + x, lambda: (make(),))
    assert len(str(raised.value).splitlines()) == 1


def zeroed(x):
    out = softmax(x)
    x.zero_()
    return out


@pytest.mark.parametrize(
    "later", [lambda x: x.as_subclass(Lazy), lambda x: softmax(x).double(),
    lambda x: softmax(x)[:3], lambda x: None, zeroed],
    ids=["lazy", "dtype", "shape", "None", "writes"],
)  # fmt: skip
def test_timed_calls_have_the_same_form(later):
    calls = itertools.count()

    def candidate(x):
        return softmax(x) if next(calls) < 12 else later(x)

    assert judged(candidate, softmax, budget_s=100.0).faults


def test_what_the_reference_has_memory_for_the_candidate_must_have():
    def candidate(x):
        if x.numel() > 100:
            raise MemoryError
        return softmax(x)

    found = judged(
        candidate, softmax, lambda size: torch.randn(size), sizes="single,small", budget_s=100
    )
    assert found.faults == ["small: MemoryError"]


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda box: box["w"].zero_(), "no longer gives its first result"),
        (lambda box: box["w"].copy_(box["w"].bfloat16()), "no longer gives its first result"),
        (lambda box: box.update(w=torch.zeros(16, 16)), "no longer gives its first result"),
        (lambda box: box.clear(), "the reference fails since the candidate was called: KeyError"),
    ],
    ids=["zeroed", "rounded", "exchanged", "gone"],
)
def test_what_both_use_stays_as_it_was(act, said):
    box = {"w": torch.randn(16, 16)}

    def candidate(x):
        act(box)
        return x @ box.get("w", torch.eye(16))

    assert said in str(judged(candidate, lambda x: x @ box["w"]).faults)


def test_a_parameter_that_is_written_to_is_a_fault():
    class Rounding(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.copy_(self.weight.bfloat16())
            return super().forward(x)

    assert "parameter weight" in str(judged(Rounding(16, 16), nn.Linear(16, 16)).faults)


@pytest.mark.parametrize(
    "act",
    [
        lambda: setattr(torch.Tensor, "__sub__", lambda a, b: a * 0),
        lambda: setattr(torch.Tensor, "clone", lambda *args: None),
        lambda: setattr(math, "sqrt", lambda x: x),
        lambda: setattr(time, "perf_counter", lambda: 0.0),
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    ],
    ids=["method", "clone", "math", "clock", "flag"],
)
@pytest.mark.parametrize("raises", [False, True])
def test_what_the_candidate_replaces_is_named_and_put_back(act, raises):
    def candidate(x):
        act()
        if raises:
            raise ValueError
        return softmax(x)

    def state():
        return [dict(vars(one)) for one in (torch.Tensor, math, time)], torch.get_num_threads()

    before = state()
    faults = judged(candidate, softmax).faults
    assert state() == before
    assert faults
    assert raises or " replaces " in faults[0] or " the flag " in faults[0]


def test_a_wrapper_has_the_weights_of_its_module():
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    found = judged(nn.DataParallel(model), model, gradients=True)
    assert found.passed, found.faults
    assert not found.remarks
    assert "gradient of 0.weight" in {one.name for one in found.sizes[0].agreements}


def test_modules_of_other_names_keep_their_own_weights_and_buffers():
    first, second = (nn.Sequential(nn.BatchNorm1d(16)) for _ in range(2))
    found = judged(nn.Sequential(first), second, gradients=True)
    assert found.passed, found.faults
    assert "the names of parameters differ" in repr(found)
