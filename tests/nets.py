"""Tiny nets, one per hazard, named after the hazard."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

Case = tuple[Callable[[], nn.Module], Callable[[], Any]]
CASES: dict[str, Case] = {}


def case(inputs: Callable[[], Any]) -> Callable[[Any], Any]:
    """Register a net (a class or a factory) with what it is fed."""

    def register(build: Any) -> Any:
        CASES[build.__name__] = (build, inputs)
        return build

    return register


def image(channels: int = 3, size: int = 8) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(2, channels, size, size)


def tokens(width: int = 16, length: int = 5) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(2, length, width)


def words(length: int = 6) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(0, 20, (2, length))


def conv(i: int, o: int, k: int = 3, **kwargs: Any) -> nn.Conv2d:
    return nn.Conv2d(i, o, k, padding=kwargs.pop("padding", k // 2), **kwargs)


class Pool(nn.Module):
    """Global average, then a linear layer."""

    def __init__(self, width: int, out: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.flatten(2).mean(2))


@case(image())
def plain_chain() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 16), nn.ReLU(), Pool(16))


@case(image())
class residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.head = conv(3, 8), conv(8, 12), conv(12, 8), Pool(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(x + self.b(F.relu(self.a(x))))


@case(image())
class in_place_operators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(3, 8), Pool(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).relu_()
        y += self.b(x)
        y.mul_(2).clamp_(-3, 3)
        return self.head(y)


@case(image())
class write_into_view(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(3, 8), Pool(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(self.a(x))
        out[:, :, ::2] = self.a(x)[:, :, ::2]
        out[:, :, 1::2] = self.b(x)[:, :, 1::2]
        return self.head(out)


@case(image())
class write_channels_into_new_tensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = 12
        self.a, self.b, self.head = conv(3, 8), conv(3, 4), Pool(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        out = torch.zeros(x.shape[0], self.width, *x.shape[2:])
        out[:, : a.shape[1]] = a
        out[:, a.shape[1] :] = b
        return self.head(out)


@case(image())
class dense_concatenation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = conv(3, 8), conv(8, 8), conv(16, 8), Pool(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b = self.b(a)
        c = self.c(torch.cat([a, b], 1))
        return self.head(torch.cat([a, b, c], 1))


@case(image())
def flatten_before_linear() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 4))


@case(image())
def grouped_convolution() -> nn.Module:
    return nn.Sequential(conv(3, 16), conv(16, 24, groups=4), nn.ReLU(), conv(24, 8, groups=2), Pool(8))


@case(image())
def depthwise_convolution() -> nn.Module:
    return nn.Sequential(conv(3, 8), conv(8, 8, groups=8), nn.ReLU(), conv(8, 16, 1), Pool(16))


@case(image())
def depthwise_multiplier() -> nn.Module:
    return nn.Sequential(conv(3, 8), conv(8, 16, groups=8), nn.ReLU(), conv(16, 8, 1), Pool(8))


@case(image())
def dilated_convolution() -> nn.Module:
    return nn.Sequential(conv(3, 8), conv(8, 8, dilation=2, padding=2), nn.GELU(), Pool(8))


@case(image())
def transposed_convolution() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.ConvTranspose2d(8, 12, 2, 2), nn.ReLU(), conv(12, 8), Pool(8))


@case(image())
def grouped_transposed_convolution() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.ConvTranspose2d(8, 12, 2, 2, groups=4), nn.ReLU(), Pool(12))


@case(lambda: torch.randn(2, 3, 12))
def convolution_1d() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 12, 3), Pool(12))


@case(lambda: torch.randn(2, 3, 4, 6, 6))
def convolution_3d() -> nn.Module:
    return nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 12, 1), Pool(12))


@case(image())
def group_norm() -> nn.Module:
    return nn.Sequential(conv(3, 16), nn.GroupNorm(4, 16), nn.ReLU(), conv(16, 8), nn.GroupNorm(1, 8), Pool(8))


@case(image())
def instance_norm() -> nn.Module:
    return nn.Sequential(conv(3, 16), nn.InstanceNorm2d(16, affine=True), nn.PReLU(16), Pool(16))


@case(tokens())
def layer_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 16), nn.RMSNorm(16), nn.Linear(16, 4)
    )


@case(tokens())
class rms_norm_by_hand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gain = nn.Linear(16, 24), nn.Linear(24, 4), nn.Parameter(torch.rand(24) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain)


@case(image())
class weight_standardisation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(8, 12), Pool(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.b.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        return self.head(F.conv2d(self.a(x), w, self.b.bias, padding=1))


@case(image())
class squeeze_and_excite_by_hand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.down, self.up, self.head = conv(3, 16), nn.Linear(16, 4), nn.Linear(4, 16), Pool(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        b, c, _, _ = x.size()
        gate = self.up(F.relu(self.down(x.mean((2, 3))))).sigmoid().view(b, c, 1, 1)
        return self.head(x * gate.expand_as(x))


@case(image())
class glu_by_chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = conv(3, 16), Pool(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.a(x).chunk(2, dim=1)
        return self.head(value * gate.sigmoid())


@case(image())
class glu_function(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = conv(3, 16), Pool(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.glu(self.a(x), dim=1))


@case(image())
class split_by_attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = 6
        self.a, self.b, self.c, self.head = conv(3, 16), conv(6, 8), conv(10, 8), Pool(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        y, z = torch.split(x, [self.first, x.shape[1] - self.first], dim=1)
        return self.head(self.b(y) + self.c(z))


@case(image())
class slice_by_literal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 16), conv(6, 8), Pool(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(x)[:, :6]))


@case(image())
class channel_shuffle_by_view(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.groups = 4
        self.a, self.b, self.head = conv(3, 16), conv(16, 8), Pool(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        b, c, h, w = x.shape
        x = x.view(b, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(b, c, h, w)
        return self.head(self.b(x))


@case(image())
def channel_shuffle_module() -> nn.Module:
    return nn.Sequential(conv(3, 16), nn.ChannelShuffle(4), conv(16, 8), Pool(8))


@case(image())
def pixel_shuffle() -> nn.Module:
    return nn.Sequential(conv(3, 16), nn.PixelShuffle(2), nn.ReLU(), conv(4, 8), nn.PixelUnshuffle(2), Pool(32))


@case(image())
def unfold_and_fold() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.Unfold(2, stride=2), nn.Fold((8, 8), 2, stride=2), conv(8, 8), Pool(8))


@case(image())
class padded_shortcut(nn.Module):
    """ResNet's option A: channels are padded with zeros by a literal amount."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(8, 12), Pool(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.head(self.b(x) + F.pad(x, (0, 0, 0, 0, 2, 2)))


@case(tokens())
class one_encoder_used_twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 12))
        self.head = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.encoder(x), self.encoder(x.flip(1))], -1))


@case(words())
class tied_weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid = nn.Embedding(20, 16), nn.Linear(16, 24)
        self.back, self.out = nn.Linear(24, 16), nn.Linear(16, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.back(F.gelu(self.mid(self.embed(x)))))


@case(words())
class embedding_bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.a, self.b = nn.EmbeddingBag(20, 16, mode="mean"), nn.Linear(16, 24), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu(self.a(self.bag(x))))


@case(tokens())
class raw_parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(24))
        self.shift, self.w2 = nn.Parameter(torch.randn(1, 1, 24)), nn.Parameter(torch.randn(24, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w1 + self.b1 + self.shift) @ self.w2


@case(tokens())
class functional_code(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in ((24, 16), (24,), (4, 24), (4,))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.weights
        return F.linear(F.leaky_relu(F.linear(x, a, b)), c, d)


@case(tokens())
class einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(16, 4, 6)) for _ in range(3))
        self.o = nn.Parameter(torch.randn(4, 6, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("bnc,chd->bhnd", x, w) for w in (self.q, self.k, self.v))
        a = torch.einsum("bhnd,bhmd->bhnm", q, k).softmax(-1)
        return torch.einsum("bhnm,bhmd,hdc->bnc", a, v, self.o)


@case(tokens())
class attention_by_hand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = 4, 6
        self.qkv, self.proj = nn.Linear(16, 72), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        a = (q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)).softmax(-1)
        return self.proj((a @ v).transpose(1, 2).reshape(b, n, self.heads * self.head_dim))


@case(tokens())
class grouped_query_attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.q, self.kv = 4, nn.Linear(16, 32), nn.Linear(16, 32)
        self.proj = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        q = self.q(x).view(shape).transpose(1, 2)
        k, v = (t.view(shape).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.proj(out.transpose(1, 2).flatten(2))


@case(tokens())
class single_head_attention(nn.Module):
    """No heads to remove: the head width goes, and the attention scale must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


@case(tokens())
class rotary_attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("rate", 1.0 / 10 ** torch.linspace(0, 1, 4))

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * self.rate
        angle = torch.cat([angle, angle], -1)
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * angle.cos() + turned * angle.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(x.shape[0], x.shape[1], -1, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(*x.shape[:2], -1))


@case(tokens())
def transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.1)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 4))


@case(tokens())
class transformer_from_projection(nn.Module):
    """The width is not pinned by the input: embedding and heads can both go."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 6, 32, batch_first=True, norm_first=True)
        self.embed, self.encoder = nn.Linear(16, 24), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


@case(lambda: (torch.randn(2, 5, 16), torch.randn(2, 4, 16)))
class transformer_decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(24, 4, 32, batch_first=True)
        self.a, self.b, self.decoder = nn.Linear(16, 24), nn.Linear(16, 24), nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(self.a(x), self.b(memory)))


@case(lambda: (torch.randn(5, 2, 16), torch.randn(4, 2, 12)))
class cross_attention_widths(nn.Module):
    """Keys and values of other widths than the queries, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(12, 20)
        self.attention, self.head = nn.MultiheadAttention(24, 4, kdim=20, vdim=20), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        memory = self.b(memory)
        return self.head(self.attention(self.a(x), memory, memory)[0])


@case(tokens())
class recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.lstm = nn.Linear(16, 12), nn.LSTM(12, 8, batch_first=True, bidirectional=True)
        self.gru, self.b, self.head = nn.GRU(16, 8, batch_first=True), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.b(self.gru(self.lstm(self.a(x))[0])[0])))


@case(tokens())
class lstm_cell_by_hand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = 8
        self.x, self.h, self.head = nn.Linear(16, 32), nn.Linear(8, 32), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(x.shape[0], self.hidden)
        for t in range(x.shape[1]):
            i, f, g, o = (self.x(x[:, t]) + self.h(h)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)


@case(image())
def weight_norm_parametrised() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(conv(3, 8)), nn.ReLU(), parametrizations.weight_norm(conv(8, 12)), Pool(12)
    )


@case(image())
def weight_norm_old() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(conv(3, 8)), nn.ReLU(), nn.utils.weight_norm(conv(8, 12)), Pool(12))


@case(image())
def spectral_norm_parametrised() -> nn.Module:
    return nn.Sequential(
        parametrizations.spectral_norm(conv(3, 8)), nn.ReLU(), parametrizations.spectral_norm(conv(8, 12)), Pool(12)
    )


@case(image())
def spectral_norm_old() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(conv(3, 8)), nn.ReLU(), nn.utils.spectral_norm(conv(8, 12)), Pool(12))


@case(image())
class dict_output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(8, 12), Pool(12)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        low = self.a(x)
        return {"low": [low.mean(1)], "out": self.head(self.b(low))}


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: torch.Tensor


@case(image())
class dataclass_output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(8, 12), Pool(12)

    def forward(self, x: torch.Tensor) -> Answer:
        low = self.a(x)
        return Answer(self.head(self.b(F.relu(low))), low)


@case(lambda: {"batch": {"image": torch.randn(2, 3, 8, 8), "scale": torch.rand(2, 1, 1, 1)}})
class nested_inputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = conv(3, 8), Pool(8)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(self.a(batch["image"]) * batch["scale"])


@case(image())
class data_dependent_control_flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = conv(3, 8), conv(8, 12), conv(8, 12), Pool(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        branch = self.b if x.sum().item() > 1e9 else self.c
        return self.head(F.relu(branch(x)))


@case(image())
class no_grad_parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = plain_chain().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@case(image())
class auxiliary_head_in_training(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head, self.aux = conv(3, 8), conv(8, 12), Pool(12), conv(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.a(x)
        out = self.head(self.b(F.relu(x)))
        return (out, self.aux(x)) if self.training else out


@case(image())
class buffer_beside_weights(nn.Module):
    """Constants that follow the channels: a blur kernel and a scale per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.a, self.head = conv(3, 8), Pool(8)
        self.register_buffer("blur", torch.rand(8, 1, 3, 3))
        self.register_buffer("gain", torch.rand(8, 1, 1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.conv2d(self.a(x), self.blur, padding=1, groups=self.width) * self.gain)


@case(tokens())
class token_mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.embed = nn.Linear(5, 12), nn.Linear(12, 5), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x + self.down(F.gelu(self.up(x.transpose(1, 2)))).transpose(1, 2)
        return self.head(x.mean(1))


@case(tokens())
class softmax_over_channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).softmax(-1))


@case(tokens())
class statistics_over_channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + x.amax(-1, keepdim=True)
        return self.b(F.normalize(x, dim=-1)) + x.sigmoid().sum(-1, keepdim=True)


@case(tokens())
class size_as_factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(24, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.c(F.relu(self.b(x * x.shape[-1] ** -0.5)))


@case(image())
class unknown_operator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(8, 12), Pool(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cdist(self.a(x).flatten(2), torch.zeros(1, 3, 64)).sum((1, 2))[:, None, None, None] + self.a(x)
        return self.head(F.relu(self.b(x)))


@case(image())
class up_and_down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = conv(3, 8, stride=2), conv(8, 12, stride=2), conv(20, 8), Pool(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.silu(self.a(x))
        b = F.interpolate(self.b(a), scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.head(self.c(torch.cat([a, b], 1)))


@case(image())
class shape_assertions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width, self.a, self.head = 8, conv(3, 8), Pool(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        assert x.shape[1] == self.width, "wrong width"
        assert x.size(1) % 2 == 0
        return self.head(x)


@case(image())
class spatial_attention_by_max(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate, self.head = conv(3, 8), conv(2, 1, 3), Pool(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        pooled = torch.cat([x.max(1, keepdim=True)[0], x.mean(1, keepdim=True)], 1)
        return self.head(x * self.gate(pooled).sigmoid())


@case(tokens())
class writes_by_index(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(16, 12), nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        a[a < 0] = 0.1
        a = a.index_add(1, torch.tensor([0, 2]), b[:, :2])
        index = torch.tensor([[1], [2]])[:, :, None].expand(-1, -1, a.shape[-1])
        return self.head(a.scatter_add(1, index, b[:, :1]))


@case(tokens(length=8))
class fourier_mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(self.a(x), dim=1) * 0.5, n=8, dim=1).relu())


@dataclass
class Settings:
    heads: int
    head_dim: int


@case(tokens())
class sizes_in_settings(nn.Module):
    """Sizes that code reads from a dict and from a configuration object."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.table = Settings(4, 6), {"hidden": 24, "name": "net"}
        self.qkv, self.proj, self.up, self.head = (
            nn.Linear(16, 72),
            nn.Linear(24, 24),
            nn.Linear(24, 24),
            nn.Linear(24, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        shape = (b, n, 3, self.settings.heads, self.settings.head_dim)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        y = self.proj(y.reshape(b, n, self.settings.heads * self.settings.head_dim))
        return self.head(self.up(y).relu().view(b * n, self.table["hidden"]))


@case(image())
class repeated_kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width, self.a, self.head = 8, conv(3, 8), Pool(8)
        self.register_buffer("kernel", torch.rand(1, 1, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel = self.kernel.repeat(self.width, 1, 1, 1)
        return self.head(F.conv2d(self.a(x), kernel, padding=1, groups=self.width))


@case(image())
class unpooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(8, 12), Pool(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, where = F.max_pool2d(self.a(x), 2, return_indices=True)
        return self.head(self.b(F.max_unpool2d(low, where, 2)))


@case(image())
class product_of_attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width, self.size, self.a, self.head = 16, 8, conv(3, 16), nn.Linear(16 * 64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.a(x).view(-1, self.width * self.size * self.size))


@case(image())
class shared_memory(nn.Module):
    """Two parameters, one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(3, 8), Pool(16)
        self.b.weight = nn.Parameter(self.a.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.a(x), self.b(x.flip(2))], 1))


@case(image())
class weights_standardised_by_batch_norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 8), conv(8, 12), Pool(12)
        self.gain = nn.Parameter(torch.rand(12) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.b.weight.reshape(1, self.b.out_channels, -1)
        w = F.batch_norm(flat, None, None, weight=self.gain, training=True, momentum=0.0, eps=1e-6)
        return self.head(F.conv2d(self.a(x), w.reshape_as(self.b.weight), self.b.bias, padding=1))


@case(lambda: torch.randn(6, 16))
class experts_by_grouped_product(nn.Module):
    """Rows are sorted by the expert that they go to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        self.up, self.down = nn.Parameter(torch.randn(3, 64, 32)), nn.Parameter(torch.randn(3, 32, 64))
        self.gate = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        chosen, order = self.gate(x).argmax(-1).sort()
        ends = torch.histc(chosen.float(), bins=3, min=0, max=2).cumsum(0, dtype=torch.int32)
        h = F.relu(torch._grouped_mm(x[order], self.up.transpose(1, 2), offs=ends))
        h = torch._grouped_mm(h, self.down.transpose(1, 2), offs=ends)
        return self.head(torch.zeros_like(h).index_add(0, order, h))


class Cache:
    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


@case(lambda: torch.randn(2, 5, 16))
class hands_back_its_cache(nn.Module):
    """Keys are kept for the next call: no output, so heads may go."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = 4, 8
        self.embed, self.qk = nn.Linear(16, 32), nn.Linear(32, 64)
        self.v, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> dict[str, Any]:
        cache = cache or Cache()
        x = self.embed(x)
        shape = (*x.shape[:2], self.heads, self.head_dim)
        q, k = (t.view(shape).transpose(1, 2) for t in self.qk(x).chunk(2, -1))
        cache.keys.append(k)
        mixed = (q @ k.transpose(-1, -2) / 3).softmax(-1) @ self.v(x).view(shape).transpose(1, 2)
        return {"logits": self.head(mixed.transpose(1, 2).flatten(2)), "cache": cache}


@case(tokens())
class multi_query_attention(nn.Module):
    """Queries, one key and one value from one layer, taken apart by position: heads stay, their width goes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = 4, 8
        self.embed, self.qkv = nn.Linear(16, 24), nn.Linear(24, 48, bias=False)
        self.out, self.head = nn.Linear(32, 24), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        parts = self.qkv(x).view(*x.shape[:2], self.heads + 2, self.head_dim).transpose(1, 2)
        q, k, v = parts[:, :-2], parts[:, [-2]], parts[:, [-1]]
        mixed = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))


@case(image())
class split_attention(nn.Module):
    """A softmax over two branches: the branches stay, their channels go."""

    def __init__(self) -> None:
        super().__init__()
        self.radix = 2
        self.a, self.b = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 24, 3, padding=1, groups=2)
        self.squeeze, self.excite, self.head = nn.Conv2d(12, 8, 1), nn.Conv2d(8, 24, 1), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.b(F.relu(self.a(x))))
        batch, channels, height, width = x.shape
        parts = x.reshape(batch, self.radix, channels // self.radix, height, width)
        gate = self.excite(F.relu(self.squeeze(parts.sum(1).mean((2, 3), keepdim=True))))
        gate = gate.view(batch, self.radix, -1)
        gate = gate.softmax(1) if self.radix > 1 else gate.sigmoid()
        return self.head((parts * gate[..., None, None]).sum(1).mean((2, 3)))


@case(tokens())
class recurrent_in_layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 8, num_layers=2, bidirectional=True, dropout=0.5)
        self.rnn, self.head = nn.RNN(16, 8, nonlinearity="relu"), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.gru(x)[0])[0])
