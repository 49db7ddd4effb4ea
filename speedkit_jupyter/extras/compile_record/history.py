"""Read graph breaks and recompiles from torch's own records, and suggest remedies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from speedkit_jupyter.plans.registry import is_measuring
from speedkit_jupyter.support.source_lines import Spot, is_users, user_spot
from speedkit_jupyter.torchglue import dynamo
from speedkit_jupyter.torchglue.private import READ_A_NUMBER

SAME_SIZE = (
    "give every batch the same size (`drop_last=True`, or pad the last one) or a few "
    "(`bucketed`: each compiles once), or compile all at once with `dynamic=True`: slower code"
)
# Patterns of torch's reasons, each with its meaning (filled with the pattern's groups) and the
# remedy. The first match counts; without a match, torch's first line and hint are shown.
REASONS = (
    (rf"Tensor\.(item|tolist|numpy)\(\)|{READ_A_NUMBER}",
     "`.item()` or the like reads a tensor's value into Python",
     "keep it a tensor here; move `.item()` behind the compiled call"),
    (r"Data-dependent branching|generic_jump", "an `if` or `while` depends on a tensor's value",
     "use `torch.where`, or move the branch out of the compiled code"),
    (r"past_key_values.* size mismatch at index (\d+)\. expected (\d+), actual (\d+)",
     "the cache of keys and values had size {1} in dimension {0}, then {2}",
     "a static cache as long as the longest text: `--static_cache LENGTH`, or `max_cache_len`"),
    (r"tensor '(.+?)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)",
     "{0} had size {2} in dimension {1}, then {3}", SAME_SIZE),
    (r"^(?:\d+ <=? )?(\S+)\.size\(\)\[(\d+)\]",
     "{0} has a size in dimension {1} that was not compiled for", SAME_SIZE),
    (r"^(module\b.+?) == [-\d.e']+", "{0} has another value in this call, or in this block",
     "keep it the same; if the blocks of a model differ in it, `--compile-scope model`"),
    (r"^(.+?) == [-\d.e']+", "the Python value {0} changed",
     "pass it as a tensor, as `torch.tensor(value)`"),
)  # fmt: skip
# Failed guards that only show another mode or dtype; other failures explain a recompile better.
CHECKED_FIRST = re.compile(r"GLOBAL_STATE|\.training ==|dtype mismatch|requires_grad")
# Expected recompiles: training and evaluation need a graph each, and so do gradients on and off.
EXPECTED = re.compile(r"GLOBAL_STATE changed: grad_mode|\.training == |\btraining\b.* mismatch")
# Pattern of a line of code in the reason for a recompile.
USER_LINE = re.compile(r'File "(.+?)", line (\d+), in')
# torch 2.9 has a comment instead, with the end of the file name and the line number.
END_OF_FILE = re.compile(r"# ([^#]+?):(\d+) in ")
# Number of latest findings to keep. Each function has few, because torch limits its recompiles.
MOST_FINDINGS = 1000


@dataclass(frozen=True)
class Finding:
    """A `graph break`, `recompile`, or `fall-back` at torch's limit, with the user's line."""

    kind: str
    spot: Spot | None
    what: str
    remedy: str


class CompileRecord:
    """Collect torch's records as counts, seconds and `findings`, oldest first."""

    def __init__(self) -> None:
        self.frames = self.graphs = self.cache_hits = 0
        self.total_s = 0.0
        self.findings: list[Finding] = []
        self._news: list[Finding] = []
        self._last: Any = None  # the newest record read so far
        self._breaks = 0
        self._caller: Spot | None = None
        self._is_measured = False
        self.end: Callable[[], None] = lambda: None  # stops noting callers

    def listen(self) -> None:
        """Note the caller of each compilation, until `end()` or `torch.compiler.reset()`."""
        self.end()
        self.end = dynamo.on_compiling(self._start, lambda _: None)

    def news(self) -> list[Finding]:
        """Return the findings since the last call, except findings from SpeedKit's measurements."""
        self.collect()
        news, self._news = list(dict.fromkeys(self._news)), []
        return news

    def _start(self, _: Any) -> None:
        self.collect()  # earlier records belong to the earlier caller
        self._is_measured, self._caller = is_measuring(), user_spot(2)

    def collect(self) -> None:
        """Add torch's new records and graph breaks to the counts and findings."""
        records = [*dynamo.compilations()]
        at = next((i for i, one in enumerate(records) if one is self._last), -1)
        for record in records[at + 1 :]:
            self._add(record)
            self._last = record
        breaks = dynamo.graph_breaks()
        self._breaks = self._breaks if self._breaks <= len(breaks) else 0  # torch was reset
        for one in breaks[self._breaks :]:
            spots = [Spot(f.filename, f.lineno) for f in reversed(one.user_stack) if f.lineno]
            spot = next((spot for spot in spots if is_users(spot.file)), self._caller)
            self._found("graph break", spot, *explained(one.reason))
        self._breaks = len(breaks)

    def _add(self, record: Any) -> None:
        """Add a record; its fields differ between versions of torch."""
        words = ("recompile_reason", "fail_reason")
        reason, failure = (str(_of(record, word, "")) for word in words)
        begins = _place(record, "") or self._caller
        earlier = re.search(r"/(\d+)", str(_of(record, "compile_id", "")))  # count of older graphs
        if reason and earlier:
            reason = cause(dynamo.guard_failures(reason, int(earlier[1])))
        spot = _place(record, reason) or begins
        if reason and not failure and not EXPECTED.search(reason):
            self._found("recompile", spot, *explained(reason))
        if re.search("recompile.limit", failure, re.IGNORECASE):
            what, remedy = explained(reason)
            limit = "torch's limit of recompilations: it runs as plain PyTorch from here on"
            self._found("fall-back", spot, f"{limit} ({what})", remedy)
        if failure:
            return
        self.frames += bool(_of(record, "co_name", ""))
        self.graphs += bool(_of(record, "graph_op_count", 0)) or not _of(record, "co_name", "")
        took_us = _of(record, "duration_us", 0)
        self.total_s += _of(record, "entire_frame_compile_time_s", took_us * 1e-6)
        names = ("inductor_fx_local_cache_hit_count", "aotautograd_local_cache_hit_count")
        self.cache_hits += max(int(_of(record, name, 0)) for name in names)

    def _found(self, kind: str, spot: Spot | None, what: str, remedy: str) -> None:
        finding = Finding(kind, spot, what, remedy)
        known = [one for one in self.findings if (one.kind, one.spot) == (kind, spot)]
        if kind == "graph break" and known:  # only the first reason of a line counts
            return
        if not (self._is_measured or finding in self.findings):
            self._news.append(finding)
        self.findings.append(finding)
        del self.findings[:-MOST_FINDINGS]


def _of(record: Any, name: str, otherwise: Any) -> Any:
    value = getattr(record, name, None)
    return otherwise if value is None else value


def _place(record: Any, reason: str) -> Spot | None:
    """Return the last user line in `reason`, else the user function's first line, or None."""
    lines = [Spot(file, int(number)) for file, number in USER_LINE.findall(reason)]
    begins = Spot(_of(record, "co_filename", ""), _of(record, "co_firstlineno", 0))
    ends = [(begins.file.endswith(end), int(number)) for end, number in END_OF_FILE.findall(reason)]
    lines = lines or [Spot(begins.file, number) for is_same, number in ends if is_same]
    every = (*reversed(lines), begins)
    return next((spot for spot in every if spot.file and is_users(spot.file)), None)


def grouped(findings: Sequence[Finding]) -> Iterator[tuple[Finding, int]]:
    """Yield the first finding of each kind, line and remedy, and the number of such findings."""
    groups: dict[Any, list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.kind, one.spot, one.remedy), []).append(one)
    yield from ((same[0], len(same)) for same in groups.values())


def cause(reasons: Sequence[str]) -> str:
    """Return the first reason that CHECKED_FIRST does not match, else the first reason of all."""
    return next((one for one in reasons if not CHECKED_FIRST.search(one)), reasons[0])


def explained(reason: str) -> tuple[str, str]:
    """Return torch's reason in plain words, and the remedy.

    If none of REASONS matches, return torch's first line and hint.
    """
    reason = re.sub(r"^\d+/\d+: ", "", reason.strip())
    for pattern, what, remedy in REASONS:
        if match := re.search(pattern, reason):
            return what.format(*map(_named, match.groups(""))), remedy
    lines = [line.strip() for line in reason.splitlines()] or [""]
    hints = (line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: "))
    return lines[0].partition("  #")[0].strip(), next(hints, "")


def _named(guarded: str) -> str:
    """Return a readable name: `x` for L['x'], `input 1` for a compiled model's first argument."""
    if match := re.fullmatch(r"args\[(\d+)\]", guarded):
        return f"input {int(match[1]) + 1}"
    plain = re.sub(r"L\['(\w+)'\]", r"\1", guarded)
    return plain if plain.isdecimal() else f"`{plain}`"
