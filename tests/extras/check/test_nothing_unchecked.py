"""Nothing that was not compared passes: any part of a result, any input, each call, both sides."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from queue import SimpleQueue
from types import MethodType

import pytest
import torch
from _rewrites import Lazy, softmax
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from speedkit_jupyter import SpeedKitError, check
from speedkit_jupyter.extras.check import judge
from speedkit_jupyter.torchglue.private import innermost_function_mode

pytestmark = [pytest.mark.usefixtures("made_time")]


def square():
    return torch.randn(16, 16)


def judged(candidate, reference, inputs=square, gradients=False, budget_s=0.01, **more):
    """A few rounds are enough."""
    return check(candidate, reference, inputs, gradients=gradients, budget_s=budget_s, **more)


# --- results ---


@dataclass
class Output:
    logits: torch.Tensor
    loss: float = 0.0


class Plain:
    def __init__(self, x):
        self.x = x


class Tensor(torch.Tensor):
    """Has the right name only."""


@pytest.mark.parametrize(
    ("candidate", "reference", "verdict"),
    [
        (lambda x: Output(x * 2, float(x.sum())), lambda x: Output(x + x, x.sum().item()), "right"),
        (lambda x: Output(x * 2, 1.0), lambda x: Output(x + x, x.sum().item()), "wrong"),
        (lambda x: {"a": [x * 2, "b"]}, lambda x: {"a": [x + x, "b"]}, "right"),
        (lambda x: {"a": [x * 2, "c"]}, lambda x: {"a": [x + x, "b"]}, "wrong"),
        (lambda x: (x * 2).numpy(), lambda x: (x + x).numpy(), "right"),
        (lambda x: (x * 3).numpy(), lambda x: (x + x).numpy(), "wrong"),
        (lambda x: None, lambda x: (x + x).numpy(), "wrong"),
        (lambda x: float(x.sum()), torch.sum, "wrong"),
        (lambda x: [x * 2], lambda x: (x + x,), "wrong"),
        (lambda x: softmax(x).as_subclass(Tensor), softmax, "wrong"),
        (lambda x: (x * 2, {1}), lambda x: (x + x, {2}), "not checked"),
        (lambda x: iter(x), lambda x: iter(x), "not checked"),
        (Plain, Plain, "not checked"),
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
        out[wrong] = 0
        return out

    def inputs():
        return torch.randn(8, 64).to(dtype), torch.randn(64, 5000).to(dtype)

    faults = judged(candidate, torch.matmul, inputs).faults
    assert any(" that is off by " in fault for fault in faults)


# --- inputs ---


def without_strides(x):
    """What a kernel reads that takes an address and a shape."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset()) * 2


@pytest.mark.parametrize(
    "inputs",
    [
        lambda: (torch.randn(8, 96)[:, :32],),
        lambda: torch.randn(8, 96).chunk(3, -1)[1:2],
        lambda: (torch.randn(32, 8).T,),
        lambda: (torch.randn(8, 1).expand(8, 32),),
    ],
    ids=["slice", "chunk", "transposed", "expanded"],
)
@pytest.mark.parametrize("as_example", [False, True])
def test_inputs_keep_their_strides(inputs, as_example):
    drawn = tuple(inputs())
    assert judged(lambda x: x * 2, lambda x: x + x, drawn if as_example else inputs).passed
    assert judged(without_strides, lambda x: x + x, drawn if as_example else inputs).faults


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


class DoubledInView(Doubled):
    backwards = staticmethod(lambda gradient: (gradient.view(-1) * 2).view(gradient.shape))


def test_gradients_that_go_backward_have_strides_too_and_are_not_written_to():
    for wrong in (Doubled, DoubledInPlace, DoubledInView):
        assert judged(wrong.apply, lambda x: x + x, gradients=True).faults
    found = judged(lambda x: x + x, DoubledInView.apply, gradients=True)
    assert found.passed
    assert "only contiguous gradients" in repr(found)


def repeating():
    batches = itertools.cycle([square() for _ in range(3)])
    return lambda: next(batches)


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        (lambda: (square(), torch.eye(16)), "y"),
        (lambda: (square(), torch.randint(3, ())), "y"),
        (repeating(), "x"),
        ((square(), torch.ones(16, dtype=torch.bool)), "y"),
        ((square(), torch.tensor([0.5])), ""),
        (lambda: (square(), 0.5), ""),
    ],
    ids=["a constant", "few integers", "a cycle", "a mask", "an example of one", "a setting"],
)
def test_what_repeats_is_named_and_no_speed_is_told(inputs, names):
    found = judged(lambda x, y=2: x * y, lambda x, y=2: y * x, inputs, budget_s=0.5)
    assert found.passed
    (size,) = found.sizes
    assert (size.ratio is None) == bool(names)
    assert (f"come again in {names}," in size.untold) == bool(names)
    assert ("how fast is not told" in repr(found)) == bool(names)


def test_weights_are_new_in_each_call_and_torch_counts_that():
    class Kept(nn.Linear):
        seen, version = SimpleQueue(), None  # which check() does not put back

        def forward(self, x):
            self.seen.put(self.weight.sum().item())
            if self.version != self.weight._version:
                self.version, self.kept = self.weight._version, self.weight.detach().t().clone()
            return x @ self.kept + self.bias

    found = judged(Kept(16, 16), nn.Linear(16, 16), budget_s=1.0)
    assert found.passed, found.faults
    # Memory is measured with the weights of the call before.
    seen = [Kept.seen.get() for _ in range(Kept.seen.qsize())]
    assert len({*seen}) >= len(seen) - judge.FULL > 8


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
        (lambda: Output(square()), "Output"),
    ],
)
def test_inputs_that_can_not_be_copied_are_one_line(make, kind):
    for inputs in (lambda: (make(),), (make(),)):
        with pytest.raises(SpeedKitError, match=f"the input x is a {kind}.*: give") as raised:
            judged(lambda x: x * 2, lambda x: x + x, inputs)
        assert len(str(raised.value).splitlines()) == 1


# --- each call ---


def zeroed(x):
    out = softmax(x)
    x.zero_()
    return out


@pytest.mark.parametrize(
    "later",
    [
        lambda x: x.as_subclass(Lazy),
        lambda x: softmax(x).double(),
        lambda x: softmax(x)[:3],
        lambda x: None,
        zeroed,
    ],
    ids=["lazy", "dtype", "shape", "None", "writes"],
)
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

    found = judged(candidate, softmax, lambda size: torch.randn(size), sizes="single,small")
    assert found.faults == ["small: MemoryError"]


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda box: box["w"].zero_(), "no longer gives what it gave"),
        (lambda box: box["w"].copy_(box["w"].bfloat16()), "no longer gives what it gave"),
        (lambda box: box.update(w=torch.zeros(16, 16)), "no longer gives what it gave"),
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


def test_a_reference_that_has_become_slower_is_no_yardstick(made_time):
    slow = []

    def reference(x):
        made_time.sleep(1.0 if slow else 0.01)
        return softmax(x)

    def candidate(x):
        slow.append(True)
        made_time.sleep(0.01)
        return softmax(x)

    found = judged(candidate, reference, budget_s=1000.0)
    assert found.passed
    assert found.sizes[0].ratio is None
    assert "before the candidate was called" in repr(found)


# --- what is replaced ---


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def enter_mode(model):
    if innermost_function_mode() is None:
        Mode().__enter__()


@pytest.mark.parametrize(
    "act",
    [
        lambda model: setattr(torch.Tensor, "__sub__", lambda a, b: a * 0),
        lambda model: setattr(torch.Tensor, "clone", lambda *args: None),
        lambda model: setattr(math, "sqrt", lambda x: x),
        lambda model: setattr(nn.Linear, "__call__", nn.Module.__call__),
        lambda model: setattr(model, "forward", MethodType(nn.Linear.forward, model)),
        lambda model: model.register_forward_hook(print),
        lambda model: nn.modules.module.register_module_forward_hook(lambda *given: None),
        lambda model: torch.autograd.set_detect_anomaly(True),
        enter_mode,
    ],
)
@pytest.mark.parametrize("raises", [False, True])
def test_what_the_candidate_replaces_is_named_and_put_back(act, raises):
    model = nn.Linear(16, 16)

    class Candidate(nn.Linear):
        def forward(self, x):
            act(model)
            if raises:
                raise ValueError
            return x.matmul(self.weight.t()) + self.bias

    def state():
        hooks = dict(nn.modules.module._global_forward_hooks), dict(model._forward_hooks)
        owners = (torch.Tensor, nn.Linear, math, model)
        modes = torch.is_anomaly_enabled(), innermost_function_mode()
        return [dict(vars(one)) for one in owners[:3]], vars(model).get("forward"), hooks, modes

    before = state()
    assert judged(Candidate(16, 16), model).faults
    assert state() == before


def test_a_clock_that_was_replaced_before_is_named(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    assert "time.perf_counter is not Python's own" in str(judged(softmax, softmax).faults)


# --- wrappers ---


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("wrap", [nn.DataParallel, Wrapped])
def test_a_wrapper_has_the_weights_of_its_module(wrap):
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    found = judged(wrap(model), model, gradients=True)
    assert found.passed, found.faults
    assert not found.remarks
    assert "gradient of 0.weight" in {one.name for one in found.sizes[0].agreements}


def test_modules_of_other_names_keep_their_own_weights_and_buffers():
    first, second = (nn.Sequential(nn.BatchNorm1d(16)) for _ in range(2))
    found = judged(Wrapped(first), second, gradients=True)
    assert found.passed, found.faults
    assert "other parameters by name" in repr(found)


def test_an_empty_tensor_is_right_where_the_references_is_of_the_same_form():
    def inputs():
        return torch.randn(4, 4)

    assert judged(lambda x: x[:0] * 2, lambda x: x[:0] + x[:0], inputs, gradients=False).passed
    found = judged(lambda x: x[:0, :3], lambda x: x[:0], inputs, gradients=False)
    assert not found.passed
