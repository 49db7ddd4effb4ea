"""Register the report of each kind of result; the kind is that of the function's argument."""

from __future__ import annotations

from speedkit_jupyter.extras.check import report as check_report
from speedkit_jupyter.extras.profile import report as profile_report
from speedkit_jupyter.extras.rollouts.report import rollout_report
from speedkit_jupyter.report import data_report, tuning_report
from speedkit_jupyter.report.comparison_report import comparison_report
from speedkit_jupyter.report.verification_report import verification_report
from speedkit_jupyter.rounds.presentable import report_of

for report in (
    *(comparison_report, verification_report, tuning_report.tuning_report),
    *(profile_report.profile_report, profile_report.advice_report),
    *(data_report.batch_report, data_report.free_report),
    *(data_report.loader_report, data_report.timing_report, check_report.check_report),
    rollout_report,
):
    report_of.register(report)
