"""%speedkit cache: compiled code is listed and deleted."""

from __future__ import annotations

from speedkit_jupyter.machines import compile_cache


def test_code_is_listed_and_deleted(shell) -> None:
    assert ": 0 B" in shell.run("%speedkit cache")
    folder = compile_cache.prepare()
    (folder / compile_cache.COMPILED / "code.py").write_bytes(b"code")
    assert ": 4 B" in shell.run("%speedkit cache status")
    assert "Deleted 4 B of compiled code" in shell.run("%speedkit cache clear")


def test_a_folder_that_others_can_write_to_is_named(shell) -> None:
    compile_cache.prepare()
    compile_cache.root().chmod(0o777)
    assert "neither saved nor loaded: other users can write to" in shell.run("%speedkit cache")
