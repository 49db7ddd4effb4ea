import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import speedkit_jupyter

PACKAGE = Path(speedkit_jupyter.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
# A folder imports only from itself and earlier folders. So the core imports no extras.
FOLDERS = (
    "support", "torchglue", "machines", "catalog", "plans", "state", "step", "right", "rounds",
    "search", "codegen", "report", "notebook", "extras",
    "check", "__main__",  # the command lines of check() and of auto
)  # fmt: skip
# The subfolders of catalog/ follow the same rule. The catalog's entries may import all of them.
ROOMS = ["model_changes", "facts", "base"]
HEAVY = {"torch", "scipy", "numpy", "pandas", "matplotlib", "ipywidgets"}
# Parts that are loaded with the package and the extension, and must not import torch.
WITHOUT_TORCH = {"support", "machines", "__init__"}
DISPLAYS = {"IPython", "ipywidgets", "matplotlib"}


def layer(part: str) -> int:
    return FOLDERS.index(part)


def part_of(path: Path) -> str:
    """Return the part of a file: `catalog` for catalog/precision.py, `check` for check.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(parsed: ast.Module, deep: bool, types: bool) -> Iterator[ast.AST]:
    """Yield nodes, with the bodies of functions if `deep` and TYPE_CHECKING blocks if `types`."""
    waiting: list[ast.AST] = list(parsed.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif deep or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def imported(path: Path, deep: bool = True, types: bool = True) -> set[str]:
    names: set[str] = set()
    for node in statements(tree(path), deep, types):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts_imported(path: Path) -> set[str]:
    """Return the parts of this package that a file imports, directly or as public names."""
    parts = set()
    for name in imported(path):
        package, _, rest = name.partition(".")
        if package == PACKAGE.name:
            first = rest.partition(".")[0]
            parts.add(speedkit_jupyter._HOMES.get(first, first).partition(".")[0])
    return parts - {"", "__version__"}


def inside(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


modules = [one for one in SOURCES if one != PACKAGE / "__init__.py"]
below_report = [one for one in modules if layer(part_of(one)) < layer("report")]


def test_imports_run_one_way() -> None:
    upwards = [
        f"{inside(path)} imports {other}"
        for path in modules
        for other in parts_imported(path)
        if layer(other) > layer(part_of(path))
    ]
    assert upwards == []


CATALOG = PACKAGE / "catalog"
parts_of_entries = [one for one in SOURCES if one.is_relative_to(CATALOG) and one.parent != CATALOG]
entries = [one for one in CATALOG.glob("*.py") if one.stem != "__init__"]


def optimizations_imported(path: Path) -> set[str]:
    """Return the subfolders and entries of catalog/ that a file imports; "" is catalog/ itself."""
    catalog = f"{PACKAGE.name}.{CATALOG.name}"
    names = [name for name in imported(path) if f"{name}.".startswith(f"{catalog}.")]
    first = {name.removeprefix(catalog).split(".")[1] for name in names}
    return {name if name in ROOMS or name in {e.stem for e in entries} else "" for name in first}


def test_every_room_of_the_catalog_has_its_layer() -> None:
    assert {one.name for one in CATALOG.iterdir() if list(one.glob("*.py"))} == {*ROOMS}


@pytest.mark.parametrize("path", parts_of_entries, ids=inside)
def test_parts_of_the_catalogs_entries_import_one_way(path: Path) -> None:
    assert optimizations_imported(path) <= {*ROOMS[: ROOMS.index(path.parent.name) + 1]}


def test_next_to_the_rooms_are_the_entries_of_the_catalog_alone() -> None:
    from speedkit_jupyter.catalog import CATALOG as every

    homes = {type(one).__module__ for one in every}
    assert {module(one) for one in entries} == {one for one in homes if ".extras." not in one}


@pytest.mark.parametrize("path", entries, ids=inside)
def test_no_entry_of_the_catalog_imports_another(path: Path) -> None:
    assert optimizations_imported(path) <= {*ROOMS}


def module(path: Path) -> str:
    """Return a file's module name, such as `speedkit_jupyter.step.step`, without `__init__`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def test_no_file_imports_in_a_circle() -> None:
    known = {module(one): one for one in SOURCES}
    needs = {}
    for name, path in known.items():
        every = {one if one in known else one.rpartition(".")[0] for one in imported(path)}
        needs[name] = (every & known.keys()) - {name}
    done: set[str] = set()
    while ready := {name for name, others in needs.items() if not others - done} - done:
        done |= ready
    assert sorted(needs.keys() - done) == []


def test_the_panel_imports_no_magic() -> None:
    files = [*(PACKAGE / "notebook" / "panel").glob("*.py")]
    assert files
    for path in files:
        names = {one.removeprefix(f"{PACKAGE.name}.notebook.") for one in imported(path)}
        parts = {one.partition(".")[0] for one in names}
        assert not parts & {"shell", "speedbench", "commands"}, inside(path)


def test_nothing_below_the_report_displays_or_prints() -> None:
    assert [
        inside(path)
        for path in below_report
        if DISPLAYS & {name.partition(".")[0] for name in imported(path)}
    ] == []
    assert [
        f"{inside(path)} prints in line {node.lineno}"
        for path in below_report
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write")
    ] == []


def test_what_is_heavy_is_imported_inside_functions() -> None:
    for path in SOURCES:
        heavy = HEAVY if part_of(path) in WITHOUT_TORCH else HEAVY - {"torch", "numpy"}
        names = {name.partition(".")[0] for name in imported(path, deep=False, types=False)}
        assert not heavy & names, inside(path)


def test_importing_the_package_and_loading_the_extension_loads_nothing_heavy() -> None:
    code = (
        "import sys, speedkit_jupyter; dir(speedkit_jupyter)\n"
        "assert not {'torch', 'pydantic', 'yaml', 'IPython'} & {*sys.modules}\n"
        "from IPython.core.interactiveshell import InteractiveShell as Shell\n"
        "Shell.instance().run_line_magic('load_ext', 'speedkit_jupyter')\n"
        "assert not {'torch', 'pydantic', 'numpy', 'matplotlib'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_public_names_are_these() -> None:
    names = (
        "ConfigError Decision Facts Hardware Panel Plan SpeedConfig SpeedContext "
        "SpeedKitError StateWarning StepError advise apply_speedups attention auto "
        "autocast_context batch_sizes benchmark bucketed check code launch make_graphed_step "
        "micro_batch optimization plan profile restore_all rollout sdp_context tune "
        "tune_loader tuned verify"
    )
    assert speedkit_jupyter.__all__ == names.split()
    for name in speedkit_jupyter.__all__:
        assert getattr(speedkit_jupyter, name).__name__ == name


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'aply_speedups'"):
        speedkit_jupyter.aply_speedups  # noqa: B018


def test_no_two_classes_share_a_name() -> None:
    names = [n.name for path in SOURCES for n in tree(path).body if isinstance(n, ast.ClassDef)]
    assert sorted({name for name in names if names.count(name) > 1}) == []
