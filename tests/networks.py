"""Networks people train on images, written out as their papers and reference code have them, to be traced."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or inputs != out:
            self.down = nn.Sequential(nn.Conv2d(inputs, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    """ResNet v1.5, He et al. 2015."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        layers, inputs = [], 64
        for width, depth, stride in zip((64, 128, 256, 512), depths, (1, 2, 2, 2), strict=True):
            for place in range(depth):
                layers.append(Bottleneck(inputs, width, stride if place == 0 else 1))
                inputs = 4 * width
        self.body = nn.Sequential(*layers)
        self.fc = nn.Linear(2048, 1000)

    def forward(self, x):
        return self.fc(F.adaptive_avg_pool2d(self.body(self.stem(x)), 1).flatten(1))


def resnet50() -> nn.Module:
    return ResNet((3, 4, 6, 3))


def resnet101() -> nn.Module:
    return ResNet((3, 4, 23, 3))


class ViT(nn.Module):
    """ViT, Dosovitskiy et al. 2020; the text tower of CLIP without patches."""

    def __init__(self, width=768, depth=12, heads=12, patch=16, image=224, classes=1000, vocab=0, length=0):
        super().__init__()
        self.vocab, self.heads = vocab, heads
        tokens = length if vocab else (image // patch) ** 2 + 1
        self.embed = nn.Embedding(vocab, width) if vocab else nn.Conv2d(3, width, patch, patch)
        self.first = None if vocab else nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, tokens, width))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=not vocab)

    def forward(self, x):
        x = self.embed(x)
        if not self.vocab:
            x = x.flatten(2).transpose(1, 2)
            x = torch.cat((self.first.expand(len(x), -1, -1), x), 1)
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, w)
        x = x + self.drop(self.out(y))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def vit_b_16() -> nn.Module:
    return ViT()


class Clip(nn.Module):
    """CLIP ViT-B/16, Radford et al. 2021: an image and a text tower that meet in 512 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.image = ViT(classes=512)
        self.text = ViT(width=512, heads=8, classes=512, vocab=49408, length=77)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, image, text):
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return (a * b).sum(-1) * self.scale.exp()  # pairs alone: the full matrix grows with the batch squared


def clip_b_16() -> nn.Module:
    return Clip()


class _Conv(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x):
        return F.silu(self.bn(self.conv(x)), inplace=True)


class _C2f(nn.Module):
    def __init__(self, inputs: int, outputs: int, depth: int, shortcut: bool = True) -> None:
        super().__init__()
        half = outputs // 2
        self.first, self.last = _Conv(inputs, outputs), _Conv((2 + depth) * half, outputs)
        self.parts = nn.ModuleList(
            nn.Sequential(_Conv(half, half, 3), _Conv(half, half, 3)) for _ in range(depth)
        )
        self.shortcut = shortcut

    def forward(self, x):
        y = list(self.first(x).chunk(2, 1))
        for part in self.parts:
            y.append(y[-1] + part(y[-1]) if self.shortcut else part(y[-1]))
        return self.last(torch.cat(y, 1))


class Yolo(nn.Module):
    """A detector of YOLOv8n's shape: C2f backbone, fast pyramid pooling, path aggregation, split heads."""

    def __init__(self, classes: int = 80, bins: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _Conv(3, 16, 3, 2), _Conv(16, 32, 3, 2), _C2f(32, 32, 1), _Conv(32, 64, 3, 2)
        )
        self.p3 = _C2f(64, 64, 2)
        self.p4 = nn.Sequential(_Conv(64, 128, 3, 2), _C2f(128, 128, 2))
        self.p5 = nn.Sequential(_Conv(128, 256, 3, 2), _C2f(256, 256, 1))
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.sppf = nn.ModuleList((_Conv(256, 128), _Conv(512, 256)))
        self.up4, self.up3 = _C2f(384, 128, 1, False), _C2f(192, 64, 1, False)
        self.down4, self.down5 = _Conv(64, 64, 3, 2), _Conv(128, 128, 3, 2)
        self.out4, self.out5 = _C2f(192, 128, 1, False), _C2f(384, 256, 1, False)
        self.box = nn.ModuleList(
            nn.Sequential(_Conv(c, 64, 3), _Conv(64, 64, 3), nn.Conv2d(64, 4 * bins, 1))
            for c in (64, 128, 256)
        )
        self.kind = nn.ModuleList(
            nn.Sequential(_Conv(c, 80, 3), _Conv(80, 80, 3), nn.Conv2d(80, classes, 1))
            for c in (64, 128, 256)
        )

    def forward(self, x):
        three = self.p3(self.stem(x))
        four = self.p4(three)
        five = self.sppf[0](self.p5(four))
        pools = [five]
        for _ in range(3):
            pools.append(self.pool(pools[-1]))
        five = self.sppf[1](torch.cat(pools, 1))
        four = self.up4(torch.cat((F.interpolate(five, scale_factor=2.0), four), 1))
        three = self.up3(torch.cat((F.interpolate(four, scale_factor=2.0), three), 1))
        four = self.out4(torch.cat((self.down4(three), four), 1))
        five = self.out5(torch.cat((self.down5(four), five), 1))
        levels = zip((three, four, five), self.box, self.kind, strict=True)
        return [torch.cat((box(level), kind(level)), 1) for level, box, kind in levels]


def yolov8n() -> nn.Module:
    return Yolo()


class UNet(nn.Module):
    """U-Net, Ronneberger et al. 2015, padded as is usual today."""

    def __init__(self, channels: int = 3, classes: int = 2) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        sides = zip((channels, *widths), widths, strict=False)
        self.down = nn.ModuleList(self._pair(a, b) for a, b in sides)
        self.up = nn.ModuleList(nn.ConvTranspose2d(w, w // 2, 2, 2) for w in reversed(widths[1:]))
        self.join = nn.ModuleList(self._pair(w, w // 2) for w in reversed(widths[1:]))
        self.out = nn.Conv2d(64, classes, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x):
        kept = []
        for place, part in enumerate(self.down):
            x = part(x if place == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for up, join, side in zip(self.up, self.join, reversed(kept[:-1]), strict=True):
            x = join(torch.cat((side, up(x)), 1))
        return self.out(x)


def unet() -> nn.Module:
    return UNet()
