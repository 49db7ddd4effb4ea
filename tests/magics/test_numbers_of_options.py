"""A number that an option can't take is one line; so is a name that is none."""

from __future__ import annotations

import pytest
import torch
from IPython.core.error import UsageError

from speedkit_jupyter import StepError, apply_speedups, benchmark, code, restore_all
from speedkit_jupyter.support.exceptions import ArgumentError

HUGE = "99999999999999999999"
NUMBERS = (HUGE, "-1", "-" + HUGE, "1e400", "nan", "x", "1.5", "9" * 5000, "0x10", "''")
OPTIONS = {
    "-n": "%%speedbench {}\nmodel(x)",
    "-r": "%%speedbench {}\nmodel(x)",
    "-p": "%%speedbench {}\nmodel(x)",
    "--steps": "%%speedbench --tune {}\nmodel(x)",
    "verify": "%speedkit verify {}",
}
NO_NAMES = (
    "a b; import os", "class", "", " ", "f()", "a + b", "a\nb", "True", "1", "a;b", "a=b",
    "lambda: 1", "a[b]", "a[f()]", "a.class", "*a", "a, b", "'a'", 3, None, b"a",
)  # fmt: skip
SECONDS = ("0", "-1", "nan", "inf", "1e400", "-inf", "x", "''")
WAYS = ("", "--compare baseline,bf16", "--tune")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_number_that_cant_be_counted_to_is_one_line(shell, option, number):
    word = "--steps" if option == "verify" else option
    error = shell.fails(
        OPTIONS[option].format(f"{word}={number}" if word[1] == "-" else f"{word} {number}")
    )
    assert isinstance(error, UsageError)
    assert word in str(error)
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 400


@pytest.mark.parametrize("number", SECONDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_budget_that_is_no_time_is_one_line(shell, way, number):
    error = shell.fails(f"%%speedbench {way} --budget={number}\nmodel(x)")
    assert isinstance(error, UsageError)
    assert "--budget" in str(error)
    assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400, -1, "x"])
def test_so_is_one_from_python(number):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(StepError, match="must be a positive number of seconds"):
        benchmark(lambda: model(torch.rand(1, 2)), budget_s=number)


@pytest.mark.parametrize("variants", ["", " ", ",", "baseline,", ["baseline", ""], [" "]])
def test_an_empty_variant_says_what_to_write(variants):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(StepError, match="must be names, as in 'baseline,bf16': one is empty"):
        benchmark(lambda: model(torch.rand(1, 2)), variants)


class TestNamesInCode:
    """What `code(name=...)` takes."""

    @pytest.fixture
    def context(self):
        yield apply_speedups(torch.nn.Linear(2, 2))[1]
        restore_all()

    @pytest.mark.parametrize("name", NO_NAMES)
    def test_what_names_no_object_is_refused(self, context, name):
        with pytest.raises(ArgumentError, match="must be your word for an object") as told:
            code(context, name=name)
        assert len(str(told.value).splitlines()) == 1

    @pytest.mark.parametrize(
        "name", ["net", "models['lm']", "self.net", "lst[0]", "a.b[1].c", "été", "lst[-1]"]
    )
    @pytest.mark.parametrize("form", ["torch", "accelerate", "fabric", "transformers", "yaml"])
    def test_what_names_one_stands_in_code_that_compiles(self, context, form, name):
        text = code(context, form, name=name)
        if form != "yaml":
            compile(text, "code", "exec")
            assert form != "torch" or name in text

    @pytest.mark.parametrize("name", ["class", "", "1", "opts['a b']", "self.opt"])
    def test_optimizers_get_names_that_compile(self, name):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        _, context = apply_speedups(model, optimizer=optimizer)
        compile(code(context, optimizers={name: optimizer}), "code", "exec")
        restore_all()

    def test_a_model_without_a_name_by_now_is_called_as_it_was(self, shell):
        shell.run("%speedkit apply model")
        shell.run("kept = [model]; model = None")
        text = shell.run("%speedkit code")
        assert "(an earlier" not in text.partition("\n")[2]
