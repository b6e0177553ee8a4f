"""torch's attention module without its copies.

The module has a quick path of its own, which it leaves for many reasons; one is an odd number of heads. The other path
copies queries, keys and values into place. Attention itself reads them where the product has put them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sapwood.capture.skeleton import rebuild


class Lean(nn.MultiheadAttention):
    """The same module; where a sequence attends to itself, nothing is copied."""

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        asked = dict(zip(("key_padding_mask", "need_weights", "attn_mask"), args, strict=False)) | kwargs
        if len(args) <= 3 and query is key and key is value and query.dim() == 3 and self._is_plain(asked):
            return self._attend(query), None
        return super().forward(query, key, value, *args, **kwargs)

    def _is_plain(self, asked: dict[str, Any]) -> bool:
        usual = {"key_padding_mask": None, "attn_mask": None, "need_weights": False, "is_causal": False}
        free = all(({"need_weights": True} | asked).get(n, v) is v for n, v in usual.items())
        own = self.bias_k is None and not self.add_zero_attn and self.batch_first and self._qkv_same_embed_dim
        return own and free and not self.training

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        made = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = made.view(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        return F.linear(out, self.out_proj.weight, self.out_proj.bias)


def without_copies(model: nn.Module) -> tuple[nn.Module, int]:
    """A copy that shares the tensors, and how many of its attention modules are lean ones."""
    if not any(type(m) is nn.MultiheadAttention for m in model.modules()):
        return model, 0
    made = rebuild(model, lambda _, tensor: tensor.detach()).eval()
    found = [m for m in made.modules() if type(m) is nn.MultiheadAttention]
    for module in found:
        module.__class__ = Lean
    return made, len(found)
