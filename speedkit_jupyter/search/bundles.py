"""The compiled code of a learned plan: collected when it is proven, loaded when it is applied.

A bundle is a file next to the cache, named by its checksum; the plan in the store has its manifest.
It holds the result of `torch.compiler.save_cache_artifacts()`, and the C++ libraries, which are not
in that result. Dynamo traces the model again; nothing is compiled again.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from speedkit_jupyter.machines import compile_archive, compile_cache
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.applying import hidden, prepare
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.pool import are_too_large
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.search import learning
from speedkit_jupyter.step.repeats import UNKNOWN, StepFacts
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import SpeedKitError, in_a_line
from speedkit_jupyter.support.units import seconds
from speedkit_jupyter.torchglue import inductor as torch_private

ARTIFACTS = "artifacts"
LIBRARY = re.compile(r"\w\w/\w+(\.\w+)*\.so")
CHECKSUM = re.compile(r"[0-9a-f]{64}")
AGAIN = "the first step compiles again"


def collect(
    step: Step, config: SpeedConfig, cold_s: float, facts: StepFacts = UNKNOWN
) -> dict[str, Any] | None:
    """Keep the compiled code of a plan, by one more step, which is undone; return its manifest.

    None where the plan compiles nothing, or where nothing can be kept. `cold_s` are the seconds of
    the first step, with compiling.
    """
    folder = compile_cache.usable()
    if folder is None:
        return None
    guarded = step.guarded(facts.asked is None, off_device=are_too_large(step, copies=2))
    with hidden(*step.models), guarded:
        contexts = [prepare(one, config, step.holders(one), facts.made) for one in step.models]
        if not any(one.plan["compile"].active for one in contexts):
            return None
        runner = Runner(step, contexts, Record("warm"), facts)
        try:
            with torch_private.compiled_code_noted() as noted, runner.applied():
                warm_s = clock.timed(runner.once, runner.device)
                artifacts, libraries = noted()
                content = _packed(_in_force(), artifacts, libraries)
            checksum = hashlib.sha256(content).hexdigest()
            compile_cache.write(folder / compile_cache.BUNDLES / checksum, content)
        except Exception as error:  # the plan is proven all the same
            messages.debug(f"its compiled code is not kept: {in_a_line(error)}")
            return None
    times = {"cold_s": cold_s, "warm_s": warm_s}
    return {"checksum": checksum, "machine": compile_cache.machine(), **times}


def _in_force() -> Path:
    """Return where torch keeps compiled code now: in the user's folder, if one was chosen."""
    return Path(os.environ[compile_cache.FOLDER])


def _packed(compiled: Path, artifacts: bytes, libraries: Sequence[str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(ARTIFACTS, artifacts)
        for path in sorted(path for name in libraries for path in compiled.glob(f"*/{name}*.so")):
            packed.write(path, path.relative_to(compiled).as_posix())
    return buffer.getvalue()


def load_newest(models: Sequence[Module], optimizers: Sequence[Optimizer]) -> str:
    """Load the code of the plan that was learned for these models.

    Return a line with the seconds that it saves, or why nothing is loaded; empty without code.
    """
    try:
        learned = learning.newest(models, optimizers, Hardware.current())
    except SpeedKitError:  # a plan by rules is applied then
        return ""
    bundle = learned.value.get("bundle") if learned else None
    return load(bundle) if isinstance(bundle, dict) else ""


def load(bundle: Mapping[str, Any]) -> str:
    """Load a bundle by its manifest, unless it was changed; return a line about it."""
    folder, checksum = compile_cache.prepare(), str(bundle.get("checksum"))
    if folder is None:
        return ""  # a warning has said why
    if bundle.get("machine") != compile_cache.machine():
        return f"Its compiled code is of another machine, torch or compiler: {AGAIN}"
    if not CHECKSUM.fullmatch(checksum):
        return f"Its compiled code has no valid checksum and is not loaded: {AGAIN}"
    try:
        content = (folder / compile_cache.BUNDLES / checksum).read_bytes()
    except OSError:
        return f"Its compiled code is gone: {AGAIN}"
    if hashlib.sha256(content).hexdigest() != checksum:
        return f"Its compiled code was changed since it was kept and is not loaded: {AGAIN}"
    try:
        with compile_archive.unpacked(io.BytesIO(content)) as packed, compile_cache.in_use():
            for name in filter(LIBRARY.fullmatch, packed.namelist()):
                if not (path := _in_force() / name).exists():
                    compile_cache.write(path, packed.read(name))
            torch.compiler.load_cache_artifacts(packed.read(ARTIFACTS))
    except Exception as error:  # a damaged archive raises anything
        return f"Its compiled code can't be loaded ({in_a_line(error)}): {AGAIN}"
    cold, warm = (seconds(float(bundle[name]), 2) for name in ("cold_s", "warm_s"))
    return (
        f"Its compiled code is loaded: the first step took {cold} cold, and {warm} with it and the "
        "compiler imported"
    )
