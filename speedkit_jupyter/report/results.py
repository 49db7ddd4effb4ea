"""The report of each kind of result."""

from __future__ import annotations

from speedkit_jupyter.measure.comparison import Comparison
from speedkit_jupyter.measure.shown import report_of
from speedkit_jupyter.measure.timing import Timing
from speedkit_jupyter.report.comparisons import comparison_report
from speedkit_jupyter.report.timings import timing_report
from speedkit_jupyter.report.tunings import tuning_report
from speedkit_jupyter.report.verifications import verification_report
from speedkit_jupyter.tuning.result import Tuning
from speedkit_jupyter.tuning.verified import Verification

report_of.register(Comparison, comparison_report)
report_of.register(Timing, timing_report)
report_of.register(Tuning, tuning_report)
report_of.register(Verification, verification_report)
