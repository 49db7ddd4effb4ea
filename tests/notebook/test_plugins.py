"""Extras, other packages and the user's functions extend the magics; the core works alone."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import speedkit_jupyter
from speedkit_jupyter.extras.kernels import custom
from speedkit_jupyter.notebook import commands, options, plugins, speedbench
from speedkit_jupyter.notebook.plugins import Mode, Plugin
from speedkit_jupyter.support import extras

PACKAGE = Path(speedkit_jupyter.__file__).parent
SESSION = """
import pkgutil, importlib, speedkit_jupyter
for one in pkgutil.walk_packages(speedkit_jupyter.__path__, "speedkit_jupyter."):
    importlib.import_module(one.name)
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in (
    "%load_ext speedkit_jupyter\\nimport torch",
    "net = torch.nn.Sequential(torch.nn.Linear(8, 8)); x = torch.randn(4, 8)",
    "opt = torch.optim.AdamW(net.parameters())",
    "%speedkit help", "%speedkit", "%speedkit apply net", "%speedkit report",
    "%speedkit code", "%speedkit restore",
    "%%speedbench --compare baseline,fused_optimizer --budget 0.3 -o\\n"
    "net(x).sum().backward(); opt.step()",
    "%%speedbench --tune --budget 0.5\\nnet(x).sum().backward(); opt.step()",
    "%unload_ext speedkit_jupyter",
):
    shell.run_cell(cell).raise_error()
print("all ran")
"""


@pytest.mark.slow
def test_the_core_imports_and_measures_where_no_extra_is(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name)
    for extra in ("extras", "check.py"):
        path = tmp_path / PACKAGE.name / extra
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = subprocess.run(
        [sys.executable, "-c", SESSION], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.rstrip().endswith("all ran"), done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture
def registered(monkeypatch):
    """Register a plug-in with a subcommand and a `%%speedbench` mode; yield its list of shells."""

    @options.command("greets", options.RESULT)
    def greet(names, session, arguments):
        print("hello from elsewhere")

    def whole(shell, session, cell, arguments, command):
        print(f"ran {arguments.elsewhere}")

    shells: list = []
    mode = Mode(options.Option("--elsewhere", "NAME", "runs elsewhere"), run=whole)
    point = EntryPoint("elsewhere", "x:PLUGIN", extras.EXTRAS)
    plugin = Plugin([greet], modes=[mode], begin=shells.append)
    monkeypatch.setattr(EntryPoint, "load", lambda self: plugin)
    found = {extras.EXTRAS: (point,)}
    monkeypatch.setattr(extras, "entry_points", lambda group: found[group])
    caches = (plugins.plugins, commands.commands, speedbench.parser)
    for cache in caches:
        cache.cache_clear()
    yield shells
    for cache in caches:
        cache.cache_clear()


def test_another_package_adds_a_subcommand_and_a_mode(registered, shell):
    assert "hello from elsewhere" in shell.run("%speedkit greet")
    assert "greet," in shell.run("%speedkit help")
    assert "ran there" in shell.run("%%speedbench --elsewhere there\n1 + 1")
    assert "runs elsewhere" in shell.run("%speedkit help speedbench")
    assert registered == [shell.ip]


CELL = """
from speedkit_jupyter import optimization
@optimization("my_relu", replaces=nn.ReLU)
def halves(module, x):
    return x.clamp(min=0)
"""


def test_apply_takes_the_name_of_a_users_function_and_reports_it(shell, request):
    request.addfinalizer(lambda: custom.forget("my_relu"))
    shell.run(CELL)
    shown = shell.run("%speedkit apply model --my_relu true")
    assert "my_relu" in shown
    assert "halves() for 1 ReLU" in shown
    assert "MethodType(halves, module)" in shell.run("%speedkit code model")
    shell.run("%speedkit restore")


def test_another_package_provides_an_object_by_an_entry_point(monkeypatch):
    points = [EntryPoint(name, f"json:{name}", extras.EXTRAS) for name in ("dumps", "loads")]
    monkeypatch.setattr(extras, "entry_points", lambda group: points)
    assert extras.provided("loads") == [json.loads]


def test_folders_of_extras_provide_switches():
    names = {entry.name for switches in extras.provided("SWITCHES") for entry in switches}
    assert {"distributed", "int8"} <= names
