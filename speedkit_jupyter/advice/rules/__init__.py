"""All rules: a file and a line each. Those before speak first; `SlowLines` takes what is left."""

from __future__ import annotations

from speedkit_jupyter.advice.rules.autograd.anomaly_mode import AnomalyMode
from speedkit_jupyter.advice.rules.autograd.dense_embeddings import DenseEmbeddings
from speedkit_jupyter.advice.rules.autograd.frozen_gradients import FrozenGradients
from speedkit_jupyter.advice.rules.autograd.frozen_in_optimizer import FrozenInOptimizer
from speedkit_jupyter.advice.rules.autograd.gradients_one_by_one import GradientsOneByOne
from speedkit_jupyter.advice.rules.autograd.graph_kept import GraphKept
from speedkit_jupyter.advice.rules.autograd.graphs_of_graphs import GraphsOfGraphs
from speedkit_jupyter.advice.rules.autograd.input_gradients import InputGradients
from speedkit_jupyter.advice.rules.autograd.no_grad import NoGrad
from speedkit_jupyter.advice.rules.autograd.set_to_none import SetToNone
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.rules.data.in_memory import InMemory
from speedkit_jupyter.advice.rules.data.kept_samples import KeptSamples
from speedkit_jupyter.advice.rules.data.moved_in_data_set import MovedInDataSet
from speedkit_jupyter.advice.rules.data.padding import Padding
from speedkit_jupyter.advice.rules.data.pin_memory import PinMemory
from speedkit_jupyter.advice.rules.data.small_batch import SmallBatch
from speedkit_jupyter.advice.rules.data.worker_start import WorkerStart
from speedkit_jupyter.advice.rules.data.workers import Workers
from speedkit_jupyter.advice.rules.python.cleaning import Cleaning
from speedkit_jupyter.advice.rules.python.copied_state import CopiedState
from speedkit_jupyter.advice.rules.python.growing_copies import GrowingCopies
from speedkit_jupyter.advice.rules.python.one_by_one import OneByOne
from speedkit_jupyter.advice.rules.python.parameter_loops import ParameterLoops
from speedkit_jupyter.advice.rules.python.recurrent_cells import RecurrentCells
from speedkit_jupyter.advice.rules.python.same_forward_twice import SameForwardTwice
from speedkit_jupyter.advice.rules.python.slow_lines import SlowLines
from speedkit_jupyter.advice.rules.python.synchronizations import Synchronizations
from speedkit_jupyter.advice.rules.python.tensor_of_list import TensorOfList
from speedkit_jupyter.advice.rules.python.writing import Writing
from speedkit_jupyter.advice.rules.settings.attention_by_hand import AttentionByHand
from speedkit_jupyter.advice.rules.settings.busy_machine import BusyMachine
from speedkit_jupyter.advice.rules.settings.catalog import Catalog
from speedkit_jupyter.advice.rules.settings.deterministic import Deterministic
from speedkit_jupyter.advice.rules.settings.distribution_checks import DistributionChecks
from speedkit_jupyter.advice.rules.settings.double_precision import DoublePrecision
from speedkit_jupyter.advice.rules.settings.learned import Learned
from speedkit_jupyter.advice.rules.settings.profiler_on import ProfilerOn
from speedkit_jupyter.advice.rules.settings.recompiling import Recompiling
from speedkit_jupyter.advice.rules.settings.sparse_products import SparseProducts

RULES: tuple[Rule, ...] = (
    Cleaning(),
    CopiedState(),
    GrowingCopies(),
    ParameterLoops(),
    TensorOfList(),
    Writing(),
    Synchronizations(),
    OneByOne(),
    RecurrentCells(),
    SameForwardTwice(),
    InMemory(),
    KeptSamples(),
    Workers(),
    WorkerStart(),
    PinMemory(),
    MovedInDataSet(),
    Padding(),
    SmallBatch(),
    NoGrad(),
    AnomalyMode(),
    Deterministic(),
    ProfilerOn(),
    GradientsOneByOne(),
    GraphKept(),
    GraphsOfGraphs(),
    SetToNone(),
    FrozenGradients(),
    FrozenInOptimizer(),
    DenseEmbeddings(),
    InputGradients(),
    BusyMachine(),
    DistributionChecks(),
    DoublePrecision(),
    AttentionByHand(),
    SparseProducts(),
    Recompiling(),
    Learned(),
    Catalog(),
    SlowLines(),
)
