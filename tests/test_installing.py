"""Installing replaces nothing that is there, and needs no network for a wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Written before SpeedKit was installed, by `make colab`.
REPORT = ROOT / ".venv-colab" / "report.json"
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not REPORT.exists(), reason="needs `make colab`")
def test_in_colab_installing_adds_loky_and_changes_nothing():
    planned = json.loads(REPORT.read_text(encoding="utf-8"))["install"]
    assert {one["metadata"]["name"] for one in planned} == {"loky", "speedkit-jupyter"}


def test_a_wheel_installs_offline(tmp_path):
    pytest.importorskip("setuptools", "69")
    source, wheels, there = (tmp_path / name for name in ("source", "wheels", "there"))
    shutil.copytree(ROOT / "speedkit_jupyter", source / "speedkit_jupyter")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source))
    subprocess.run([*PIP, *build], check=True, timeout=300)
    [wheel] = wheels.iterdir()
    install = ("install", "--no-index", "--no-deps", "--target", str(there), str(wheel))
    subprocess.run([*PIP, *install], check=True, timeout=300)
    program = "import speedkit_jupyter; print(speedkit_jupyter.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=there, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).is_relative_to(there), done.stderr
