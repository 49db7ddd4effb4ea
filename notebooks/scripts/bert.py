"""Fine-tune a Hugging Face BERT from a local folder, or a small one with random weights.

python notebooks/scripts/bert.py --config configs/auto_speed.yaml [--model FOLDER]
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

import torch
from _common import DEVICE, drawn, parser_of, trained
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import speedkit_jupyter

LENGTH, WORDS = 48, 4000


class Logits(nn.Module):
    """Return only the logits of a transformers model: tokens (N, T) to logits (N, labels)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens).logits


def passages(words: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return token ids of SpeedKit's source (N, LENGTH), folder labels (N,), number of folders."""
    root = Path(speedkit_jupyter.__file__).parent
    folders = sorted({file.relative_to(root).parts[0] for file in root.glob("*/**/*.py")})
    texts = [
        [re.findall(r"\w+|[^\w\s]", file.read_text(encoding="utf-8"))
         for file in sorted((root / folder).rglob("*.py"))]
        for folder in folders
    ]  # fmt: skip
    counts = Counter(word for files in texts for file in files for word in file)
    number = {word: at + 1 for at, (word, _) in enumerate(counts.most_common(words - 1))}
    rows = [
        ([number.get(word, 0) for word in file[at : at + LENGTH]], label)
        for label, files in enumerate(texts)
        for file in files
        for at in range(0, len(file) - LENGTH, LENGTH)
    ]
    return (*(torch.tensor(each) for each in zip(*rows, strict=True)), len(folders))  # type: ignore[return-value]


def folder(name: str) -> Path:
    """Return the folder of a saved model, for argparse."""
    if not (Path(name) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{name} is no folder of save_pretrained()")
    return Path(name)


def main() -> None:
    """Run the script."""
    parser = parser_of(__doc__, steps=100)
    parser.add_argument("--model", type=folder, help="a folder with a model of save_pretrained()")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = BertConfig.from_pretrained(options.model) if options.model else BertConfig(
        vocab_size=WORDS, hidden_size=192, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=768, max_position_embeddings=LENGTH,
    )  # fmt: skip
    x, y, config.num_labels = passages(min(config.vocab_size, WORDS))
    if options.model:
        model = BertForSequenceClassification.from_pretrained(options.model, config=config)
    else:
        model = BertForSequenceClassification(config)
    source = options.model or "a small one from a config; --model FOLDER takes yours"
    print(f"BERT ({source}): from which folder of SpeedKit's source is a passage?")
    model = Logits(model).to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    trained(model, optimizer, drawn(x, y, options.batch), options)


if __name__ == "__main__":
    main()
