"""Kinds of state that a step changes: restored, named beforehand, or missed. Exits 1 for a miss.

python tests/benchmarks/state_kinds.py [a part of a kind's name, or a family]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

# Before torch: on a busy machine two threads of so small a step would wait for each other awake.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from _kinds import KINDS, PRELUDE, TRAIN, Kind, family
from _process_kinds import FAMILIES
from _ratios import machine
from _tensor_kinds import FAMILIES as OF_TENSORS
from IPython.testing.globalipapp import start_ipython
from IPython.utils.capture import capture_output

from speedkit_jupyter import benchmark
from speedkit_jupyter.machines import flags

for title, table in (FAMILIES | OF_TENSORS).items():
    family(title, table)
RESULT = Path(__file__).parent / "results" / "state_kinds.json"
NAMED = "be put back"
VARIANTS, BUDGET_S = "baseline,fused_optimizer", 0.05


def seen(value: Any) -> Any:
    """Something to compare: tensors and arrays by their bits."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), str(value.tolist()))
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, str(value.tolist()))
    if isinstance(value, dict):
        return [(seen(key), seen(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [seen(one) for one in value]
    return value if isinstance(value, str | bytes | int | float | set | None) else repr(value)


def body(kind: Kind) -> str:
    """A training step and then what is of this kind."""
    if "LBFGS" in kind.before:
        train = "optimizer.step(lambda: (optimizer.zero_grad(), l := model(x).pow(2).mean(), "
        return f"{train}l.backward(), l)[1])\n{kind.step}"
    return f"{TRAIN}\n{kind.step}"


def expected(kind: Kind, names: dict[str, Any]) -> Any:
    """What the probe says of untouched state; one that uses its state up says it of a twin."""
    exec(f"model, optimizer, x = fresh()\n{kind.before}", names)
    before = seen(eval(kind.probe, names))
    exec(f"model, optimizer, x = fresh()\n{kind.before}", names)
    return before


def from_function(kind: Kind) -> tuple[str, str]:
    """What became of it, and what was said."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(PRELUDE, names)
    before = expected(kind, names)
    lines = "\n    ".join(body(kind).splitlines())
    assigned = [n for n in ("n", "t", "made", "a") if n in compile(body(kind), "", "exec").co_names]
    rebinds = f"    global {', '.join(assigned)}\n" if assigned else ""
    exec(f"def step():\n{rebinds}    {lines}", names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        benchmark(names["step"], VARIANTS, budget_s=BUDGET_S)
    said = [str(one.message) for one in caught if NAMED in str(one.message)]
    return outcome(before, seen(eval(kind.probe, names)), said)


def from_cell(kind: Kind, shell: Any) -> tuple[str, str]:
    """What became of it, and what was said."""
    names = shell.user_ns
    exec(PRELUDE, names)
    before = expected(kind, names)
    with capture_output() as captured:
        cell = f"%%speedbench --compare {VARIANTS} --budget {BUDGET_S}\n{body(kind)}"
        result = shell.run_cell(cell)
    result.raise_error()
    said = [line for line in captured.stdout.splitlines() if NAMED in line]
    return outcome(before, seen(eval(kind.probe, names)), said)


def outcome(before: Any, after: Any, said: list[str]) -> tuple[str, str]:
    """Restored where it is as before; else named, where something was said."""
    if before == after:
        return "restored", "; ".join(said)
    return ("named" if said else "missed"), "; ".join(said) or f"{before!r:.60} -> {after!r:.60}"


def tried(way: Any, *arguments: Any) -> tuple[str, str]:
    """Whatever happens, torch's switches are clean for the next one."""
    clean, where = flags.snapshot(), os.getcwd()
    try:
        return way(*arguments)
    except ModuleNotFoundError as error:
        return "not here", f"without {error.name}"
    except Exception as error:
        return "missed", f"{type(error).__name__}: {error!s:.150}"
    finally:
        flags.restore(clean)
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.set_flush_denormal(False)
        torch.set_default_device(None)
        os.chdir(where)


def main(part: str = "") -> int:
    """The table; a result file for the whole of it."""
    shell = start_ipython()
    shell.run_line_magic("load_ext", "speedkit_jupyter")
    os.chdir(tempfile.mkdtemp())
    rows = []
    for kind in KINDS:
        if part and part not in kind.name and part != kind.family:
            continue
        found = {"function": tried(from_function, kind), "cell": tried(from_cell, kind, shell)}
        marks = "  ".join(f"{where[0]:<8}" for where in found.values())
        print(f"{kind.family:<24} {kind.name:<40} {marks}", flush=True)
        for where, (state, words) in found.items():
            if state != "restored":
                print(f"    from a {where}: {words}", flush=True)
        rows.append(
            {"family": kind.family, "name": kind.name} | {w: f[0] for w, f in found.items()}
        )
    missed = 0
    for where in ("function", "cell"):
        counts = Counter(row[where] for row in rows)
        missed += counts["missed"]
        print(f"from a {where}: " + ", ".join(f"{n} {word}" for word, n in counts.items()))
    if not part:
        RESULT.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
