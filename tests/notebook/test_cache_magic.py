"""%speedkit cache: what is kept, deleted, exported and imported."""

from __future__ import annotations

from speedkit_jupyter.machines import compile_cache


def test_code_is_listed_exported_deleted_and_imported(shell, tmp_path) -> None:
    assert "Nothing is kept yet" in shell.run("%speedkit cache")
    folder = compile_cache.prepare()
    compile_cache.write(folder / compile_cache.COMPILED / "ab" / "code.py", b"code")
    assert "this machine, torch and compiler" in shell.run("%speedkit cache status")
    file = tmp_path / "code"
    assert "Saved 1 file of compiled code and 0 learned plans" in shell.run(
        f"%speedkit cache export {file}"
    )
    assert "of compiled code" in shell.run("%speedkit cache clear")
    assert "Took over 1 file" in shell.run(f"%speedkit cache import {file}")


def test_a_folder_that_others_can_write_to_is_named(shell) -> None:
    compile_cache.prepare()
    compile_cache.root().chmod(0o777)
    assert "none is loaded: others can write to" in shell.run("%speedkit cache")


def test_a_missing_file_is_asked_for(shell) -> None:
    assert "which FILE?" in str(shell.fails("%speedkit cache export"))
