"""torch's reasons for graph breaks and recompilations, in plain words and with a remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from speedkit_jupyter.torchglue.dynamo import BREAK_CALL
from speedkit_jupyter.torchglue.private import READ_A_NUMBER


class CompileReason(NamedTuple):
    """What happened, and what to change."""

    what: str
    remedy: str


# A pattern of torch's reason; what it means, with the pattern's groups; what to change. The first
# that matches counts.
BREAKS = (
    (rf"Tensor\.(item|tolist|numpy)\(\)|{READ_A_NUMBER}",
     "`.item()` or the like reads a tensor's value into Python",
     "keep it a tensor here; move `.item()` behind the compiled call"),
    (r"Data-dependent branching|generic_jump",
     "an `if` or `while` depends on a tensor's value",
     "use `torch.where`, or move the branch out of the compiled code"),
    (r"builtin.*`print`|builtin print", "`print()` can't be compiled", "print after the call"),
    (r"[Ll]ogger|logging", "logging can't be compiled", "log after the call"),
    (re.escape(BREAK_CALL), "the code asks for a graph break", "remove that call"),
    (r"torch\.compiler\.disable", "it calls a function marked `torch.compiler.disable`",
     "nothing, if that is meant; else take the mark off"),
    (r"[Dd]ynamic (output )?shape|nonzero|masked_select|unique",
     "the shape of a result depends on values",
     "use a mask or `torch.where`, so that shapes stay the same"),
    (r"fake tensor|FakeTensor|FX node",
     "an operator has no rule for the shape of its result",
     "give your operator one: `NAME.register_fake`"),
    (r"context manager", "a context manager in there can't be compiled",
     "enter it around the compiled call"),
    (r"marked as skipped|C function|builtin|skipfiles",
     "it calls code that torch.compile can't look into",
     "move that call out, or wrap it by `torch.library.custom_op`"),
)  # fmt: skip
SAME_SIZE = (
    "give every batch the same size (`drop_last=True`, or pad the last one), or compile with "
    "`dynamic=True`"
)
RECOMPILES = (
    (r"tensor '(.+?)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)",
     "{0} had size {2} in dimension {1}, then {3}",
     SAME_SIZE),
    (r"^(?:\d+ <=? )?(\S+)\.size\(\)\[(\d+)\]",
     "{0} has a size in dimension {1} that was not compiled for", SAME_SIZE),
    (r"tensor '(.+?)' (?:rank|stride)",
     "{0} has another shape or layout", "give it the same each time (`.contiguous()`)"),
    (r"tensor '(.+?)' dtype mismatch\. expected (\w+), actual (\w+)",
     "{0} was {1}, then {2}", "cast it before the call"),
    (r"tensor '(.+?)' requires_grad", "{0} needs gradients now, or no more",
     "nothing, if both are meant; torch keeps one graph for each"),
    (r"GLOBAL_STATE changed: .*autocast", "autocast was switched on or off around the call",
     "call it always inside autocast, or never"),
    (r"GLOBAL_STATE changed: .*num_threads", "the number of threads changed",
     "set the number of threads before the first call"),
    (r"GLOBAL_STATE changed: *(\S+)", "{0} changed", "set it before the first call"),
    (r"^len\((.+?)\) ==", "the length of {0} changed", "pass a tensor, or always the same length"),
    (r"^(module\b.+?) == [-\d.e']+", "{0} has another value in this call, or in this block",
     "keep it the same; where the blocks of a model differ in it, `--compile-scope model`"),
    (r"^(.+?) == [-\d.e']+", "the Python value {0} changed",
     "pass it as a tensor, as `torch.tensor(value)`"),
    (r"\bEq\(|\bNe\(|\b[su]\d+\b", "the sizes of the inputs relate to each other otherwise",
     "give every batch the same size"),
    (r"obj_id\((.+?),|type_id\((.+?),", "{0} is another object now",
     "define it once, and don't rebind it between calls"),
)  # fmt: skip
# What guards check first. A graph that fails at a later one is like the call in all of these.
CHECKED_FIRST = ("GLOBAL_STATE|\\.training ==", "dtype mismatch", "requires_grad")
# Both kinds of a graph are needed, once each: nothing is wrong.
EXPECTED = re.compile(r"GLOBAL_STATE changed: grad_mode|\.training == |\btraining\b.* mismatch")
LIMIT = re.compile(r"recompile.limit", re.IGNORECASE)
# Guards name the user's variables like this: L['x'], and our own call's arguments.
VARIABLE = re.compile(r"L\['(\w+)'\]")
INPUT = re.compile(r"^(?:args\[(\d+)\]|kwargs\['(\w+)'\])$")


def cause(reasons: Sequence[str]) -> str:
    """Return, of the reasons why no graph served a call, that of the graph which nearly did."""

    def passed(reason: str) -> int:
        failed = (at for at, one in enumerate(CHECKED_FIRST) if re.search(one, reason))
        return next(failed, len(CHECKED_FIRST))

    return max(reasons, key=passed)


def explained(reason: str, table: tuple[tuple[str, str, str], ...]) -> CompileReason:
    """Return torch's reason in plain words; its own first line and hint where none are known."""
    reason = re.sub(r"^\d+/\d+: ", "", reason.strip())
    for pattern, what, remedy in table:
        if match := re.search(pattern, reason):
            return CompileReason(what.format(*map(_named, match.groups(""))), remedy)
    lines = [line.strip() for line in reason.splitlines()] or [""]
    hints = (line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: "))
    return CompileReason(lines[0].partition("  #")[0].strip(), next(hints, ""))


def _named(guarded: str) -> str:
    """Return `x` for L['x'], and `the input` for the first argument of a compiled model."""
    if match := INPUT.match(guarded.strip()):
        return f"`{match[2]}`" if match[2] else f"input {int(match[1]) + 1}"
    if guarded.startswith("___stack"):
        return "that this line computes"
    plain = VARIABLE.sub(r"\1", guarded.strip())
    return plain if re.fullmatch(r"[\d.]+|[A-Z]\w*", plain) else f"`{plain}`"
