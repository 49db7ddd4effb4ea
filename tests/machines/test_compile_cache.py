"""The folder of compiled code: whose it is, what torch is told of it, how large it gets."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from speedkit_jupyter import SpeedConfig, SpeedKitError, apply_speedups
from speedkit_jupyter.extras.autotune import api as autotune
from speedkit_jupyter.machines import compile_archive, compile_cache, probes
from speedkit_jupyter.report.tuning_report import cache_report
from speedkit_jupyter.support import database
from speedkit_jupyter.torchglue import inductor as torch_private

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders of POSIX")
COMPILE = SpeedConfig(compile=True).alone()


@pytest.fixture
def unset() -> Iterator[pytest.MonkeyPatch]:
    """The user has chosen no folder."""
    with pytest.MonkeyPatch.context() as patch:
        for name in compile_cache.VARIABLES:
            patch.delenv(name, raising=False)
        compile_cache._warn_once.cache_clear()
        yield patch


def in_force() -> dict[str, str | None]:
    switches = compile_cache.switches()
    return {name: switches[name].read() for name in compile_cache.VARIABLES}


def test_while_a_plan_compiles_torch_keeps_code_in_a_folder_of_the_users(unset) -> None:
    model = torch.nn.Linear(2, 2)
    with apply_speedups(model, COMPILE)[1]:
        folder = Path(in_force()[compile_cache.FOLDER] or "")
        assert folder.parent == compile_cache.place()
        assert all(path.stat().st_mode & 0o777 == 0o700 for path in (folder, *folder.parents[:2]))
    assert in_force() == dict.fromkeys(compile_cache.VARIABLES)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that can't be made")
def test_where_no_folder_can_be_made_torchs_own_stays_in_use(unset) -> None:
    unset.setenv("SPEEDKIT_DATA", "/proc/nothing")
    model = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="code is not kept, .* /proc/nothing"):
        context = apply_speedups(model, COMPILE)[1]
    with context:
        assert in_force() == dict.fromkeys(compile_cache.VARIABLES)


def test_plans_are_taken_back_in_any_order(unset) -> None:
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    first, second = (apply_speedups(model, COMPILE)[1] for model in models)
    folder = in_force()
    first.restore()
    assert in_force() == folder
    second.restore()
    assert in_force() == dict.fromkeys(compile_cache.VARIABLES)


def test_a_folder_that_the_user_chose_stays_in_use(unset, tmp_path) -> None:
    unset.setenv(compile_cache.FOLDER, str(tmp_path))
    model = torch.nn.Linear(2, 2)
    with apply_speedups(model, COMPILE)[1]:
        assert in_force() == {
            compile_cache.FOLDER: str(tmp_path),
            compile_cache.TRITON_FOLDER: None,
        }


def test_a_folder_that_torch_wrote_into_the_variable_is_nobodys_choice(unset) -> None:
    torch_private.inductor_config()
    __import__("torch._inductor.runtime.cache_dir_utils")
    unset.setenv(compile_cache.FOLDER, torch_private.usual_cache_folder())
    model = torch.nn.Linear(2, 2)
    with apply_speedups(model, COMPILE)[1]:
        assert str(compile_cache.root()) in str(in_force()[compile_cache.FOLDER])


def test_other_backends_leave_the_folder_alone(unset) -> None:
    config = SpeedConfig(compile={"enabled": True, "backend": "eager"}).alone()
    model = torch.nn.Linear(2, 2)
    with apply_speedups(model, config)[1]:
        assert in_force() == dict.fromkeys(compile_cache.VARIABLES)
    assert not compile_cache.root().exists()


@pytest.mark.parametrize("which", [compile_cache.root, compile_cache.place])
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_to_is_refused_in_a_line(unset, which, mode) -> None:
    compile_cache.prepare()
    which().chmod(mode)
    model = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=r"none is loaded: others can write to .*chmod go-w"):
        context = apply_speedups(model, COMPILE)[1]
    with context:
        assert context.plan["compile"].active
        assert in_force() == dict.fromkeys(compile_cache.VARIABLES)


def test_a_folder_whose_place_others_can_write_to_is_refused(unset, tmp_path) -> None:
    unset.setenv("SPEEDKIT_DATA", str(tmp_path / "open" / "data"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "others can write to" in compile_cache.why_unsafe(compile_cache.root())
    (tmp_path / "open").chmod(0o1777)  # as /tmp is
    assert not compile_cache.why_unsafe(compile_cache.root())


@pytest.mark.parametrize("change", ["group", "owner"])
def test_a_folder_that_another_user_can_exchange_is_refused(unset, change) -> None:
    """Above the one that is theirs alone, which a rename would put another in the place of."""
    folder = compile_cache.prepare()
    data = compile_cache.root().parent
    if change == "group":
        data.chmod(0o770)
        unset.setattr(compile_cache, "_is_private", lambda group: False)
    elif os.getuid():
        pytest.skip("gives a folder away")
    else:
        os.chown(data, 12345, -1)
    with pytest.warns(UserWarning, match=f"{data}"):
        assert compile_cache.usable() is None
    data.chmod(0o1777)
    assert (compile_cache.usable() == folder) == (change == "group")


PLACES = ["a b", "it's", 'a"b', "a\\b", "a\nb"]


@pytest.mark.parametrize("name", PLACES)
def test_code_is_kept_where_a_cxx_compiler_can_be_told_of_it(unset, tmp_path, name) -> None:
    for variable in ("HOME", "XDG_CACHE_HOME"):  # macOS', Linux'
        unset.setenv(variable, str(tmp_path / "home"))
    unset.setenv("SPEEDKIT_DATA", str(tmp_path / name))
    first = compile_cache.prepare()
    assert first is not None
    assert compile_cache.is_plain(first)
    assert first.is_relative_to(tmp_path / "home")
    assert str(first.parent) in " ".join(str(cache_report()).split())
    unset.setenv("SPEEDKIT_DATA", str(tmp_path / f"{name} too"))
    assert compile_cache.place().parent != first.parent
    unset.setenv("SPEEDKIT_DATA", str(tmp_path / "plain-ü"))
    assert compile_cache.root().parent == tmp_path / "plain-ü"


@pytest.mark.compile
@pytest.mark.slow
def test_a_plan_compiles_though_the_data_folder_has_a_space(unset, tmp_path) -> None:
    unset.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    unset.setenv("SPEEDKIT_DATA", str(tmp_path / "it's here"))
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.GELU())
    config = SpeedConfig(compile={"enabled": True, "required": True}).alone()
    with apply_speedups(model, config)[1]:
        model(torch.rand(7, 3))


def test_without_a_home_nothing_is_kept_and_that_is_a_line(unset, capsys) -> None:
    import platformdirs

    def user_data_path(*_: object) -> Path:
        raise RuntimeError("there is no home")

    unset.delenv("SPEEDKIT_DATA")
    unset.setattr(platformdirs, "user_data_path", user_data_path)
    model = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="not kept, and none is loaded: .* there is no home"):
        context = apply_speedups(model, COMPILE)[1]
    context.restore()
    assert not compile_cache.has_bundles()
    assert "there is no home" in str(cache_report())
    assert (database.learned(), database.saved(), autotune.models()) == ([], [], [])
    assert "nothing is kept between sessions" in capsys.readouterr().out
    with pytest.raises(SpeedKitError, match="there is no home"):
        database.save("a", {"variants": []})


def test_a_folder_of_another_user_is_refused(unset) -> None:
    compile_cache.prepare()
    unset.setattr(os, "getuid", lambda: 12345)
    assert "belongs to another user" in compile_cache.why_unsafe(compile_cache.root())


@pytest.mark.skipif(not hasattr(os, "ST_NOEXEC"), reason="Linux")
def test_a_folder_from_which_programs_cannot_be_run_is_refused(unset) -> None:
    compile_cache.prepare()
    found = SimpleNamespace(f_flag=os.ST_NOEXEC)
    unset.setattr(os, "statvfs", lambda path: found)
    assert "programs can't be run" in compile_cache.why_unsafe(compile_cache.place())


def test_a_link_is_judged_by_where_it_leads(unset, tmp_path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    compile_cache.root().parent.mkdir(parents=True)
    compile_cache.root().symlink_to(tmp_path / "shared")
    assert "others can write to" in compile_cache.why_unsafe(compile_cache.root())


def test_another_machine_torch_or_compiler_has_another_folder(unset) -> None:
    found = compile_cache.place()
    unset.setattr(torch, "__version__", "9.9")
    compile_cache._machine.cache_clear()
    other = compile_cache.place()
    unset.undo()
    compile_cache._machine.cache_clear()
    assert other.name != found.name
    assert compile_cache.machine()["compiler"].startswith(probes.cxx() or "")


@pytest.mark.skipif(sys.platform != "linux" or not probes.cxx(), reason="g++ on Linux")
def test_a_compiler_that_knows_the_instructions_is_remembered(unset) -> None:
    options = torch_private.instruction_probes()[1]
    torch_private.forget_instructions()
    if not options:
        pytest.skip("an x86 CPU with vector instructions")
    folder = compile_cache.prepare()
    assert folder is not None
    compile_cache.try_instructions(folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {compile_cache.COMPILED, compile_cache.TRIAL}
    assert compile_cache.values({})[compile_cache.INSTRUCTIONS] is True
    unset.setenv("CXX", "false")  # another compiler is another folder, and knows nothing
    other = compile_cache.prepare()
    assert other not in (None, folder)
    compile_cache.try_instructions(other)
    assert compile_cache.INSTRUCTIONS not in compile_cache.values({})


def test_what_was_not_used_for_longest_goes_first(tmp_path) -> None:
    folder = tmp_path / compile_cache.COMPILED
    folder.mkdir()
    for age, name in enumerate(["new", "old", "oldest"]):
        (folder / name).write_bytes(b"1234")
        os.utime(folder / name, 2 * (time.time() - 1000 * age,))
    assert compile_cache.prune([tmp_path], 8) == (1, 4)
    assert compile_cache.prune([tmp_path], 8) == (0, 0)
    assert compile_cache.prune([tmp_path], 5) == (1, 4)
    assert [path.name for path in folder.iterdir()] == ["new"]


@pytest.mark.parametrize("where", ["compiled", "{root}", "{root}/mine", "{root}/{digest}"])
def test_nothing_of_the_users_is_deleted(unset, tmp_path, where) -> None:
    """In a data folder that is the user's project, and has folders of our names."""
    unset.setenv("SPEEDKIT_DATA", str(tmp_path))
    mine = tmp_path / where.format(root=compile_cache.NAME, digest="0" * 16) / "inductor" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    unset.setattr(compile_cache, "_prune_once", lambda _: compile_cache.prune(machines(), 0))
    machines = compile_cache.machines
    with warnings.catch_warnings(record=True) as said:
        folder = compile_cache.prepare()
    compile_archive.clear()
    assert mine.read_text() == "mine"
    assert bool(folder) == (where == "compiled")
    assert [compile_cache.MARK in str(one.message) for one in said] == [True] * (not folder)


def test_what_lies_beside_or_behind_our_folders_stays(unset, tmp_path) -> None:
    folder = compile_cache.prepare()
    assert folder is not None
    (tmp_path / "mine").mkdir()
    (folder.parent / "0123456789abcdef").symlink_to(tmp_path)
    (folder / compile_cache.BUNDLES).symlink_to(tmp_path / "mine")
    mine = [tmp_path / "mine" / "a", folder / "b", folder.parent / "c", folder.parent.parent / "d"]
    ours = folder / compile_cache.COMPILED / "code"
    for path in (*mine, ours):
        path.write_text("")
    compile_archive.clear()
    assert all(path.exists() for path in mine)
    assert not ours.exists()


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    compile_cache.write(tmp_path / "file", b"first")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        compile_cache.write(tmp_path / "file", b"second")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"first")]
