"""What the heads of tables' columns mean, for somebody who has never heard of them."""

from __future__ import annotations

from speedkit_jupyter.measure.results.statistics import INTERVAL

HINTS = {
    "variant": "A plan that was measured: its parts, joined by +; baseline is your code as it is",
    "verdict": (
        "faster, slower: proven by the interval; no gain: it takes as long, within 2 %; "
        "too noisy: the interval is too wide to tell; wrong: the results are off by more "
        "than rounding explains; not checked: the results could not be compared"
    ),
    "median": "Half of the timed steps took less, half took more",
    "speed-up": "Baseline time over the variant's time, in pairs of steps: 2× is twice as fast",
    INTERVAL: "The range in which the true value lies, in 95 of 100 such measurements; if it "
    "contains 1×, there may be no gain at all",
    "first call": "How long the first step took: compiling and other work that is done once",
    "memory": "Memory of model and optimizer, and what the step needs beyond it at its peak",
    "of limit": "The least time that this machine needs for the arithmetic or the memory traffic, "
    "as a share of the time that was taken: 100 % can't be made faster",
    "accuracy": (
        "Against the same step in float64. as exact: no further from it than the baseline is; "
        "rounding 0.05: off by a relative 0.05 at most, which the lower precision explains; "
        "wrong: off by more than rounding explains; changed: it changes the results on purpose"
    ),
    "state": "on: in force; as is: left alone; declined: it was asked for and can't be done here",
    "value": "The setting, in the words that the options take",
    "by": "Who decided: auto (a rule), you, the environment, or a measurement (measured)",
    "part": "A part of the step, or of the plan",
    "share": "Of the time of the whole step",
    "of a step": "How long it takes within one step",
    "backward": "The share of it that is the backward pass",
    "operations": "Floating-point operations of products, convolutions and attention",
    "moves": "Bytes of the tensors that are read and written",
    "waiting": "The share of the time in which the step waits for the next batch",
    "expected, whole step": "How many times as fast the step could be, by the share of the time "
    "that the remedy concerns",
    "gone with it": "What you can't use any more after letting go",
}
