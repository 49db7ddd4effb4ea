"""Each setting of the process that a step changes is restored or named: tried over the tables."""

from __future__ import annotations

import gc
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.step import StateWarning, Step
from speedkit_jupyter.measure.undo.kinds.code.names import Names
from speedkit_jupyter.measure.undo.kinds.process import (
    interpreter,
    process,
    torch_registries,
    torch_switches,
)
from speedkit_jupyter.measure.undo.kinds.settings import is_same, owner_of  # noqa: F401  (for the code below)


@pytest.fixture(scope="module", autouse=True)
def nothing_frozen(small_heap: None) -> Iterator[None]:
    """As in a process of its own: whether anything is frozen is one of the settings."""
    gc.unfreeze()
    interpreter._was_frozen.cache_clear()
    yield
    gc.freeze()
    interpreter._was_frozen.cache_clear()


TABLE = {one.name: one for one in [*process.switches(), *process.surroundings()]}

# Code that changes those of which a value can't be made up.
CHANGES = {
    "os.environ": "import os; os.environ['SPEEDKIT_TRIED'] = '1'",
    "the environment of C": "import os; os.putenv('SPEEDKIT_TRIED_C', '1')",
    "the time zone": "import os, time; os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()",
    "the working directory": "import os; os.chdir('/')",
    "signal handlers": "import signal; signal.signal(signal.SIGUSR1, lambda *a: None)",
    "blocked signals": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])",
    "timers of signals": "import signal; signal.setitimer(signal.ITIMER_REAL, 9999)",
    "the locale": "import locale; locale.setlocale(locale.LC_ALL, other_locale)",
    "umask": "import os; os.umask(0o070)",
    "limits of resources": (
        "import resource as r; was = r.getrlimit(r.RLIMIT_NOFILE); "
        "r.setrlimit(r.RLIMIT_NOFILE, (was[0] - 1, was[1]))"
    ),
    "the cores of the process": (
        "import os as o; o.sched_setaffinity(0, [min(o.sched_getaffinity(0))])"
    ),
    "the priority of the process": "import os; os.nice(1)",
    "sys.settrace": "import sys; sys.settrace(lambda *a: None)",
    "sys.setprofile": "import sys; sys.setprofile(lambda *a: None)",
    "sys.setdlopenflags": "import os, sys; sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)",
    "the stack size of threads": "import threading; threading.stack_size(2**20)",
    "gc": "import gc; gc.set_threshold(500, 10, 10)",
    "gc's debugging": "import gc; gc.set_debug(gc.DEBUG_UNCOLLECTABLE)",
    "gc.freeze": "import gc; gc.freeze()",
    "csv's dialects": "import csv; csv.register_dialect('speedkit_tried')",
    "warnings' filters": "import warnings; warnings.simplefilter('ignore', ImportWarning)",
    "decimal.getcontext()": "import decimal; decimal.getcontext().prec += 1",
    "decimal.DefaultContext": "import decimal; decimal.DefaultContext.prec += 1",
    "decimal.BasicContext": "import decimal; decimal.BasicContext.prec += 1",
    "decimal.ExtendedContext": "import decimal; decimal.ExtendedContext.prec += 1",
    "asyncio's policy": "import asyncio; asyncio.set_event_loop_policy(Policy())",
    "atexit": "import atexit; atexit.register(nothing)",
    "faulthandler": "import faulthandler as f; (f.disable if f.is_enabled() else f.enable)()",
    "tracemalloc": "import tracemalloc; tracemalloc.start()",
    "loggers": "import logging; logging.getLogger('tried').addHandler(logging.NullHandler())",
    "numpy's errors": "import numpy as np; np.seterr(all='ignore', under='raise')",
    "numpy.seterrcall": "import numpy as np; np.seterrcall(nothing)",
    "numpy.setbufsize": "import numpy as np; np.setbufsize(16384)",
    "printing of arrays": "import numpy as np; np.set_printoptions(precision=2)",
    "matplotlib.rcParams": "import matplotlib as m; m.rcParams['lines.linewidth'] = 7.0",
    "figures of matplotlib": "from matplotlib import pyplot as p; p.figure()",
    "sklearn.set_config": "import sklearn; sklearn.set_config(assume_finite=True)",
    "torch's switches": "torch.set_float32_matmul_precision('medium')",
    "default device": "torch.set_default_device('meta')",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True, warn_only=True)",
    "anomaly mode": "torch.autograd.set_detect_anomaly(True)",
    "torch.backends.quantized.engine": "q = torch.backends.quantized; q.engine = other_engine",
    "torch.backends.opt_einsum.strategy": "torch.backends.opt_einsum.strategy = 'greedy'",
    "torch._dynamo.eval_frame._stance": "torch.compiler.set_stance('force_eager')",
    "hooks of saved tensors": (
        "torch._C._autograd._push_saved_tensors_default_hooks(nothing, nothing)"
    ),
    "hooks of saved tensors, allowed": "torch._C._autograd._saved_tensors_hooks_disable('no')",
    "function modes": "Mode().__enter__()",
    "dispatch modes": "DispatchMode().__enter__()",
    "forward-mode levels": "torch.autograd.forward_ad.enter_dual_level()",
    "endianness of files": (
        "from torch import serialization as s; s.set_default_load_endianness(s.LoadEndianness.BIG)"
    ),
    "mmap options": "import mmap; torch.serialization.set_default_mmap_options(mmap.MAP_SHARED)",
    "the sharing strategy": "torch.multiprocessing.set_sharing_strategy('file_system')",
    "printing of tensors": "torch.set_printoptions(precision=2)",
    "operators of torch.library": "define()",
    "kernels of torch.library": "implement()",
    "compiler settings": "import torch._dynamo as d; d.config.verbose = not d.config.verbose",
    "inference mode": "entered.append(torch._C._InferenceMode(True))",
    "mimetypes": "import mimetypes; mimetypes.add_type('a/tried', '.tried')",
    "finalizers": "import weakref; weakref.finalize(nothing, print)",
    "the time-out of sockets": "import socket; socket.setdefaulttimeout(77.0)",
}  # fmt: skip
# Of which a change can't be made in a process that is to go on.
ONCE = {
    "threads between operators", "torch's profiler", "torch.distributed", "options of pandas",
    "JIT's GPU fuser",
    "the preferred linalg_library", "the preferred blas_library", "the preferred rocm_fa_library",
}  # fmt: skip


class Mode(torch.overrides.TorchFunctionMode):
    """Does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    """Does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Policy(__import__("asyncio").DefaultEventLoopPolicy):
    """The user's own."""


def nothing(*arguments: Any) -> None:
    """For hooks."""


def define() -> None:
    """An operator that nobody calls."""
    library = torch.library.Library("speedkit_tried", "FRAGMENT")
    LIBRARIES.append(library)
    library.define(f"op{len(LIBRARIES)}(Tensor a) -> Tensor")


def implement() -> None:
    """A kernel for one."""
    define()
    LIBRARIES[-1].impl(f"op{len(LIBRARIES)}", lambda a: a, "CPU")


LIBRARIES: list[Any] = []


def other(value: Any) -> Any:
    """Another value of the same kind, where that is easy."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else nothing


def generic() -> dict[str, str]:
    """Of attributes, containers and pairs of functions."""
    found: dict[str, str] = {}
    attributes = {**interpreter.ATTRIBUTES, **torch_switches.COMPUTING_ATTRIBUTES}
    for path, names in {**attributes, **torch_registries.BESIDE_ATTRIBUTES}.items():
        for name in names.split():
            code = f"o = owner_of({path!r}); o.{name} = other(getattr(o, {name!r}, None))"
            found[f"{path.replace(':', '.')}.{name}"] = code
    for name in ("raiseExceptions", "lastResort", "_loggerClass", "_logRecordFactory"):
        code = f"import logging as o; o.{name} = other(o.{name})"
        found[f"logging.{name}"] = code
    for name in ("_warnings_showwarning",):
        found["logging.captureWarnings"] = f"import logging as o; o.{name} = nothing"
    found["logging.disable"] = "import logging; logging.disable(33)"
    found["torch.distributions.Distribution._validate_args"] = (
        "import torch.distributions as d; c = d.Distribution; "
        "c.set_default_validate_args(not c._validate_args)"
    )
    hooks = [(path, name) for path, names in torch_switches.HOOKS.items() for name in names.split()]
    rows = [*hooks, *(row[:2] for row in (*interpreter.CONTENTS, *torch_registries.REGISTRIES))]
    for path, name in rows:
        found[f"{path.replace(':', '.')}.{name}"] = f"add(owner_of({path!r}).{name})"
    for title, name in (
        ("names of levels", "_levelToName"),
        ("levels of names", "_nameToLevel"),
    ):
        found[title] = f"import logging; add(logging.{name})"
    log = torch_registries.LOGGING
    found["torch._logging.set_logs"] = f"add(owner_of({log!r}).log_qname_to_level)"
    found["artifacts of torch._logging"] = f"add(owner_of({log!r}).artifact_names)"
    rows = (*interpreter.CALLS, *torch_switches.COMPUTING, *torch_registries.BESIDE)
    for title, path, read, write in rows:
        found[title] = f"o = owner_of({path!r}); o.{write}(other(o.{read}()))"
    return found | CHANGES


def add(found: Any) -> None:
    """Something, to a list, dict or set."""
    if isinstance(found, list):
        found.append(nothing)
    elif isinstance(found, dict):
        found[nothing] = nothing
    else:
        found.add(nothing)


def changed(name: str, from_cell: bool) -> tuple[Any, Any, Any, list[str]]:
    """The value before, in the step and after it, and what was said."""
    import locale

    import torch._dynamo  # what is not loaded has no settings yet

    setting, code = TABLE[name], generic()[name]
    space: dict[str, Any] = {**globals(), "entered": [], "inside": []}
    engines = {"none", torch.backends.quantized.engine}
    space["other_engine"] = next(
        (e for e in torch.backends.quantized.supported_engines if e not in engines), "none"
    )
    space["other_locale"] = "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8"
    if from_cell:
        compiled = compile(code, "<cell>", "exec")
        cell = Names(space, compiled.co_names, codes=[compiled])
        step = Step(lambda context: exec(compiled, space), [], names=space, others=[cell])
        run = lambda: step.run(None)  # noqa: E731
    else:
        exec(f"def step():\n    {code}", space)
        step, run = step_of(space["step"]), space["step"]
    before = setting.read()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StateWarning)
        with step.isolated():
            run()
            inside = setting.read()
            space["entered"].clear()
    said = [str(one.message) for one in caught if one.category is StateWarning]
    return before, inside, setting.read(), said


@pytest.mark.sampled(5)
@pytest.mark.parametrize("from_cell", [False, True], ids=["function", "cell"])
@pytest.mark.parametrize("name", sorted(TABLE.keys() - ONCE))
@pytest.mark.filterwarnings("ignore")
def test_what_a_step_sets_for_the_process_is_restored_or_named(name, from_cell):
    try:
        TABLE[name].read()
    except Exception as error:
        pytest.skip(f"not here: {error}")
    before, inside, after, said = changed(name, from_cell)
    try:
        assert not is_same(inside, before), "the step changed nothing: the test tries nothing"
        assert is_same(after, before) or any(name in line for line in said), said
        assert not (is_same(after, before) and any(name in line for line in said)), said
    finally:
        if not is_same(after, before) and TABLE[name].write is not None:
            TABLE[name].write(before)


def test_after_a_dispatch_mode_that_a_step_left_entered_code_is_compiled_as_before():
    frames = []

    def backend(graph: Any, inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    found = torch_switches._dispatch_modes()
    DispatchMode().__enter__()
    DispatchMode().__enter__()
    torch_switches._write_dispatch_modes(found)
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    torch._dynamo.reset()
    assert frames


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers of signals")
@pytest.mark.parametrize(
    ("set_to", "meanwhile", "is_named"),
    [
        ((0.01,), lambda: time.sleep(0.05), False),  # it rings, once
        ((999, 999), lambda: None, False),
        ((999,), lambda: signal.setitimer(signal.ITIMER_REAL, 0), True),
        ((0.01, 999), lambda: signal.setitimer(signal.ITIMER_REAL, 0), True),
    ],
    ids=["rings", "goes on", "ended by the step", "ended between two rings"],
)
def test_a_timer_that_rings_once_was_not_changed_by_the_step(set_to, meanwhile, is_named):
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, *set_to)
    step, run = step_of(meanwhile), meanwhile
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", StateWarning)
            with step.isolated():
                run()
        assert any("timers of signals" in str(one.message) for one in caught) is is_named
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
