# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportArgumentType=false
"""Causal attention for small heads as Triton kernels, forward and backward.

At head size 32 a score costs as many cycles for its exponential as for its matrix products, and the
kernels made for wide heads leave half of both unused. The method is that of FlashAttention (Dao
2023): blocks of scores that never leave the chip, an online softmax, probabilities made anew in the
backward. Here the backward is one pass over the scores: a program owns a block of keys, keeps the
gradients of keys and values in registers, and adds to that of the queries with atomics, so sums
have no fixed order. Tiles were chosen on an H200 (LOG.md).

Letters as in model.py; a score is kept in base 2, so ``scale`` is log2(e) / sqrt(K).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "forward", "num_parts"]

# Queries × keys of a tile, and loads in flight.
FORWARD: dict[str, Any] = {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 3}
BACKWARD: dict[str, Any] = {"BLOCK_M": 64, "BLOCK_N": 128, "STAGES": 3}
HEADS_PER_PROGRAM = 4  # query heads that share a block of keys in the backward
LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    out, total, highest, query, k_ptr, v_ptr, first, last, m, scale,
    G: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the keys ``first`` to ``last`` into the running output, sum and maximum of a block."""
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = tl.multiple_of(start, BLOCK_N) + tl.arange(0, BLOCK_N)
        place = n[:, None] * (G * K) + tl.arange(0, K)[None, :]
        score = tl.dot(query, tl.trans(tl.load(k_ptr + place)))
        if MASKED:
            score = tl.where(m[:, None] >= n[None, :], score, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(score, 1) * scale)
        weight = tl.math.exp2(score * scale - new_highest[:, None])
        shrink = tl.math.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weight, 1)
        value = tl.load(v_ptr + place)
        out = tl.dot(weight.to(value.dtype), value, out * shrink[:, None])
        highest = new_highest
    return out, total, highest


@triton.jit
def _attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; those with the most keys start first."""
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    place = (b.to(tl.int64) * T * H + h) * K + m[:, None] * (H * K) + tl.arange(0, K)[None, :]
    key_place = (b.to(tl.int64) * T * G + h // (H // G)) * K
    query = tl.load(q_ptr + place)
    out = tl.zeros((BLOCK_M, K), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    diagonal = block * BLOCK_M // BLOCK_N * BLOCK_N
    out, total, highest = _attend(
        out, total, highest, query, k_ptr + key_place, v_ptr + key_place, 0, diagonal, m, scale,
        G, K, BLOCK_N, STAGES, False,
    )  # fmt: skip
    out, total, highest = _attend(
        out, total, highest, query, k_ptr + key_place, v_ptr + key_place, diagonal,
        (block + 1) * BLOCK_M, m, scale, G, K, BLOCK_N, 1, True,
    )  # fmt: skip
    tl.store(out_ptr + place, (out / total[:, None]).to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + tl.program_id(0) * T + m, highest + tl.math.log2(total))


@triton.jit
def _differentiate(
    grad_k, grad_v, key, value, q_ptr, grad_ptr, grad_q_ptr, lse_ptr, delta_ptr, first, last, n,
    scale, H: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the queries ``first`` to ``last`` of one head give to the gradients."""
    for start in tl.range(first, last, BLOCK_M, num_stages=STAGES):
        m = tl.multiple_of(start, BLOCK_M) + tl.arange(0, BLOCK_M)
        place = m[:, None] * (H * K) + tl.arange(0, K)[None, :]
        query = tl.load(q_ptr + place)
        grad = tl.load(grad_ptr + place)
        lse = tl.load(lse_ptr + m)
        delta = tl.load(delta_ptr + m)
        weight_NM = tl.math.exp2(tl.dot(key, tl.trans(query)) * scale - lse[None, :])
        if MASKED:
            weight_NM = tl.where(m[None, :] >= n[:, None], weight_NM, 0.0)
        grad_weight_NM = tl.dot(value, tl.trans(grad))
        grad_v = tl.dot(weight_NM.to(grad.dtype), grad, grad_v)
        grad_score_NM = (weight_NM * (grad_weight_NM - delta[None, :])).to(query.dtype)
        grad_k = tl.dot(grad_score_NM, query, grad_k)
        grad_q = tl.dot(tl.trans(grad_score_NM), key)
        tl.atomic_add(grad_q_ptr + place, grad_q, sem="relaxed")
    return grad_k, grad_v


@triton.jit
def _attention_backward(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, grad_q_ptr, grad_k_ptr, grad_v_ptr, scale, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of keys and at most HEADS of the query heads that read it."""
    P: tl.constexpr = G * PARTS
    b, p = tl.program_id(0) // P, tl.program_id(0) % P
    g = p // PARTS
    first_head = g * (H // G) + p % PARTS * HEADS
    last_head = tl.minimum(first_head + HEADS, (g + 1) * (H // G))
    first = tl.program_id(1) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    row = b.to(tl.int64) * T
    place = (row * G + g) * K + n[:, None] * (G * K) + tl.arange(0, K)[None, :]
    key = tl.load(k_ptr + place)
    value = tl.load(v_ptr + place)
    grad_k = tl.zeros((BLOCK_N, K), tl.float32)
    grad_v = tl.zeros((BLOCK_N, K), tl.float32)
    for h in range(first_head, last_head):
        at = (row * H + h) * K
        stat = (b * H + h) * T
        grad_k, grad_v = _differentiate(
            grad_k, grad_v, key, value, q_ptr + at, grad_ptr + at, grad_q_ptr + at, lse_ptr + stat,
            delta_ptr + stat, first, first + BLOCK_N, n, scale, H, K, BLOCK_M, 1, True,
        )  # fmt: skip
        grad_k, grad_v = _differentiate(
            grad_k, grad_v, key, value, q_ptr + at, grad_ptr + at, grad_q_ptr + at, lse_ptr + stat,
            delta_ptr + stat, first + BLOCK_N, T, n, scale, H, K, BLOCK_M, STAGES, False,
        )  # fmt: skip
    place = (row * P + p) * K + n[:, None] * (P * K) + tl.arange(0, K)[None, :]
    tl.store(grad_k_ptr + place, grad_k)
    tl.store(grad_v_ptr + place, grad_v)


def num_parts(num_heads: int, num_kv_heads: int) -> int:
    """Parts P in which the gradient of one key-value head is left: one per program."""
    return -(-(num_heads // num_kv_heads) // HEADS_PER_PROGRAM)


def check_shapes(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> None:
    """Raise ValueError where blocks would be cut, or a head would read another sequence's keys."""
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    if T % BACKWARD["BLOCK_N"] or H % G or {k_BTGK.shape, v_BTGK.shape} != {(B, T, G, K)}:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_BTHK, k_BTGK, v_BTGK))
        raise ValueError(f"queries, keys and values of shapes {shapes} do not go together")


def forward(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, T, H, K) and, in base 2, the log of each query's sum of exponentials (B, H, T)."""
    check_shapes(q_BTHK, k_BTGK, v_BTGK)
    B, T, H, K = q_BTHK.shape
    out_BTHK = torch.empty_like(q_BTHK)
    lse_BHT = q_BTHK.new_empty((B, H, T), dtype=torch.float32)
    _attention_forward[(B * H, T // FORWARD["BLOCK_M"])](
        q_BTHK, k_BTGK, v_BTGK, out_BTHK, lse_BHT, LOG2_E * K**-0.5, T,
        H=H, G=k_BTGK.shape[2], K=K, **FORWARD, num_warps=4,
    )  # fmt: skip
    return out_BTHK, lse_BHT


def backward(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, lse_BHT: Tensor, grad_BTHK: Tensor,
    delta_BHT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients in fp32 of queries (B, T, H, K), and of keys and values in parts (B, T, G, P, K).

    ``delta`` is each query's sum of output · gradient. Those of queries and keys lack the factor
    1 / sqrt(K); the parts are to be added.
    """
    check_shapes(q_BTHK, k_BTGK, v_BTGK)
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    parts = num_parts(H, G)
    grad_q_BTHK = torch.zeros_like(q_BTHK, dtype=torch.float32)
    grad_k_BTGPK = q_BTHK.new_empty((B, T, G, parts, K), dtype=torch.float32)
    grad_v_BTGPK = torch.empty_like(grad_k_BTGPK)
    _attention_backward[(B * G * parts, T // BACKWARD["BLOCK_N"])](
        q_BTHK, k_BTGK, v_BTGK, grad_BTHK, lse_BHT, delta_BHT, grad_q_BTHK, grad_k_BTGPK,
        grad_v_BTGPK, LOG2_E * K**-0.5, T,
        H=H, G=G, K=K, PARTS=parts, HEADS=HEADS_PER_PROGRAM, **BACKWARD, num_warps=4,
    )  # fmt: skip
    return grad_q_BTHK, grad_k_BTGPK, grad_v_BTGPK
