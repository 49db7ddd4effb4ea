"""The report of any result."""

from __future__ import annotations

from typing import Any

from speedkit_jupyter.measure.comparison import Comparison
from speedkit_jupyter.measure.timing import Timing
from speedkit_jupyter.report.comparisons import comparison_report
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.timings import timing_report
from speedkit_jupyter.report.tunings import tuning_report
from speedkit_jupyter.report.verifications import verification_report
from speedkit_jupyter.tuning.result import Tuning
from speedkit_jupyter.tuning.verified import Verification


def report_of(result: Any) -> Document:
    """What a notebook shows of a Comparison, a Timing, a Tuning or a Verification."""
    if isinstance(result, Comparison):
        return comparison_report(result)
    if isinstance(result, Tuning):
        return tuning_report(result)
    if isinstance(result, Verification):
        return verification_report(result)
    assert isinstance(result, Timing)
    return timing_report(result)
