"""Tokens per second of a Llama whose linear layers are mostly zeros: dense, masked, and packed.

    python -m benchmarks.decode [--config 8b|tiny] [--zeros 0.8,0.9] [--tokens 128] [--out FILE]

Random weights in the shape of Llama-3-8B; every linear layer but the head is masked. Batch 1, a static cache; one step
(all layers, and the choice of the next token) is captured as a CUDA graph and replayed. What lies between the linear
layers (norms, rotations, attention, the gated activation) is compiled, and the same for all; its kernels let the next
one start before they have ended (Inductor's ``triton.enable_pdl``), where that one can. All variants run in this
harness, take turns, and start from the same prompt. Logits are compared with those of the masked model in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sapwood as sw
from sapwood.measurement.machine import describe
from sapwood.sparse import SparseLinear

with contextlib.suppress(ImportError):  # torchvision beside a CPU build of torch, which transformers imports
    from tests.zoo.torchvision_models import import_torchvision

    import_torchvision()

from transformers import LlamaConfig, LlamaForCausalLM

CONFIGS = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
PROMPT = 16


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_and_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    both = x + y
    return both, norm(both, weight, eps)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(gate) * up


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    place: torch.Tensor,
    frequencies: torch.Tensor,
) -> torch.Tensor:
    """One token: into the cache [heads of keys, length, size], and all that is there attended to."""
    heads, length, size = keys.shape
    angles = place.float() * frequencies
    keys.index_copy_(1, place, rotated(k.view(heads, 1, size), angles))
    values.index_copy_(1, place, v.view(heads, 1, size))
    query = rotated(q.view(heads, -1, size), angles)
    scores = (query.float()[:, :, None] * keys.float()[:, None]).sum(-1) / size**0.5
    scores = scores.masked_fill(torch.arange(length, device=q.device) > place, -torch.inf)
    found = (scores.softmax(-1)[..., None] * values.float()[:, None]).sum(-2)
    return found.to(q.dtype).view(1, -1)


def early(function: Callable[..., Any]) -> Callable[..., Any]:
    options: dict[str, Any] = {"triton.enable_pdl": torch.cuda.is_available()}
    return torch.compile(function, options=options)


class Decoder:
    """One model in the harness: ``step`` makes the next token from the last."""

    def __init__(self, model: LlamaForCausalLM, length: int, device: torch.device, compiled: bool) -> None:
        self.model, self.device, config = model, device, model.config
        heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        dtype = next(model.parameters()).dtype
        layers = len(model.model.layers)
        self.cache = torch.zeros((layers, 2, heads, length, size), device=device, dtype=dtype)
        turn = torch.arange(0, size, 2, device=device).float() / size
        self.frequencies = 1.0 / config.rope_parameters["rope_theta"] ** turn
        self.token = torch.zeros(1, dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.logits = torch.zeros((1, config.vocab_size), device=device)
        self.graph: Any = None
        wrap = early if compiled else (lambda function: function)
        self.norm, self.add_and_norm, self.gated, self.attend = map(wrap, (norm, add_and_norm, gated, attend))

    @torch.no_grad()
    def _step(self) -> None:
        model, eps = self.model.model, self.model.config.rms_norm_eps
        x = model.embed_tokens(self.token)
        inner = self.norm(x, model.layers[0].input_layernorm.weight, eps)
        after = [*(layer.input_layernorm for layer in model.layers[1:]), model.norm]
        for layer, (keys, values), last in zip(model.layers, self.cache, after, strict=True):
            own = layer.self_attn
            q, k, v = own.q_proj(inner), own.k_proj(inner), own.v_proj(inner)
            found = own.o_proj(self.attend(q, k, v, keys, values, self.place, self.frequencies))
            x, inner = self.add_and_norm(x, found, layer.post_attention_layernorm.weight, eps)
            between = self.gated(layer.mlp.gate_proj(inner), layer.mlp.up_proj(inner))
            x, inner = self.add_and_norm(x, layer.mlp.down_proj(between), last.weight, eps)
        self.logits.copy_(self.model.lm_head(inner))
        self.token.copy_(self.logits.argmax(-1))
        self.place.add_(1)

    def start(self, prompt: torch.Tensor) -> None:
        """Forget, and read the prompt token by token, as the steps do."""
        self.cache.zero_()
        self.place.zero_()
        for token in prompt:
            self.token.fill_(int(token))
            self.step()

    def capture(self) -> None:
        if self.device.type != "cuda":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.graph = graph

    def step(self) -> None:
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def seconds(self, prompt: torch.Tensor, tokens: int) -> float:
        self.start(prompt)
        _settle(self.device)
        before = time.perf_counter()
        for _ in range(tokens):
            self.step()
        _settle(self.device)
        return time.perf_counter() - before


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def weight_bytes(model: nn.Module) -> int:
    held = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    return sum(held.values())


def linear_bytes(model: nn.Module) -> int:
    """Of what is masked: all linear layers but the head."""
    head = {id(t) for t in model.lm_head.parameters()}
    kinds = (nn.Linear, SparseLinear)
    layers = [m for m in model.modules() if isinstance(m, kinds)]
    return sum(t.nbytes for m in layers for t in [*m.parameters(), *m.buffers()] if id(t) not in head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="8b", choices=list(CONFIGS))
    parser.add_argument("--zeros", default="0.8,0.9")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="run the parts between the products as they are")
    parser.add_argument("--out", default="benchmarks/results/decode.json")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = LlamaConfig(**CONFIGS[options.config], tie_word_embeddings=False, max_position_embeddings=8192)
    torch.manual_seed(0)
    start = time.perf_counter()
    torch.set_default_dtype(dtype)
    with device:
        dense = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    print(f"model: {time.perf_counter() - start:.1f} s", flush=True)
    prompt = torch.randint(config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(1))
    results: dict[str, Any] = {}
    for zeros in (float(z) for z in options.zeros.split(",")):
        start = time.perf_counter()
        masked = sw.mask(dense, sw.Budget(sparsity=zeros), scope="local", ignore=["lm_head", "model.embed_tokens"])
        taken = time.perf_counter()
        packed = sw.pack(masked)
        made = time.perf_counter()
        results[f"{zeros:.0%}"] = found = measure(dense, masked, packed, prompt, options, device)
        found |= {"mask_s": taken - start, "pack_s": made - taken}
        print(f"{zeros:.0%} zeros: {json.dumps(found)}", flush=True)
        del masked, packed
    about = {"date": datetime.date.today().isoformat(), "sapwood": sw.__version__, **describe(device)}
    about |= {"between_products": "eager" if options.eager else "compiled", "harness_error": harness_error()}
    about |= {"config": options.config, "tokens": options.tokens, "prompt": PROMPT, "dtype": str(dtype)}
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "zeros": results}, indent=1) + "\n")


def measure(
    dense: nn.Module,
    masked: nn.Module,
    packed: nn.Module,
    prompt: torch.Tensor,
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    length = PROMPT + options.tokens + 8
    models = {"dense": dense, "masked": masked, "packed": packed}
    exact = logits_after(Decoder(copy.deepcopy(masked).float(), length, device, compiled=False), prompt)
    decoders = {n: Decoder(m, length, device, not options.eager) for n, m in models.items()}
    for decoder in decoders.values():
        decoder.capture()
    logits = {n: logits_after(decoders[n], prompt) for n in ("masked", "packed")}
    again = {n: logits_after(decoders[n], prompt) for n in logits}
    taken: dict[str, list[float]] = {n: [] for n in decoders}
    for _ in range(options.rounds):
        for name, decoder in decoders.items():
            taken[name].append(decoder.seconds(prompt, options.tokens))
    middle = {n: sorted(t)[len(t) // 2] for n, t in taken.items()}
    return {
        "tokens_per_s": {n: options.tokens / t for n, t in middle.items()},
        "speed": middle["dense"] / middle["packed"],
        "rounds_s": taken,
        "logits_error": {n: float((found - exact).norm() / exact.norm()) for n, found in logits.items()},
        "same_again": all(torch.equal(logits[n], again[n]) for n in logits),
        "linear_bytes": linear_bytes(packed) / linear_bytes(masked),
        "all_bytes": weight_bytes(packed) / weight_bytes(masked),
    }


def harness_error() -> float:
    """How far a tiny model's logits are here from those of transformers."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIGS["tiny"], tie_word_embeddings=False)).eval()
    prompt = torch.randint(1000, (PROMPT,))
    with torch.no_grad():
        expected = model(input_ids=prompt[None]).logits[:, -1]
    found = logits_after(Decoder(model, PROMPT, torch.device("cpu"), compiled=False), prompt)
    return float((found - expected).norm() / expected.norm())


def logits_after(decoder: Decoder, prompt: torch.Tensor) -> torch.Tensor:
    decoder.start(prompt)
    return decoder.logits.clone()


if __name__ == "__main__":
    main()
