"""Provide an IPython shell that is cleared after each test, and a real kernel."""

import os
import re
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

# Matches color codes, which older IPython puts around every word on any terminal.
COLOURS = re.compile(r"\x1b\[[\d;]*m")

SETUP = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
optimizer = torch.optim.AdamW(model.parameters())
loss_fn = nn.CrossEntropyLoss()
x, y = torch.rand(8, 1, 8, 8), torch.randint(10, (8,))
"""


@pytest.fixture(scope="session")
def _shell() -> Any:
    from IPython.testing.globalipapp import get_ipython

    return get_ipython()


class Shell:
    """Wrapper of IPython's shell that runs cells and returns their output."""

    def __init__(self, ip: Any) -> None:
        self.ip = ip
        self.names: dict[str, Any] = ip.user_ns

    def run(self, source: str) -> str:
        """Run a cell that must succeed; return its standard output and plain-text displays."""
        result, shown = self._run(source)
        assert result.success, (result.error_before_exec, result.error_in_exec)
        return shown

    def fails(self, source: str) -> BaseException:
        """Run a cell that must fail; return its error."""
        result, _ = self._run(source)
        assert not result.success
        error: BaseException = result.error_in_exec or result.error_before_exec
        return error

    def _run(self, source: str) -> tuple[Any, str]:
        from IPython.utils.capture import capture_output

        with capture_output() as captured:
            result = self.ip.run_cell(source)
        shown = [output.data.get("text/plain", "") for output in captured.outputs]
        return result, "\n".join([captured.stdout, *shown])


@pytest.fixture
def plain_shell(_shell: Any) -> Iterator[Shell]:
    """Yield a shell without the extension, and delete the test's names at the end."""
    found = set(_shell.user_ns)
    yield Shell(_shell)
    for name in set(_shell.user_ns) - found:
        del _shell.user_ns[name]


@pytest.fixture
def loaded_shell(plain_shell: Shell) -> Iterator[Shell]:
    """Yield a shell with the extension, and no model."""
    plain_shell.ip.run_line_magic("load_ext", "speedkit_jupyter")
    yield plain_shell
    plain_shell.ip.run_line_magic("unload_ext", "speedkit_jupyter")


@pytest.fixture
def shell(loaded_shell: Shell) -> Shell:
    """Return a shell with the extension, and with a model, optimizer, loss and batch."""
    loaded_shell.run(SETUP)
    return loaded_shell


@pytest.fixture
def seen(shell: Shell) -> Callable[[], list[Any]]:
    """Return a function that empties `seen`, a queue that cells fill, and returns its items."""
    queue = shell.names["seen"] = SimpleQueue[Any]()
    return lambda: [queue.get_nowait() for _ in range(queue.qsize())]


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a real kernel; `kernel(source)` runs a cell and returns its reply and output."""
    from jupyter_client.manager import start_new_kernel

    env = {**os.environ, "SPEEDKIT_DATA": str(tmp_path_factory.mktemp("kernel"))}
    manager, client = start_new_kernel(startup_timeout=300, kernel_name="python3", env=env)
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


class Kernel:
    def __init__(self, manager: Any, client: Any) -> None:
        self.manager, self._client = manager, client

    def __call__(self, source: str, timeout: float = 120) -> dict[str, Any]:
        """Run a cell; return its `status`, `number`, `ename`, `text` (output) and `traceback`."""
        self.start(source)
        return self.finish(timeout)

    def start(self, source: str, store_history: bool = True) -> None:
        """Begin a cell without waiting for it."""
        self._shown: list[str] = []
        self._traceback: list[str] = []
        # With stop_on_error, an older kernel drops the next request after an error.
        self._id = self._client.execute(source, store_history=store_history, stop_on_error=False)

    def wait_for(self, *texts: str, timeout: float = 120) -> None:
        """Wait until the running cell has shown one of `texts`."""
        while not any(text in "".join(self._shown) for text in texts):
            assert self._next(timeout), f"the cell ended before it showed {texts}: {self._shown}"

    def finish(self, timeout: float = 120) -> dict[str, Any]:
        """Wait until the running cell has ended; return its reply and output."""
        while self._next(timeout):
            pass
        reply = self._client.get_shell_msg(timeout=timeout)
        while reply["parent_header"].get("msg_id") != self._id:
            reply = self._client.get_shell_msg(timeout=timeout)
        return {
            "status": reply["content"]["status"],
            "number": reply["content"]["execution_count"],
            "ename": reply["content"].get("ename", ""),
            "text": "".join(self._shown),
            "traceback": COLOURS.sub("", "\n".join(self._traceback)),
        }

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def _next(self, timeout: float) -> bool:
        """Read one message of the kernel; return False once the running cell is done."""
        message = self._client.get_iopub_msg(timeout=timeout)
        if message["parent_header"].get("msg_id") != self._id:
            return True
        content, kind = message["content"], message["msg_type"]
        if kind == "stream":
            self._shown.append(content["text"])
        elif kind in ("display_data", "execute_result", "update_display_data"):
            self._shown.append(content["data"].get("text/plain", "") + "\n")
        elif kind == "error":
            self._traceback += content["traceback"]
        return not (kind == "status" and content["execution_state"] == "idle")
