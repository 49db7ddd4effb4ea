"""Train a small transformer to predict the next character of Python code.

python notebooks/scripts/transformer.py --config configs/auto_speed.yaml
"""

from __future__ import annotations

from pathlib import Path

import torch
from _common import DEVICE, drawn, parser_of, trained
from torch import nn

import speedkit_jupyter

LENGTH = 64


class Transformer(nn.Module):
    """Predict the next character at each position: (N, T) to logits (N, characters, T)."""

    def __init__(self, characters: int, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        return self.head(self.layers(x, mask, is_causal=True)).mT


def main() -> None:
    """Run the script."""
    options = parser_of(__doc__, steps=150).parse_args()
    files = sorted(Path(speedkit_jupyter.__file__).parent.rglob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    number = {character: index for index, character in enumerate(sorted(set(text)))}
    data = torch.tensor([number[character] for character in text])
    print(f"SpeedKit's own source code: {len(text):,} characters, {len(number)} different ones")
    torch.manual_seed(0)
    model = Transformer(len(number)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = data.unfold(0, LENGTH + 1, 1)
    trained(model, optimizer, drawn(rows[:, :-1], rows[:, 1:], options.batch), options)


if __name__ == "__main__":
    main()
