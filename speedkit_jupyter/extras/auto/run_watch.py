"""Watch a loop under its plans: losses, gradients, memory and speed."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import mean, median
from typing import Any

import psutil
import torch

from speedkit_jupyter.extras.auto.race import BASELINE
from speedkit_jupyter.machines import devices
from speedkit_jupyter.support import units

# Plain steps run without a plan. A plan is dropped if its loss is not finite but plain losses are,
# or if IN_A_ROW losses exceed a limit: the maximum of the last PLAIN plain losses, plus ABOVE times
# their range, plus RELATIVE times the maximum. With few plain steps, the plan's own first PLAIN
# losses serve instead. Losses below CONVERGED times the first are noise: a CNN that converged under
# AdamW had plain losses with median 3e-5 and maximum 0.66 in 400 steps.
PLAIN, ABOVE, RELATIVE, IN_A_ROW, CONVERGED = 20, 3.0, 0.1, 3, 0.05
# Gradient norms also grow in a healthy run. A plan is dropped if IN_A_ROW norms exceed EXPLODED
# times the maximum of plain steps. Norm and memory are read after at least EVERY steps of a plan,
# and at least APART_S seconds apart: reading takes 0.1 to 2 ms for a small model.
EXPLODED, EVERY, APART_S = 10.0, 5, 0.2
# A plan leaks memory if each of GROWTHS readings in a row is at least LEAST_GROWN bytes higher, and
# plain readings grow at most half as much on average. Caches fill faster and then stop.
GROWTHS, LEAST_GROWN = 20, 2**18
# The winner races again, once, if the median of RECENT_STEPS steps is over SLOWER times the usual.
SLOWER, RECENT_STEPS = 1.25, 50


class Signal:
    """The losses or gradient norms of steps, under plans and without a plan."""

    def __init__(self, name: str, above: float, relative: float, may_overflow: bool) -> None:
        self._name, self._above, self._relative = name, above, relative
        self._may_overflow = may_overflow
        self._values: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=IN_A_ROW))
        self._values[BASELINE] = deque(maxlen=PLAIN)
        self._first: dict[str, list[float]] = defaultdict(list)
        self._noise: float | None = None

    def noted(self, plan: str, value: float) -> str:
        """Note the value of a step; return why its plan must be dropped, or ""."""
        if self._may_overflow and not math.isfinite(value):  # a step that fp16 skips
            return ""
        self._noise = CONVERGED * abs(value) if self._noise is None else self._noise
        self._values[plan].append(value)
        plain, own = self._values[BASELINE], self._values[plan]
        if plan == BASELINE:
            return ""
        known, whose = [*plain], "plain"
        if len(plain) < IN_A_ROW:
            known, whose = self._first[plan], "its first"
            if len(known) < PLAIN and math.isfinite(value):
                known.append(value)
                return ""
        if not known:
            return f"its {self._name} was {value:.3g} in its first step"
        if not all(map(math.isfinite, known)):
            return ""
        most = max(known)
        limit = most + self._above * (most - min(known)) + self._relative * abs(most)
        limit = max(limit, self._noise)
        is_above = len(own) == IN_A_ROW and all(one > limit for one in own)
        if not is_above and math.isfinite(value):
            return ""
        return f"its {self._name} was {value:.3g} where {whose} steps had at most {most:.3g}"


class Memory:
    """The growth of the memory in use between readings, under a plan and without a plan."""

    def __init__(self) -> None:
        self._plan, self._last = "", 0
        self._plain, self._own = deque[int](maxlen=GROWTHS), deque[int](maxlen=GROWTHS)

    def noted(self, plan: str, used: int) -> str:
        """Note the bytes in use after a step; return why its plan must be dropped, or ""."""
        grown, is_first = used - self._last, plan != self._plan
        self._plan, self._last = plan, used
        if is_first:  # the change of the plan itself takes memory
            self._own.clear()
            return ""
        (self._plain if plan == BASELINE else self._own).append(grown)
        is_growing = len(self._own) == GROWTHS and min(self._own) >= LEAST_GROWN
        if not is_growing or mean(self._plain or [0]) > mean(self._own) / 2:
            return ""
        return f"memory grew by {units.size(sum(self._own))} in {GROWTHS} readings in a row"


class RunWatch:
    """The losses, gradient norms, memory and speed of a loop, to detect plans that harm it."""

    def __init__(self) -> None:
        self._loss = Signal("loss", ABOVE, RELATIVE, may_overflow=False)
        self._norm = Signal("gradient norm", 0.0, EXPLODED - 1, may_overflow=True)
        self.memory = Memory().noted
        self._steps: dict[str, int] = defaultdict(int)
        self._read_s = -APART_S
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._has_warned = False

    def signals(
        self, plan: str, now_s: float, optimizers: Iterable[Any], device: torch.device
    ) -> tuple[torch.Tensor | None, str]:
        """Count a step; return the gradient norm and why memory leaks; None and "" if not read."""
        self._steps[plan] += 1
        if self._steps[plan] < EVERY or now_s - self._read_s < APART_S:
            return None, ""
        self._steps[plan], self._read_s = 0, now_s
        return gradient_norm(optimizers), self.memory(plan, used_bytes(device))

    def values(self, plan: str, loss: torch.Tensor | None, norm: torch.Tensor | None) -> str:
        """Note a step's loss and gradient norm; return why its plan must be dropped, or ""."""
        why = "" if loss is None else self._loss.noted(plan, float(loss))
        return why or ("" if norm is None else self._norm.noted(plan, float(norm)))

    def speed(self, seconds: float, usual_s: float | None) -> str:
        """Note a step of the winner; return a message, once, when steps become slower, else ""."""
        self._recent.append(seconds)
        if usual_s is None or self._has_warned or len(self._recent) < RECENT_STEPS:
            return ""
        middle = median(self._recent)
        if middle <= SLOWER * usual_s:
            return ""
        self._has_warned = True
        return f"Steps take {middle / usual_s:.2f} times as long as before: plans race again."


def gradient_norm(optimizers: Iterable[torch.optim.Optimizer]) -> torch.Tensor | None:
    """Return the 2-norm of dense gradients, copied to the CPU asynchronously; None without any."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found = (one.grad for group in groups for one in group["params"])
    gradients = [one for one in found if one is not None and one.layout is torch.strided]
    if not gradients:
        return None
    return torch.nn.utils.get_total_norm(gradients).to("cpu", non_blocking=True)


def used_bytes(device: torch.device) -> int:
    """Return the bytes of tensors on the device; on a CPU, the process's resident memory."""
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    return devices.named(device.type).allocated_bytes(device)
