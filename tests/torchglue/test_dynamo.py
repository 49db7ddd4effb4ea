"""Dynamo's private names exist, and each function of torchglue/dynamo.py does what it says."""

import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from speedkit_jupyter.torchglue import dynamo


def test_a_failed_cpp_compiler_says_why():
    said, error = b"ld: warning\nld: final link failed: full\n", ValueError()
    error.__cause__ = subprocess.CalledProcessError(1, ["g++"], said)
    assert str(dynamo.cause(error)) == "ld: final link failed: full"


def test_a_function_that_is_left_uncompiled_runs_as_it_is():
    def seen(x):
        return x + 1 if torch.compiler.is_compiling() else x - 1

    dynamo.leave_uncompiled(seen)
    assert torch.compile(seen, backend="eager")(torch.ones(2)).tolist() == [0.0, 0.0]


def test_the_compilers_tell_of_themselves_and_are_imported_ahead():
    assert dynamo.dynamo_config() is sys.modules[dynamo.DYNAMO_CONFIG]
    assert dynamo.override_caches()
    assert not dynamo.is_compiler_error(ValueError())
    assert dynamo.guard_failures("no graph has it", 3) == ["no graph has it"]
    dynamo.import_compiler()
    assert {*dynamo.COMPILERS, *dynamo.COMPILER_PARTS} <= sys.modules.keys()


def test_graph_breaks_and_what_was_compiled_are_told():
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    before = len(dynamo.graph_breaks())
    torch.compile(broken, backend="eager")(torch.ones(2))
    (one,) = dynamo.graph_breaks()[before:]
    assert "graph_break" in one.reason
    assert one.user_stack[-1].name == "broken"
    assert dynamo.is_dynamo_loaded()
    config, settings = dynamo.eager_backward()
    assert all(getattr(config, name) is not value for name, value in settings.items())


def test_an_error_of_the_compilers_tells_where_it_comes_from():
    def broken(x):
        return torch._dynamo.graph_break() or x

    with pytest.raises(RuntimeError) as error:
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2))
    file, number = dynamo.users_lines(error.value)[0]
    assert (file, number) == (__file__, broken.__code__.co_firstlineno + 1)
    assert not dynamo.lacks_compiler(error.value)
    inner = ValueError("inner")
    outer = RuntimeError("outer")
    outer.__cause__ = inner
    assert dynamo.cause(outer) is inner


def test_a_compilation_is_told_and_its_error_known():
    told = []
    remove = dynamo.on_compiling(told.append, told.append)
    before = dynamo.compile_counters()["stats"]["unique_graphs"]
    noted = dynamo.compilations()[-1:]  # torch keeps only the latest entries
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    finally:
        remove()
    assert len(told) == 2
    assert dynamo.compile_counters()["stats"]["unique_graphs"] == before + 1
    assert dynamo.compilations()[-1:] != noted
    with pytest.raises(RuntimeError) as error:
        torch.compile(lambda x: torch._dynamo.graph_break() or x, fullgraph=True)(torch.ones(2))
    assert dynamo.is_compiler_error(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("stance", [nullcontext, partial(torch.compiler.set_stance, "default")])
@pytest.mark.usefixtures("nothing_compiled")
def test_guards_are_left_out_in_the_block_alone_and_not_under_the_users_own_stance(stance):
    scale = [2]
    compiled = torch.compile(lambda x: x * scale[0], backend="eager")
    x = torch.ones(2)
    assert compiled(x)[0] == 2
    with stance(), dynamo.without_guards():
        scale[0] = 3
        assert compiled(x)[0] == 2  # a guard would have noticed the change
    assert compiled(x)[0] == 3
    with torch.compiler.set_stance("force_eager"), dynamo.without_guards():
        scale[0] = 4
        assert compiled(x)[0] == 4
