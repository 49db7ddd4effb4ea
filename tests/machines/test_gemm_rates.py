"""What each engine can do here is measured once, in a process of its own, and kept."""

from __future__ import annotations

import subprocess

import pytest

from speedkit_jupyter import Hardware
from speedkit_jupyter.machines import gemm_rates
from speedkit_jupyter.machines.gemm_rates import GemmRates
from speedkit_jupyter.support import database

MEASURE = gemm_rates._measure  # other tests get one that takes no time


@pytest.fixture
def sizes(monkeypatch):
    """Three of each, so that rows can be written down."""
    monkeypatch.setattr(gemm_rates, "SIZES", (64, 128, 256))


@pytest.mark.parametrize(
    ("rows", "least"),
    [
        ([(64, 1.0, 2.0), (128, 2.0, 1.0), (256, 4.0, 2.0)], 128**3),
        ([(64, 2.0, 1.0), (128, 1.0, 2.0), (256, 4.0, 2.0)], 256**3),  # ahead at all larger ones
        ([(64, 2.0, 1.0), (128, 2.0, 1.0), (256, 4.0, 4.0)], 0),
    ],
)
def test_from_the_smallest_size_on_that_is_faster_like_all_larger_ones(sizes, rows, least):
    slower = [(size, 3 * blas, onednn) for size, blas, onednn in rows]
    found = gemm_rates._rates([*slower, *rows])  # the faster of two times counts
    assert found.least == least
    assert found.blas == 3 * 2 * 256**3 / 4.0


def late(*args, **kwargs):
    raise subprocess.TimeoutExpired("python", 60)


def test_where_others_keep_it_from_ending_that_is_said_and_the_next_tries_again(monkeypatch):
    monkeypatch.setattr(gemm_rates, "_measure", MEASURE)
    with monkeypatch.context() as busy:
        busy.setattr(gemm_rates.subprocess, "run", late)
        assert "within 2 s: the machine is busy" in gemm_rates.measured("here", 1, 2.0).failure
    monkeypatch.setattr(gemm_rates, "_measure", lambda *given: GemmRates(blas=1.0, onednn=2.0))
    assert gemm_rates.measured("here", 1).gain == 2


def test_it_is_measured_once_and_kept(monkeypatch):
    calls = []
    rates = GemmRates(blas=1.0, onednn=2.0, least=5)
    monkeypatch.setattr(gemm_rates, "_measure", lambda threads, _: calls.append(threads) or rates)
    assert gemm_rates.known("here") is None
    assert gemm_rates.measured("here", 2) == gemm_rates.measured("here", 2) == rates
    assert calls == [2]
    assert gemm_rates.known("here").gain == 2
    assert gemm_rates.known("there") is None


@pytest.mark.parametrize("variable", gemm_rates.VARIABLES)
def test_what_holds_an_engine_back_has_rates_of_its_own(variable, monkeypatch, here):
    rates = GemmRates(blas=1.0, onednn=2.0, least=5)
    monkeypatch.setattr(gemm_rates, "_measure", lambda *given: rates)
    assert Hardware.detect().with_gemm().cpu.gemm == Hardware.detect().cpu.gemm == rates
    monkeypatch.setenv(variable, "other than now")
    assert Hardware.detect().cpu.gemm is None


def test_a_row_that_is_none_of_ours_is_measured_anew():
    database.keep("rates", "here", "", {"blas": -1})
    assert gemm_rates.known("here") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "patience_s", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGFPE)", 60, "signal 8"),
        ("raise RuntimeError('no such operator')", 60, "no such operator"),
        ("import time; time.sleep(60)", 0.5, "within 0.5 s: the machine is busy"),
    ],
)
def test_what_ends_its_process_is_a_reason_and_no_more(script, patience_s, why, monkeypatch):
    monkeypatch.setattr(gemm_rates, "SCRIPT", script)
    found = MEASURE(1, patience_s)
    assert why in found.failure
    assert found.gain == 0


@pytest.mark.slow
@pytest.mark.real_time
def test_this_machine_is_measured(here):
    found = Hardware.detect().with_gemm().cpu.gemm
    assert found is not None
    assert not found.failure
    assert found.blas > 1e8
    assert found.onednn > 1e8
    assert 0 <= found.least <= max(gemm_rates.SIZES) ** 3
    assert Hardware.detect().cpu.gemm == found
