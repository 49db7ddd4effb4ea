"""Run JupyterLab with real kernels in headless Chromium, or skip the tests without Chromium."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The timeout of each answer; the machine may be busy.
LONG_MS = 120_000
HINT = "no Chromium: `apt-get install chromium` (Debian), or have chromium or google-chrome on PATH"
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--force-color-profile=srgb",
]  # fmt: skip
# Variables that name folders. The tests set each to a folder of their own.
FOLDERS = (
    "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR",
    "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR", "SPEEDKIT_DATA",
)  # fmt: skip
# Run cells only when the session is ready, else a dialog asks for a kernel.
READY = """() => { const a = window.jupyterapp, w = a && a.shell && a.shell.currentWidget;
  const c = w && w.sessionContext, k = c && c.isReady && c.session && c.session.kernel;
  return !!k && k.status === 'idle' && a.commands.hasCommand('notebook:run-all-cells'); }"""
KERNELSPEC = {"name": "python3", "display_name": "Python 3", "language": "python"}


@dataclass
class Lab:
    """A running server, with notebooks in `root`."""

    root: Path
    address: str
    token: str


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Start JupyterLab with its own settings, data and workspaces."""
    root, state = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("state")
    settings = state / "JUPYTERLAB_SETTINGS_DIR/@jupyterlab/apputils-extension"
    news = settings / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false", "checkForUpdates": false}')  # no pop-up
    token = secrets.token_hex(16)
    environment = {**os.environ, "JUPYTER_PREFER_ENV_PATH": "1"}
    environment |= {name: str(state / name) for name in FOLDERS}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = f"""{sys.executable} -m jupyterlab --no-browser --allow-root
        --ServerApp.root_dir={root} --ServerApp.ip=127.0.0.1 --ServerApp.port=0
        --IdentityProvider.token={token}
        --LabApp.expose_app_in_browser=True""".split()
    with open(state / "lab.log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    end = time.monotonic() + 120
    try:
        while True:
            try:
                (file,) = (state / "JUPYTER_RUNTIME_DIR").glob("jpserver-*.json")  # once it listens
                address = json.loads(file.read_text())["url"].rstrip("/")
                urllib.request.urlopen(f"{address}/api/status?token={token}", timeout=60)
                break
            except (OSError, ValueError):
                waiting = process.poll() is None and time.monotonic() < end
                assert waiting, (state / "lab.log").read_text()
                time.sleep(0.1)
        yield Lab(root, address, token)
    finally:
        # Kill the server, which would wait for each of its kernels if asked to stop.
        for one in (*psutil.Process(process.pid).children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):  # it has already ended
                one.kill()
        process.wait()


@pytest.fixture(scope="module")  # its event loop runs until the fixture ends; pages share a cache
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(HINT)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield browser.new_context()
        browser.close()


@pytest.fixture
def open_notebook(chromium: Any, lab: Lab) -> Iterator[Callable[..., Any]]:
    """Return a function that writes, opens and runs a notebook of `cells`, and returns its page."""
    import nbformat  # here, because importing it takes seconds

    pages = []

    def go(*cells: str, width: int = 1200, height: int = 900, run: bool = True) -> Any:
        page = chromium.new_page()
        page.set_viewport_size({"width": width, "height": height})
        pages.append(page)
        page.set_default_timeout(LONG_MS)
        # Each notebook has its own name and workspace; else an old kernel or old tabs come back.
        name = secrets.token_hex(4)
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(one) for one in cells],
            metadata={"kernelspec": KERNELSPEC},
        )
        page.file = lab.root / f"{name}.ipynb"
        nbformat.write(notebook, page.file)
        page.address = f"{lab.address}/lab/workspaces/{name}/tree/{name}.ipynb?token={lab.token}"
        page.goto(page.address)
        page.wait_for_function(READY)  # READY returns no promise, which would count as true
        if run:
            page.evaluate("() => { jupyterapp.commands.execute('notebook:run-all-cells') }")
        return page

    yield go
    for page in pages:
        page.close()
