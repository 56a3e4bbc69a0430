"""Two small models that tell every byte of a text from those before it."""

import numpy as np
import torch
from data import windows
from torch import nn


class Transformer(nn.Module):
    """Sees all bytes before at once."""

    def __init__(self, width, layers, length):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, x):
        hidden = self.bytes(x) + self.places.weight[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.body(hidden, mask=mask, is_causal=True))


class LSTM(nn.Module):
    """Reads one byte after the other."""

    def __init__(self, width, layers, length):
        super().__init__()
        self.bytes, self.body = nn.Embedding(256, width), nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x):
        return self.head(self.body(self.bytes(x))[0])


MODELS = {"transformer": Transformer, "lstm": LSTM}


def loss_of(model, content, length, count, draw):
    """Cross entropy in nats on ``count`` random windows of a text."""
    x, y = map(torch.from_numpy, windows(content, length, count, draw))
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def bits(model, content, length):
    """Bits a byte, on the same windows in every call."""
    with torch.no_grad():
        return loss_of(model, content, length, 64, np.random.default_rng(0)).item() / np.log(2)
