"""The report of each kind of result."""

from __future__ import annotations

from speedkit_jupyter.advice.advice import Advice
from speedkit_jupyter.batching.batch_sizes import BatchSizes
from speedkit_jupyter.freeing.freed import Freed
from speedkit_jupyter.loading.tuner import LoaderTuning
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.presentable import report_of
from speedkit_jupyter.measure.results.timing import Timing
from speedkit_jupyter.profiling.profile import Profile
from speedkit_jupyter.report.comparison_report import comparison_report
from speedkit_jupyter.report.data_report import batch_report, free_report, loader_report
from speedkit_jupyter.report.profile_report import advice_report, profile_report
from speedkit_jupyter.report.timing_report import timing_report
from speedkit_jupyter.report.tuning_report import tuning_report
from speedkit_jupyter.report.verification_report import verification_report
from speedkit_jupyter.tuning.outcome import Tuning
from speedkit_jupyter.tuning.verification import Verification

report_of.register(Advice, advice_report)
report_of.register(BatchSizes, batch_report)
report_of.register(Comparison, comparison_report)
report_of.register(Freed, free_report)
report_of.register(LoaderTuning, loader_report)
report_of.register(Profile, profile_report)
report_of.register(Timing, timing_report)
report_of.register(Tuning, tuning_report)
report_of.register(Verification, verification_report)
