"""Check decisions against tables of requests, machines and facts."""

from typing import Any

import pytest

from speedkit_jupyter import Facts, Hardware, SpeedConfig, code, plan
from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.facts.model import OptimizerFacts


def on(device: str, **more: Any) -> Facts:
    return Facts(device=device, devices=(device,), parameters=100, **more)


def cpu(**more: Any) -> Facts:
    return on("cpu", **more)


def cuda(**more: Any) -> Facts:
    return on("cuda:0", **more)


def trained(name: str) -> Facts:
    return cuda(linears=4, optimizers=(OptimizerFacts(name),))


SMALL = cuda(linears=4, dtypes=("bfloat16",))


def machine(words: str) -> Hardware:
    """Return a machine: `h200 torchao=0.18.0` is the stored H200 with no library but torchao."""
    name, *libraries = words.split()
    found = dict(library.split("=") for library in libraries)
    return Hardware.from_json(name).model_copy(update={"libraries": found})


def check_declined(asked: dict[str, Any], words: str, facts: Facts, why: str) -> None:
    wanted = SpeedConfig(**{"device": facts.device, **asked} if facts.device != "meta" else asked)
    decision = plan(wanted, machine(words), facts)[next(iter(asked))]
    assert (decision.declined, decision.active) == (True, False)
    assert why in decision.reason


def check_rule(name: str, words: str, facts: Facts, value: Any, offered: Any) -> None:
    decision = plan(SpeedConfig(), machine(words), facts)[name]
    assert (decision.value, decision.worth_measuring) == (value, offered)
    assert not decision.declined
    if offered is None and decision.value == named(name).none:
        assert not decision.active


def check_obeyed(asked: dict[str, Any], words: str, facts: Facts, value: Any) -> None:
    decision = plan(SpeedConfig(**asked), machine(words), facts)[next(iter(asked))]
    assert (decision.value, decision.active, decision.declined) == (value, True, False)


def check_code(form: str, asked: dict[str, Any], words: str, facts: Facts, call: str) -> None:
    text = code(plan(SpeedConfig(**asked).alone(), machine(words), facts), form=form)
    assert call in text
    compile(text, form, "exec")


def each_row(declined: list, by_rule: list, requested: list, codes: list) -> pytest.MarkDecorator:
    """Parametrize a test by the `check` and the `case` of each row of these tables."""
    rows = [
        *((check_declined, case) for case in declined),
        *((check_rule, case) for case in by_rule),
        *((check_obeyed, case) for case in requested),
        *((check_code, (form, *case)) for case in codes for form in ("torch", "transformers")),
    ]
    names = [check.__name__ for check, _ in rows]
    return pytest.mark.parametrize(("check", "case"), rows, ids=names)
