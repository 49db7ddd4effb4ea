"""Wrong lines get the one-line errors in errors.txt, which `--regenerate-plans` rewrites."""

from pathlib import Path

import pytest
from IPython.core.error import UsageError

FILE = Path(__file__).with_name("errors.txt")
# A mark between the lines of a cell in the file.
END = " ⏎ "
LONG = 100
NOTEBOOK = """
class Trainer:
    def __init__(self):
        self.net = nn.Linear(4, 4)
    @property
    def broken(self):
        raise RuntimeError("mine")
    async def step(self):
        model(x)
async def waits():
    model(x)
def goes():
    yield model(x)
def train(images, labels):
    loss_fn(model(images), labels).backward()
def of_two(net, data):
    return 1.0
def train_step(): pass
trainer, models, layers = Trainer(), {"lm": nn.Linear(3, 3)}, [nn.Linear(2, 2)]
pair = dict(one=nn.Linear(2, 2), two=nn.Linear(2, 2))
other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
train_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
"""


def pairs() -> list[tuple[str, str]]:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return list(zip(lines[::2], (line.strip() for line in lines[1::2]), strict=True))


def answer(shell, line: str) -> str:
    result, _ = shell._run(line.replace(END, "\n"))
    error = result.error_in_exec or result.error_before_exec
    assert isinstance(error, UsageError), (line, error)
    assert len(str(error).splitlines()) == 1
    text = str(error)  # the beginning of a long answer, such as a list, is enough
    return text if len(text) <= LONG else f"{text[:LONG]}…"


@pytest.fixture
def notebook(shell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell.run(NOTEBOOK)
    return shell


def test_every_wrong_line_has_its_answer(notebook, request):
    found = {line: answer(notebook, line) for line, _ in pairs()}
    if request.config.getoption("--regenerate-plans"):
        text = "".join(f"{line}\n    {told}\n" for line, told in found.items())
        FILE.write_text(text, encoding="utf-8")
    assert len(found) > 50
    assert found == dict(pairs())


@pytest.mark.smoke
def test_an_answer_is_one_usage_error_under_any_ipython(notebook):
    for line, told in pairs()[::8]:
        assert answer(notebook, line).split()[:1] == told.split()[:1]
