"""The rates of matrix products by BLAS and oneDNN are measured once, in a child process."""

import pytest

from speedkit_jupyter import Hardware
from speedkit_jupyter.machines import gemm_rates
from speedkit_jupyter.machines.gemm_rates import GemmRates

MEASURE = gemm_rates._measure  # other tests get an instant stand-in


def test_it_is_measured_once_and_kept_unless_the_machine_was_busy(monkeypatch):
    calls = []
    with monkeypatch.context() as busy:
        busy.setattr(gemm_rates, "_measure", MEASURE)
        busy.setattr(gemm_rates, "SCRIPT", "import time; time.sleep(60)")
        assert "within 0.1 s: the machine is busy" in gemm_rates.measured("here", 2, 0.1).failure
    rates = GemmRates(blas=1.0, onednn=2.0)
    monkeypatch.setattr(gemm_rates, "_measure", lambda threads, _: calls.append(threads) or rates)
    assert gemm_rates.known("here") is None
    assert gemm_rates.measured("here", 2) == gemm_rates.measured("here", 2) == rates
    assert calls == [2]
    assert gemm_rates.known("here").gain == 2
    assert gemm_rates.known("there") is None


@pytest.mark.parametrize(
    ("script", "patience_s", "why", "gain"),
    [
        ("print([0.2, 0.1])", 60, "", 2),  # seconds
        ("import os, signal; os.kill(os.getpid(), signal.SIGFPE)", 60, "signal 8", 0),
        ("raise RuntimeError('no such operator')", 60, "no such operator", 0),
    ],
)
def test_a_process_prints_rates_and_its_end_is_a_reason(script, patience_s, why, gain, monkeypatch):
    monkeypatch.setattr(gemm_rates, "SCRIPT", script)
    found = MEASURE(1, patience_s)
    assert why in found.failure
    assert bool(why) == bool(found.failure)
    assert found.gain == pytest.approx(gain)


@pytest.mark.slow
@pytest.mark.real_time
def test_this_machine_is_measured(here):
    found = Hardware.detect().with_gemm().cpu.gemm
    assert found is not None
    assert not found.failure
    assert found.blas > 1e8
    assert found.onednn > 1e8
    assert Hardware.detect().cpu.gemm == found
