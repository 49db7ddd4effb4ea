"""Compare how long a script runs from start to end under different configs.

python notebooks/scripts/compare.py --script notebooks/scripts/resnet.py \\
    --configs configs/auto_speed.yaml,configs/speed.yaml -- --steps 300

The script must accept `--config FILE`, where `SpeedConfig.from_yaml` can read FILE. Each round runs
the script once per config, in shuffled order, each time in a new process. Times include starting,
compiling and saving. `baseline` is a config that changes nothing.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from speedkit_jupyter import SpeedConfig, SpeedKitError
from speedkit_jupyter.rounds.statistics import INTERVAL, LEAST_PAIRS, paired_ratio
from speedkit_jupyter.support import units


def main() -> int:
    """Run the comparison, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--configs", default="configs/auto_speed.yaml", help="files, by comma")
    parser.add_argument("--rounds", type=int, default=LEAST_PAIRS)
    parser.add_argument("given", nargs="*", help="behind --: options for the script")
    options = parser.parse_args()
    files = [Path(name) for name in options.configs.split(",")]
    missing = [str(file) for file in (options.script, *files) if not file.is_file()]
    if missing or options.rounds < 1:
        words = f"no such file: {', '.join(missing)}" if missing else "--rounds must be 1 or more"
        parser.error(words)
    try:
        for file in files:
            SpeedConfig.from_yaml(file)
    except SpeedKitError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        baseline = Path(folder) / "baseline.yaml"
        baseline.write_text("alone: true\n", encoding="utf-8")
        command = [sys.executable, str(options.script), *options.given]
        return compared(command, [baseline, *files], options.rounds)


def compared(command: list[str], files: list[Path], rounds: int) -> int:
    """Time the command with each config, print a table, and return the exit code."""
    times: dict[Path, list[float]] = {file: [] for file in files}
    for done in range(1, rounds + 1):
        for file in random.sample(files, len(files)):
            begun_s = time.perf_counter()
            run = subprocess.run([*command, "--config", str(file)], capture_output=True, text=True)
            times[file].append(time.perf_counter() - begun_s)
            if run.returncode:
                print(f"{command[1]} fails with {file}:\n{run.stderr[-2000:]}", file=sys.stderr)
                return 1
        print(f"round {done} of {rounds}", file=sys.stderr)
    print(f"{'config':24} {'a run':>9}  speed-up ({INTERVAL})")
    for file, found in times.items():
        speed = paired_ratio(times[files[0]], found) if file != files[0] else ""
        print(f"{file.stem:24} {units.seconds(median(found)):>9}  {speed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
