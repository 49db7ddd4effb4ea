"""Installing SpeedKit replaces no installed package, and a wheel installs offline."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")

pytestmark = [pytest.mark.slow, pytest.mark.smoke]


@pytest.mark.parametrize("platform", ["colab", "kaggle"])
def test_where_notebooks_are_hosted_installing_adds_and_changes_nothing_else(platform):
    """`make colab` and `make kaggle` save pip's dry-run report before they install SpeedKit."""
    report = ROOT / f".venv-{platform}" / "report.json"
    if not report.exists():
        pytest.skip(f"needs `make {platform}`")
    planned = json.loads(report.read_text(encoding="utf-8"))["install"]
    assert [one["metadata"]["name"] for one in planned] == ["speedkit-jupyter"]


def test_the_citation_names_the_version_of_the_package():
    version, cited = (
        re.search(r'^version *[=:] *"?([\d.]+)', (ROOT / name).read_text(), re.MULTILINE)
        for name in ("pyproject.toml", "CITATION.cff")
    )
    assert version[1] == cited[1]


def test_a_wheel_installs_offline(tmp_path):
    pytest.importorskip("setuptools", "69")
    source, wheels, there = (tmp_path / name for name in ("source", "wheels", "there"))
    shutil.copytree(ROOT / "speedkit_jupyter", source / "speedkit_jupyter")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source))
    subprocess.run([*PIP, *build], check=True, timeout=300)
    [wheel] = wheels.iterdir()
    install = ("install", "--no-index", "--no-deps", "--target", str(there), str(wheel))
    subprocess.run([*PIP, *install], check=True, timeout=300)
    program = "import speedkit_jupyter as s; s.Hardware.detect(); print(s.__file__)"
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, cwd=there, capture_output=True, text=True)
    [metadata] = there.glob("*.dist-info/METADATA")
    on_pypi = metadata.read_text(encoding="utf-8")
    assert "%load_ext speedkit_jupyter" in on_pypi
    assert not re.findall(r"\]\((?!https?:)", on_pypi)  # relative links work only in the repository
    assert Path(done.stdout.strip()).is_relative_to(there), done.stderr
