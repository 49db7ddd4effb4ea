"""Check the folder of compiled code, and that a graph's kernels share one library."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, SpeedKitError, apply_speedups
from speedkit_jupyter.extras import autotune
from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.machines.hardware import cxx_compiler
from speedkit_jupyter.report.tuning_report import cache_report
from speedkit_jupyter.support import database
from speedkit_jupyter.torchglue import inductor as torch_private

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders of POSIX")
needs_gpp = pytest.mark.skipif(sys.platform != "linux" or not cxx_compiler(), reason="g++ on Linux")
COMPILE = SpeedConfig(compile=True).alone()
MODEL = nn.Linear(2, 2)


@pytest.fixture
def unset() -> Iterator[pytest.MonkeyPatch]:
    """Unset the variable that names the user's folder; yield the monkeypatch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(compile_cache.FOLDER, raising=False)
        compile_cache._warn_once.cache_clear()
        yield patch


def in_force() -> str | None:
    folder: str | None = compile_cache.compiler_flags()[compile_cache.FOLDER].read()
    return folder


def test_while_a_plan_compiles_torch_keeps_code_in_a_folder_of_the_users(unset) -> None:
    with apply_speedups(MODEL, COMPILE)[1]:
        folder = Path(in_force() or "")
        assert folder.parent == compile_cache.place()
        assert all(path.stat().st_mode & 0o777 == 0o700 for path in (folder, *folder.parents[:2]))
    assert in_force() is None


def test_a_folder_that_the_user_chose_stays_in_use(unset, tmp_path) -> None:
    unset.setenv(compile_cache.FOLDER, str(tmp_path))
    with apply_speedups(MODEL, COMPILE)[1]:
        assert in_force() == str(tmp_path)


def test_a_folder_that_torch_wrote_into_the_variable_is_not_the_users(unset) -> None:
    torch_private.inductor_config()
    __import__("torch._inductor.runtime.cache_dir_utils")
    unset.setenv(compile_cache.FOLDER, torch_private.usual_cache_folder())
    with apply_speedups(MODEL, COMPILE)[1]:
        assert str(compile_cache.root()) in str(in_force())


def test_other_backends_leave_the_folder_alone(unset) -> None:
    config = SpeedConfig(compile={"enabled": True, "backend": "eager"}).alone()
    with apply_speedups(MODEL, config)[1]:
        assert in_force() is None
    assert not compile_cache.root().exists()


@pytest.mark.parametrize("which", [compile_cache.root, compile_cache.place])
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_to_is_refused_in_a_line(unset, which, mode) -> None:
    compile_cache.prepare()
    which().chmod(mode)
    with pytest.warns(UserWarning, match=r"nor loaded: other users can write to .*chmod go-w"):
        context = apply_speedups(MODEL, COMPILE)[1]
    with context:
        assert context.plan["compile"].active
        assert in_force() is None


@pytest.mark.parametrize("name", ["a b", "it's", 'a"b', "a\\b", "a\nb"])
def test_code_is_kept_where_a_cxx_compiler_can_be_told_of_it(unset, tmp_path, name) -> None:
    for variable in ("HOME", "XDG_CACHE_HOME"):  # for macOS and Linux
        unset.setenv(variable, str(tmp_path / "home"))
    unset.setenv("SPEEDKIT_DATA", str(tmp_path / name))
    first = compile_cache.prepare()
    assert first is not None
    assert compile_cache.is_plain(first)
    assert first.is_relative_to(tmp_path / "home")
    assert str(first.parent) in " ".join(str(cache_report()).split())
    unset.setenv("SPEEDKIT_DATA", str(tmp_path / "plain-ü"))
    assert compile_cache.root().parent == tmp_path / "plain-ü"


def test_without_a_home_nothing_is_kept_and_that_is_a_line(unset, capsys) -> None:
    import platformdirs

    def user_data_path(*_: object) -> Path:
        raise RuntimeError("there is no home")

    unset.delenv("SPEEDKIT_DATA")
    unset.setattr(platformdirs, "user_data_path", user_data_path)
    with pytest.warns(UserWarning, match="neither saved nor loaded: .* there is no home"):
        context = apply_speedups(MODEL, COMPILE)[1]
    context.restore()
    assert "there is no home" in str(cache_report())
    assert (database.learned(), autotune.models()) == ([], [])
    assert "plans can't be stored" in capsys.readouterr().out
    with pytest.raises(SpeedKitError, match="there is no home"):
        database.learn("a", "task", {})


@pytest.mark.parametrize(
    ("name", "fake", "why"),
    [
        ("getuid", lambda: 12345, "belongs to another user"),
        ("statvfs", lambda _: SimpleNamespace(f_flag=getattr(os, "ST_NOEXEC", 0)),
         "programs can't be run"),
    ],
)  # fmt: skip
def test_a_folder_of_another_user_or_without_programs_is_refused(unset, name, fake, why) -> None:
    compile_cache.prepare()
    unset.setattr(os, name, fake)
    with pytest.raises(SpeedKitError, match=why):
        compile_cache.trusted()


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (torch, "__version__", "9.9"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "none"),  # from ATEN_CPU_CAPABILITY
    ],
)
def test_another_torch_or_set_of_instructions_has_another_folder(unset, module, name, value):
    found = compile_cache.place()
    unset.setattr(module, name, value)
    compile_cache._machine.cache_clear()
    other = compile_cache.place()
    unset.undo()
    compile_cache._machine.cache_clear()
    assert other.name != found.name


@needs_gpp
def test_only_a_compiler_that_knows_the_instructions_is_trusted_with_them() -> None:
    if not torch_private.instruction_options():
        pytest.skip("an x86 CPU with vector instructions")
    assert compile_cache._knows_instructions(cxx_compiler())
    assert not compile_cache._knows_instructions("false")
    assert not compile_cache._knows_instructions(None)


def test_more_code_than_fits_is_deleted(unset) -> None:
    code = compile_cache.prepare() / compile_cache.COMPILED / "code"
    code.write_bytes(b"1234")
    for most, stays in ((4, True), (3, False)):
        unset.setattr(compile_cache, "MOST_CACHE_BYTES", most)
        compile_cache._bound_once.cache_clear()
        compile_cache.prepare()
        assert code.exists() == stays


def test_other_files_and_links_stay(unset, tmp_path) -> None:
    folder = compile_cache.prepare()
    assert folder is not None
    (tmp_path / "mine").mkdir()
    (folder.parent / "0123456789abcdef").symlink_to(tmp_path)
    mine = [tmp_path / "mine" / "a", folder / "b", folder.parent / "c", folder.parent.parent / "d"]
    ours = folder / compile_cache.COMPILED / "code"
    for path in (*mine, ours):
        path.write_text("")
    compile_cache.clear()
    assert all(path.exists() for path in mine)
    assert not ours.exists()


REQUIRED = SpeedConfig(compile={"enabled": True, "required": True}).alone()


def network() -> nn.Module:
    """Return a network whose forward and backward pass have several kernels each."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4), nn.Softmax(-1)
    return nn.Sequential(*layers)


def trained(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    output = model(torch.linspace(-1, 1, 24).view(3, 8))
    (output * torch.arange(4)).sum().backward()
    return [output, *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Yield a function that counts the libraries of kernels built in this test."""
    monkeypatch.setenv(compile_cache.FOLDER, str(tmp_path))
    torch_private.forget_builds()  # else kernels that other tests built are reused
    yield lambda: len([*Path(tmp_path).rglob("*.main.so")])
    torch._dynamo.reset()


@needs_gpp
@pytest.mark.thorough  # it builds many libraries
@pytest.mark.compile
def test_a_graph_has_one_library_and_the_results_are_the_same_bits(libraries, monkeypatch):
    model = network()
    with apply_speedups(model, REQUIRED)[1]:
        joined = trained(model)
        assert libraries() == 2  # the forward and the backward pass
    torch._dynamo.reset()
    monkeypatch.setattr(compile_cache, "_joining_flag", dict)
    model = network()
    with apply_speedups(model, REQUIRED)[1]:
        apart = trained(model)
        assert libraries() > 4
    assert all(map(torch.equal, joined, apart))
