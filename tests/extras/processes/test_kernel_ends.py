"""A notebook's kernel that is closed or killed while its workers run: nothing of them is left."""

import ast
import os
import time

import psutil
import pytest

pytest.importorskip("ipyparallel")
pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.kernel]

START = "%load_ext speedkit_jupyter\n%speedkit processes start 2"
BUSY = "import time, torch\nx = torch.ones(10)\ntime.sleep(600)"
ASKED = """
import psutil
from speedkit_jupyter.extras.processes import workers
running = workers.current()
every = [process.pid for process in psutil.Process().children(recursive=True)]
print((running.pids, every, running.folder))
"""


@pytest.mark.parametrize("ends", ["closed", "killed", "killed while all ranks run"])
def test_a_kernel_that_ends_leaves_no_process_and_no_file(ends):
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(startup_timeout=300, kernel_name="python3")
    printed = []
    hook = lambda message: printed.append(message["content"].get("text", ""))  # noqa: E731
    try:
        for cell in (START, ASKED):
            printed.clear()
            reply = client.execute_interactive(cell, timeout=120, output_hook=hook)
            assert reply["content"]["status"] == "ok", reply["content"]
        ranks, every, folder = ast.literal_eval("".join(printed))
        assert len(ranks) == 2
        assert {*ranks} < {*every}
        assert os.path.isdir(folder)
        if "while" in ends:
            client.execute(f"%%speedkit launch\n{BUSY}")
            time.sleep(2)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=ends != "closed")
    deadline = time.monotonic() + 60
    while (alive := [*filter(psutil.pid_exists, every)]) or os.path.exists(folder):
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
