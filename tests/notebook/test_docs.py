"""Code on pages and in README runs; each message has its page; no sentence is too long."""

import re
from pathlib import Path
from typing import Any

import pytest

from speedkit_jupyter.report import verdicts
from speedkit_jupyter.report.elements import Table
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.report.verdicts import PAGES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE_FILES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# Replacements that shorten the measurements of pages, because no test reads the results.
BUDGETS = (
    (re.compile(r"\btune=True"), "tune=True, budget_s=1"),
    (re.compile(r"\b500\b"), "50"),
    (re.compile(r"(--budget |budget_s=)\d+"), r"\g<1>1"),
    (
        re.compile(
            r"(?m)^(%%speedbench --(?:tune|compare|profile).*|%speedkit (?:advise|loader|batch).*)$"
        ),
        r"\1 --budget 1",
    ),
    (
        re.compile(r"\b((?:profile|advise|tune|tune_loader|batch_sizes)\([\w, ]+)\)"),
        r"\1, budget_s=1)",
    ),
)
# The objects that pages call "your" model, data and step.
YOURS = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from speedkit_jupyter import *

model = net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss()
dataset = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(10, (64,)))
loader = train_loader = DataLoader(dataset, 16)
x, y = next(iter(loader))
batch = inputs = test_x = x
test_y = y
q = k = v = torch.randn(1, 2, 512, 16)
sentences = [torch.ones(length, dtype=torch.long) for length in range(1, 17)]
collate = lambda rows: nn.utils.rnn.pad_sequence(rows, batch_first=True)
my_kernel = lambda x, *rest: F.layer_norm(x, x.shape[-1:], *rest)

def train_step(x=x, y=y):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    return loss
"""

OF_GENERATE = """
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=99)).eval()
inputs = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
"""


def prose(path: Path) -> list[str]:
    """Return the sentences of a page, without code, tables, headings and link targets."""
    text = re.sub(r"(?s)```.*?```|<!--.*?-->", "\n\n", path.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    return [one for one in re.split(r"(?<=[.!?])\W*\s|\n\s*\n|\n- |\\|", text) if one]


@pytest.mark.parametrize("path", PAGE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_of_a_page_is_over_thirty_words(path):
    assert not [one for one in prose(path) if len(re.findall(r"[^\W\d_][\w'-]*", one)) > 30]


def test_every_message_has_its_page_and_every_page_its_message():
    stems = {path.stem for path in (DOCS / "messages").glob("*.md")}
    assert stems - {"index", "state_warning"} == {*PAGES.values()}
    for path in (DOCS / "messages").glob("[!i]*.md"):
        text = path.read_text(encoding="utf-8")
        assert all(f"**{part}.**" in text for part in ("Meaning", "Why", "Next step"))


def test_every_message_with_a_page_is_a_text_of_the_package():
    files = (ROOT / "speedkit_jupyter").rglob("*.py")
    texts = "".join(path.read_text(encoding="utf-8") for path in files)
    texts = re.sub(r"^PAGES = {.*?^}", "", texts, flags=re.DOTALL | re.MULTILINE).lower()
    assert not [words for words in PAGES if words not in texts]


@pytest.fixture
def site(monkeypatch):
    address = "https://speed.example/en/"
    monkeypatch.setattr(verdicts, "project_urls", lambda: {"Documentation": address})
    return address


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("too noisy: --budget 20 may settle it", "too_noisy"),
        ("Likely: probably about 1.3×", "likely"),
        ("bf16: not checked: the budget was too short", "not_checked"),
        ("✕ declined", "declined"),
        ("torch.compile: 2 recompiles", "recompile"),
        ("torch 2.13.0+cu130 has no kernels for Tesla P100 (sm_60)", "no_kernels"),
    ],
)
def test_a_message_in_html_links_to_its_page_if_there_is_a_site(site, text, page):
    for shown in (Document(text), Document("", [Table(("",), [(text,)])]), Document("", [text])):
        assert f'href="{site}docs/messages/{page}.html"' in shown.to_html()
        assert site not in shown.to_text()


@pytest.mark.parametrize("text", ["an unlikely case", "failedness", "a wrong turn"])
def test_other_text_has_no_link(site, text):
    assert "href" not in Document(text).to_html()


def test_only_the_packages_metadata_name_addresses_of_the_project():
    """Allow the project's addresses only in pyproject.toml, so no link leads to a missing page."""
    project = re.compile(r"https?://[\w./-]*speedkit[\w-]*[./]")
    files = [path for path in ROOT.glob("*.*") if path.is_file() and path.name != "pyproject.toml"]
    for folder in ("docs", "notebooks", "configs", "speedkit_jupyter", ".github"):
        kinds = {".py", ".md", ".ipynb", ".yml", ".yaml", ".json", ".txt", ".css"}
        files += [one for one in (ROOT / folder).rglob("*.*") if one.suffix in kinds]
    assert len(files) > 300
    assert not [one for one in files if project.search(one.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_shown_result_of_auto_is_one_of_its_notebook(page):
    shown = re.findall(r"\d+ steps in .*", (ROOT / page).read_text(encoding="utf-8"))
    assert shown
    assert all(line in (ROOT / "notebooks/16_auto.ipynb").read_text("utf-8") for line in shown)


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_a_page_runs(path, loaded_shell, made_time, monkeypatch, tmp_path):
    pytest.importorskip("sybil")
    from sybil import Document as Page
    from sybil.parsers.markdown import CodeBlockParser, SkipParser

    def run(example: Any) -> None:
        source = str(example.parsed)
        for pattern, shorter in BUDGETS:
            source = pattern.sub(shorter, source)
        print(f"line {example.line}")
        loaded_shell.run(source)

    monkeypatch.chdir(tmp_path)
    loaded_shell.run(YOURS + (OF_GENERATE if path.stem == "generate" else ""))
    for example in Page.parse(str(path), CodeBlockParser("python", run), SkipParser()):
        example.evaluate()
