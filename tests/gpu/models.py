"""Small definitions of the models that commits are measured with: their shapes matter, not what they learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

NAMES = ("mlp", "resnet-50", "gpt-2")


class Bottleneck(nn.Module):
    """A residual block of three convolutions, as in ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.skip = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fn.relu(self.body(x) + self.skip(x))


def resnet(depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """ResNet-50 by default: 25.6 M parameters, 53 batch normalisations."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Block(nn.Module):
    """A layer of a decoder. The causal mask is a large buffer of each layer, as in older code."""

    mask: torch.Tensor

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
        self.register_buffer("mask", torch.ones(context, context, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = fn.scaled_dot_product_attention(*parts, attn_mask=self.mask[:length, :length])
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class Decoder(nn.Module):
    """GPT-2 by default: 124 M parameters; the embedding is also the last layer."""

    def __init__(
        self, words: int = 50257, width: int = 768, layers: int = 12, heads: int = 12, context: int = 1024
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads, context) for _ in range(layers)])
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        return self.head(self.last(self.blocks(x)))


def make(name: str, device: torch.device, *, small: bool) -> tuple[nn.Module, Callable[[Any], torch.Tensor]]:
    """A model on the device, and its loss for one batch. `small`: for a machine without a GPU."""
    if name == "mlp":
        width, batch = (64, 16) if small else (1024, 256)
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        model: nn.Module = nn.Sequential(*layers).to(device)
        data = torch.randn(batch, width, device=device)
        return model, lambda model: model(data).float().square().mean()
    if name == "resnet-50":
        model = (resnet((1, 1), 8, 10) if small else resnet()).to(device, memory_format=torch.channels_last)
        images = torch.randn((2, 3, 32, 32) if small else (64, 3, 224, 224), device=device)
        images = images.to(memory_format=torch.channels_last)
        return model, lambda model: model(images).float().logsumexp(1).mean()
    sizes = {"words": 512, "width": 64, "layers": 2, "heads": 4, "context": 64} if small else {}
    model = Decoder(**sizes).to(device)
    words = torch.randint(500, (2, 32) if small else (8, 512), device=device)
    return model, lambda model: fn.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())
