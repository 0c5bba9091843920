"""Output and gradients of attention by our kernels and by the formula, as relative differences.

    TRITON_INTERPRET=1 python tests/attention_cases.py  # on a CPU; the interpreter has fp32 alone

A process of its own: Triton decides when it is first imported whether its kernels are interpreted.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import attention

# Batch, tokens, heads, key-value heads, size of the scores: heads that the programs of the backward
# share evenly, unevenly and not at all, and scores of which an exponential would overflow.
CASES = ((2, 256, 8, 2, 1), (1, 128, 11, 1, 1), (1, 384, 3, 3, 1), (1, 128, 2, 1, 40))


def differences(
    shape: tuple[int, int, int, int, int], *, device: str, dtype: torch.dtype, compiled: bool
) -> list[float]:
    """‖ours − exact‖ ÷ ‖exact‖ of the output and the gradients of queries, keys and values."""
    B, T, H, G, size = shape
    torch.manual_seed(0)
    inputs = [torch.randn(B, T, n, 32, device=device, dtype=dtype) for n in (H, G, G)]
    inputs = [x * size**0.5 if i < 2 else x for i, x in enumerate(inputs)]
    grad_BTHK = torch.randn(B, T, H, 32, device=device, dtype=dtype)

    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for x in exact)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    wanted = [out, *torch.autograd.grad(out, exact, grad_BTHK.double())]

    ours = [x.detach().requires_grad_() for x in inputs]
    attend = torch.compile(attention.attend, fullgraph=True) if compiled else attention.attend
    out = attend(*ours)
    found = [out, *torch.autograd.grad(out, ours, grad_BTHK)]
    return [_relative(mine, right) for mine, right in zip(found, wanted, strict=True)]


def _relative(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    attention.suits_small_heads = lambda q_BTHK: True
    for case in CASES:
        for compiled in (False, True):
            found = differences(case, device="cpu", dtype=torch.float32, compiled=compiled)
            print(json.dumps([*case, compiled, found]))
