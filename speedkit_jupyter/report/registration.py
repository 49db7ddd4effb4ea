"""Register the report of each kind of result; the kind is that of the function's argument."""

from __future__ import annotations

from speedkit_jupyter.measure.results.presentable import report_of
from speedkit_jupyter.report.comparison_report import comparison_report
from speedkit_jupyter.report.data_report import (
    batch_report,
    free_report,
    loader_report,
    timing_report,
)
from speedkit_jupyter.report.profile_report import advice_report, profile_report
from speedkit_jupyter.report.tuning_report import tuning_report
from speedkit_jupyter.report.verification_report import verification_report

for report in (
    *(advice_report, batch_report, comparison_report, free_report, loader_report),
    *(profile_report, timing_report, tuning_report, verification_report),
):
    report_of.register(report)
