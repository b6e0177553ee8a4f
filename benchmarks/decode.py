"""Tokens per second of a Llama whose linear layers are mostly zeros: dense, masked, and packed.

    python -m benchmarks.decode [--config 8b|tiny] [--zeros 0.8,0.9] [--tokens 128] [--out FILE]

Random weights in the shape of Llama-3-8B; every linear layer but the head is masked. Batch 1, a static cache; one step
(the forward, and the choice of the next token) is captured as a CUDA graph and replayed. All variants run in the same
harness, take turns, and start from the same prompt. The logits of the packed model are compared with those of the
masked dense one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import time
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

from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.models.llama import modeling_llama

CONFIGS = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    },
}
PROMPT = 16


def fuse(model: nn.Module) -> None:
    """Compile what lies between the products: norms, the gated activation, rotations. The same for all models."""
    modeling_llama.apply_rotary_pos_emb = _rotate
    for module in model.modules():
        if isinstance(module, (modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP)):
            module.compile()


_rotate = torch.compile(modeling_llama.apply_rotary_pos_emb)


class Decoder:
    """One model in the harness: ``step`` makes the next token from the last."""

    def __init__(self, model: nn.Module, config: LlamaConfig, length: int, device: torch.device) -> None:
        self.model, self.device, self.length = model, device, length
        dtype = next(model.parameters()).dtype
        self.cache = StaticCache(config=config, max_batch_size=1, max_cache_len=length, device=device, dtype=dtype)
        self.token = torch.zeros((1, 1), dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.logits = torch.zeros((1, config.vocab_size), device=device)
        self.graph: Any = None

    @torch.no_grad()
    def _step(self) -> None:
        out = self.model(
            input_ids=self.token,
            position_ids=self.place[None],
            cache_position=self.place,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits.copy_(out.logits[:, -1].float())
        self.token.copy_(self.logits.argmax(-1, keepdim=True))
        self.place.add_(1)

    def start(self, prompt: torch.Tensor) -> None:
        """Forget, and read the prompt token by token, as the steps do."""
        self.cache.reset()
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
        results[f"{zeros:.0%}"] = found = measure(dense, masked, packed, config, prompt, options, device)
        found |= {"mask_s": taken - start, "pack_s": made - taken}
        print(f"{zeros:.0%} zeros: {json.dumps(found)}", flush=True)
        del masked, packed
    about = {"date": datetime.date.today().isoformat(), "sapwood": sw.__version__, **describe(device)}
    about |= {"between_products": "eager" if options.eager else "compiled"}
    about |= {"config": options.config, "tokens": options.tokens, "prompt": PROMPT, "dtype": str(dtype)}
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "zeros": results}, indent=1) + "\n")


def measure(
    dense: nn.Module,
    masked: nn.Module,
    packed: nn.Module,
    config: LlamaConfig,
    prompt: torch.Tensor,
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    length = PROMPT + options.tokens + 8
    decoders = {
        n: Decoder(m, config, length, device) for n, m in (("dense", dense), ("masked", masked), ("packed", packed))
    }
    for decoder in decoders.values():
        if not options.eager:
            fuse(decoder.model)
        decoder.capture()
    logits = {}
    for name in ("masked", "packed"):
        decoders[name].start(prompt)
        logits[name] = decoders[name].logits.clone()
    error = float((logits["packed"] - logits["masked"]).norm() / logits["masked"].norm())
    taken: dict[str, list[float]] = {n: [] for n in decoders}
    for _ in range(options.rounds):
        for name, decoder in decoders.items():
            taken[name].append(decoder.seconds(prompt, options.tokens))
    middle = {n: sorted(t)[len(t) // 2] for n, t in taken.items()}
    return {
        "tokens_per_s": {n: options.tokens / t for n, t in middle.items()},
        "speed": middle["dense"] / middle["packed"],
        "rounds_s": taken,
        "logits_error": error,
        "linear_bytes": linear_bytes(packed) / linear_bytes(masked),
        "all_bytes": weight_bytes(packed) / weight_bytes(masked),
    }


if __name__ == "__main__":
    main()
