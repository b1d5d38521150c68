"""The opaque operations of the graphs: eager meaning and fake shape. Each backend lowers them by one table.

Legend: T rows, n query heads, D head_dim, kv key/value heads, P past rows, C rows of a chunk, g = n / kv. Eager bodies are the float32
reference; nothing here knows a backend.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from .quant import dequantize


@custom_op("gemma4::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, scale: Tensor | None, bits: int, group: int) -> Tensor:
    """x [T, I]; weight float32 [O, I] with scale None, or int8 [O, I] with scale [O, ceil(I / group)] -> [T, O]."""
    return F.linear(x, weight if scale is None else dequantize(weight, scale, group))


@linear.register_fake
def _(x, weight, scale, bits, group):
    return x.new_empty((x.shape[0], weight.shape[0]))


@custom_op("gemma4::rms", mutates_args=())
def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, x [..., D], weight [D] (Transformers Gemma4RMSNorm)."""
    normed = x * (x.pow(2).mean(-1, keepdim=True) + eps).pow(-0.5)
    return normed if weight is None else normed * weight


@rms.register_fake
def _(x, weight, eps):
    return torch.empty_like(x)


@custom_op("gemma4::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the pairs (i, i + D/2). x [T, n, D]; cos, sin [T, D], both halves equal."""
    a, b = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-b, a], -1) * sin.unsqueeze(1)


@rope.register_fake
def _(x, cos, sin):
    return torch.empty_like(x)


@custom_op("gemma4::gelu", mutates_args=())
def gelu(x: Tensor) -> Tensor:
    """gelu_pytorch_tanh."""
    return F.gelu(x, approximate="tanh")


@gelu.register_fake
def _(x):
    return torch.empty_like(x)


@custom_op("gemma4::attend", mutates_args=())
def attend(
    q: Tensor,
    k_past: Tensor,
    v_past: Tensor,
    k_tail: Tensor | None = None,
    v_tail: Tensor | None = None,
    mask_past: Tensor | None = None,
    mask_tail: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attention of scale 1 over the past and the open chunk (tail) -> [R, n * D].

    q [R, n, D]; k_past, v_past [P, kv, D] float32, float16, or int8 with k_scale, v_scale [P, kv]; k_tail, v_tail
    [C, kv, D]. Masks are additive with a row per (token, query head of a group): mask_past [R * g, P] or [1, P], mask_tail
    [R * g, C]. None: every past row is seen, no tail.
    """
    rows, _, dim = q.shape
    kv = k_past.shape[1]
    k_past, v_past = _float(k_past, k_scale), _float(v_past, v_scale)
    q = q.reshape(rows, kv, -1, dim).transpose(0, 1).reshape(kv, -1, dim)
    past = _scores(q, k_past, mask_past)
    if k_tail is None:
        out = past.softmax(-1) @ v_past.transpose(0, 1)
    else:
        chunk = k_tail.shape[0]
        weights = torch.cat([_scores(q, k_tail, mask_tail), past], -1).softmax(-1)
        out = weights[..., :chunk] @ v_tail.transpose(0, 1) + weights[..., chunk:] @ v_past.transpose(0, 1)
    return out.reshape(kv, rows, -1, dim).transpose(0, 1).reshape(rows, -1)


def _float(rows: Tensor, scale: Tensor | None) -> Tensor:
    return rows.float() if scale is None else rows.float() * scale[..., None]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """q [kv, R * g, D], k [P, kv, D] -> [kv, R * g, P]"""
    scores = q @ k.permute(1, 2, 0)
    return scores if mask is None else scores + mask


@attend.register_fake
def _(q, k_past, v_past, k_tail=None, v_tail=None, mask_past=None, mask_tail=None, k_scale=None, v_scale=None):
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
