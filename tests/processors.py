"""Run tests with other instruction sets and environments, and print a table of the results.

`python tests/processors.py [--only NAME,NAME] [PYTEST ARGUMENT]...` runs pytest, by default the
quick tests. `python tests/processors.py make test` runs a target of the Makefile.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE, Popen

ROOT = Path(__file__).parents[1]
ONE_CORE = ("taskset", "-c", "0")
BUSY = (sys.executable, "-c", "while True: pass")
# Environment variables for instruction sets, threads, time zone, language and home folder.
SURROUNDINGS: dict[str, dict[str, str]] = {
    "oldest": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41",
               "MKL_CBWR": "COMPATIBLE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
             "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "one core": {"OMP_NUM_THREADS": "1"},
    "busy": {},
    "abroad": {"TZ": "Asia/Kolkata", "LC_ALL": "C", "HOME": "/proc/nowhere"},  # run in a copy
}  # fmt: skip


def main() -> int:
    """Run the tests in each environment; return the highest exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SURROUNDINGS))
    options, arguments = parser.parse_known_args()
    rows = [(name, *run(name, arguments)) for name in options.only]
    for name, _, result, seconds in rows:
        print(f"{name:<10}{seconds:6.0f} s  {result}")
    return max(status for _, status, _, _ in rows)


def run(name: str, arguments: list[str]) -> tuple[int, str, float]:
    """Run the tests in one environment; return exit status, last line of output and seconds."""
    print(f"\n{name}: {SURROUNDINGS[name]}", flush=True)
    with tempfile.TemporaryDirectory(prefix="Zwölf Äpfel ") as place:
        where = copied(Path(place, "Größe")) if name == "abroad" else ROOT
        variables = {**os.environ, **SURROUNDINGS[name], "PYTHONPATH": str(where)}
        pytest = [] if arguments[:1] == ["make"] else [sys.executable, "-m", "pytest", "-q"]
        command = [*(ONE_CORE if name == "one core" else ()), *pytest, *arguments]
        other = Popen(BUSY) if name == "busy" else None
        begin, last = time.monotonic(), ""
        process = Popen(command, cwd=where, env=variables, stdout=PIPE, encoding="utf-8")
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        if other:
            other.kill()
            other.wait()
        return process.wait(), last, time.monotonic() - begin


def copied(folder: Path) -> Path:
    """Copy the files of the repository, without environments and caches, and return the folder."""
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "dist", "build")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored)
    Path(folder, ".venv").symlink_to(ROOT / ".venv")
    return folder


if __name__ == "__main__":
    sys.exit(main())
