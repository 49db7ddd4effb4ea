"""Register the report of each kind of result, by the class of the function's argument."""

from __future__ import annotations

from speedkit_jupyter.report.comparison_report import comparison_report, timing_report
from speedkit_jupyter.report.tuning_report import tuning_report
from speedkit_jupyter.report.verification_report import verification_report
from speedkit_jupyter.rounds.presentable import report_of

for report in (comparison_report, verification_report, tuning_report, timing_report):
    report_of.register(report)
