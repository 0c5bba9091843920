"""What does the output projection cost, and how is its loss computed without logits in fp32?

131,072 logits for each token are the largest tensor of a step. Here they stand a chunk of tokens at
a time, in the compute dtype, and their gradient is taken at once: the loss is a sum, so its
gradient is known up to one scalar, which the backward multiplies in.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from model_config import CHUNK_COMPILED, CHUNK_EAGER

IGNORED_LABEL = -100

LossAndGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def softmax_loss(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy (fp32 scalar) and its gradient (N, V) in the dtype of the logits.

    The gradient is softmax − one-hot, zero in rows whose label is −100 (Bridle 1990).
    """
    logits = logits_NV.float()
    counted_N1 = (labels_N != IGNORED_LABEL)[:, None]
    label_N1 = labels_N.clamp(min=0)[:, None]
    lse_N1 = logits.logsumexp(dim=-1, keepdim=True)
    loss = ((lse_N1 - logits.gather(1, label_N1)) * counted_N1).sum()
    word_V = torch.arange(logits.shape[1], device=logits.device)
    gradient = (logits - lse_N1).exp() - (word_V == label_N1).to(logits.dtype)
    return loss, (gradient * counted_N1).to(logits_NV.dtype)


class _ProjectionLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        chunk: int,
        loss_of: LossAndGradient,
    ) -> Tensor:
        total = torch.zeros((), device=x_ND.device)
        grad_x_ND = torch.empty_like(x_ND)
        grad_weight: Tensor | None = None
        for x, labels, grad_x in zip(
            x_ND.split(chunk), labels_N.split(chunk), grad_x_ND.split(chunk), strict=True
        ):
            loss, grad_logits = loss_of(x @ weight_VD.t(), labels)
            total += loss
            torch.mm(grad_logits, weight_VD, out=grad_x)
            share = grad_logits.t() @ x
            if len(x) == len(x_ND):
                grad_weight = share
            else:  # several chunks are summed in fp32, as one long product would be
                grad_weight = share.float() if grad_weight is None else grad_weight.add_(share)
        ctx.save_for_backward(grad_x_ND, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        ctx.scaled = _scaled if loss_of is softmax_loss else _compiled(_scaled)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_x_ND, grad_weight = ctx.saved_tensors
        [scale] = grads
        grad_weight = ctx.scaled(grad_weight, scale, ctx.weight_dtype)
        return grad_x_ND.mul_(scale), grad_weight, None, None, None


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (gradient * scale).to(dtype)


def projection_loss(
    x_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, *, compiled: bool = False
) -> Tensor:
    """Cross-entropy of x·weightᵀ, summed over the labels that are not −100 (fp32 scalar).

    Equal to ``F.cross_entropy((x @ weight.T).float(), labels, reduction="sum")``; peak memory is
    one chunk of logits and their gradient, and once the gradients of both inputs.
    """
    loss_of = _compiled(softmax_loss) if compiled else softmax_loss
    chunk = CHUNK_COMPILED if compiled else CHUNK_EAGER
    loss = _ProjectionLoss.apply(
        x_BTD.flatten(0, 1), weight_VD, labels_BT.flatten(), chunk, loss_of
    )
    assert isinstance(loss, Tensor)
    return loss


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled once for the whole process: it has one shape per run."""
    return torch.compile(function, fullgraph=True, dynamic=False)
