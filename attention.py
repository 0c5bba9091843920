"""Causal attention with grouped heads: the fastest kernel for the device, the dtype and the shape.

Letters as in model.py: B batch, T sequence, H query heads, G key-value heads, K head size; P parts
of a gradient.
"""

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["ATTENTION_OPS", "attend", "attention_order", "suits_small_heads"]

# Fastest first on Hopper at head sizes 32 and 128; what a kernel cannot do falls to the next.
_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Measured on Hopper alone: forward and backward of attention_triton.py take two
# thirds of cuDNN's time (LOG.md). Sequences are whole blocks of it.
_SMALL_HEAD = 32
_HOPPER = (9, 0)
_BLOCK = 128


def attention_order(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which PyTorch's attention takes the kernels that measured fastest on GPUs."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel(_ORDER, set_priority=True)


def attend(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
    """Softmax of the causal scores, times the values: (B, T, H, K).

    H / G query heads in a row read the same key-value head (Ainslie et al. 2023).
    """
    if suits_small_heads(q_BTHK):
        return attention(q_BTHK, k_BTGK, v_BTGK)[0]
    out_BHTK = F.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BTGK.transpose(1, 2),
        v_BTGK.transpose(1, 2),
        is_causal=True,
        enable_gqa=q_BTHK.shape[2] != k_BTGK.shape[2],
    )
    return out_BHTK.transpose(1, 2)


def suits_small_heads(q_BTHK: Tensor) -> bool:
    """Whether the kernels for small heads are built for these queries and this device.

    They add the gradient of the queries up in no fixed order.
    """
    return (
        q_BTHK.device.type == "cuda"
        and not torch.are_deterministic_algorithms_enabled()
        and q_BTHK.dtype == torch.bfloat16
        and q_BTHK.shape[3] == _SMALL_HEAD
        and q_BTHK.shape[1] % _BLOCK == 0
        and _is_hopper_with_triton()
    )


@torch.compiler.assume_constant_result
def _is_hopper_with_triton() -> bool:
    is_hopper = torch.cuda.get_device_capability() == _HOPPER
    return is_hopper and importlib.util.find_spec("triton") is not None


@torch.library.custom_op("small_heads::attention", mutates_args=())
def attention(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sums of `attention_triton.forward`."""
    import attention_triton  # on machines without a GPU there may be no triton

    return attention_triton.forward(*(x.contiguous() for x in (q_BTHK, k_BTGK, v_BTGK)))


@attention.register_fake
def _(q_BTHK: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    B, T, H = q_BTHK.shape[:3]
    lse_BHT = q_BTHK.new_empty((B, H, T), dtype=torch.float32)
    return torch.empty_like(q_BTHK, memory_format=torch.contiguous_format), lse_BHT


@torch.library.custom_op("small_heads::attention_backward", mutates_args=())
def attention_backward(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    lse_BHT: Tensor,
    grad_BTHK: Tensor,
    delta_BHT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention_triton.backward`."""
    import attention_triton

    tensors = (q_BTHK, k_BTGK, v_BTGK, lse_BHT, grad_BTHK, delta_BHT)
    return attention_triton.backward(*(x.contiguous() for x in tensors))


@attention_backward.register_fake
def _(q_BTHK: Tensor, k_BTGK: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    import attention_triton

    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    parts = attention_triton.num_parts(H, G)
    grad_k_BTGPK = k_BTGK.new_empty((B, T, G, parts, K), dtype=torch.float32)
    grad_q_BTHK = q_BTHK.new_empty((B, T, H, K), dtype=torch.float32)
    return grad_q_BTHK, grad_k_BTGPK, torch.empty_like(grad_k_BTGPK)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad_BTHK: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Sums and casts stand here, where the compiler fuses them with what comes before and after."""
    q_BTHK, k_BTGK, v_BTGK, out_BTHK, lse_BHT = ctx.saved_tensors
    delta_BHT = (grad_BTHK.float() * out_BTHK.float()).sum(-1).transpose(1, 2).contiguous()
    grad_q_BTHK, grad_k_BTGPK, grad_v_BTGPK = attention_backward(
        q_BTHK, k_BTGK, v_BTGK, lse_BHT, grad_BTHK, delta_BHT
    )
    scale = q_BTHK.shape[-1] ** -0.5
    return (
        (grad_q_BTHK * scale).to(q_BTHK.dtype),
        (grad_k_BTGPK.sum(3) * scale).to(k_BTGK.dtype),
        grad_v_BTGPK.sum(3).to(v_BTGK.dtype),
    )


attention.register_autograd(_backward, setup_context=_save)

# Ops whose outputs selective checkpointing keeps.
ATTENTION_OPS = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.small_heads.attention.default,
}
