"""The Llama-style decoder that every experiment trains. It knows nothing of distribution.

Shape letters: B batch, T sequence, D model width, H query heads, G key-value heads, K head size,
F feed-forward width, V vocabulary.
"""

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from attention import ATTENTION_OPS, attend
from loss import projection_loss
from model_config import (
    ScalingStrategy,
    TransformerConfig,
    build_config,
    count_params,
    flops_per_token,
)

__all__ = [
    "ActivationCheckpointing",
    "ScalingStrategy",
    "Transformer",
    "TransformerConfig",
    "build_config",
    "count_params",
    "flops_per_token",
]

ActivationCheckpointing = Literal["none", "selective", "full"]


def _keep_narrow_outputs(
    context: Any, op: Any, x: Any = None, weight: Any = None, *rest: Any, **named: Any
) -> CheckpointPolicy:
    """The rule of selective checkpointing: keep attention, and matmuls no wider than their input.

    Of a block's outputs only those of the gate and up projections are wider than the model; they
    are more than half of the bytes kept, and recomputing them costs two of the seven matmuls.
    """
    if op in ATTENTION_OPS:
        return CheckpointPolicy.MUST_SAVE
    if op == torch.ops.aten.mm.default and weight.shape[1] <= weight.shape[0]:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _context_of(mode: ActivationCheckpointing) -> dict[str, Any]:
    """Arguments of `checkpoint` that say what is kept."""
    if mode == "full":
        return {}
    return {"context_fn": partial(create_selective_checkpoint_contexts, _keep_narrow_outputs)}


class Linear(nn.Linear):
    """A projection without bias that casts its own weight to the dtype of its input.

    Under FSDP's mixed precision the weight already has that dtype and the cast does nothing, so
    wrapped and unwrapped models compute the same.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class Embedding(nn.Embedding):
    """A look-up that casts its own weight, as `Linear` does."""

    def forward(self, input: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(input, self.weight.to(dtype))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight.to(x_BTD.dtype), self.eps)


def rope_tables(
    config: TransformerConfig, sequence_length: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, K), fp32, of the rotary embedding (Su et al. 2021, eq. 34).

    Dimension i of a head turns together with dimension i + K/2.
    """
    half = config.head_size // 2
    exponent = torch.arange(half, device=device, dtype=torch.float32) / half
    inverse_frequency = config.rope_theta**-exponent
    position_T = torch.arange(sequence_length, device=device, dtype=torch.float32)
    angle_TK = torch.outer(position_T, inverse_frequency).repeat(1, 2)
    return angle_TK.cos(), angle_TK.sin()


def apply_rope(x_BTHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turn each head by its position, in fp32; same shape and dtype as the input."""
    x = x_BTHK.float()
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = x * cos_TK[:, None, :] + turned * sin_TK[:, None, :]
    return rotated.to(x_BTHK.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads (Ainslie et al. 2023)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.query = Linear(config.dim, config.dim)
        self.key = Linear(config.dim, config.kv_dim)
        self.value = Linear(config.dim, config.kv_dim)
        self.output = Linear(config.dim, config.dim)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_size)
        q_BTHK = apply_rope(self.query(x_BTD).view(heads), cos_TK, sin_TK)
        k_BTGK = apply_rope(self.key(x_BTD).view(heads), cos_TK, sin_TK)
        v_BTGK = self.value(x_BTD).view(heads)
        return self.output(attend(q_BTHK, k_BTGK, v_BTGK).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, eq. 6): down(silu(gate(x)) · up(x))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.ffn_hidden)
        self.up = Linear(config.dim, config.ffn_hidden)
        self.down = Linear(config.ffn_hidden, config.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: TransformerConfig, checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        self.checkpointing: ActivationCheckpointing = checkpointing
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self._layer(x_BTD, cos_TK, sin_TK)
        out = checkpoint(
            self._layer,
            x_BTD,
            cos_TK,
            sin_TK,
            use_reentrant=False,
            preserve_rng_state=False,  # no dropout: nothing random to replay
            **_context_of(self.checkpointing),
        )
        assert isinstance(out, Tensor)
        return out

    def _layer(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Head(nn.Module):
    """Last norm, output projection and, where labels are given, the loss."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.compiled = False
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = Linear(config.dim, config.vocab_size)

    def forward(self, x_BTD: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        x_BTD = self.norm(x_BTD)
        if labels_BT is None:
            return self.output(x_BTD)
        weight_VD = self.output.weight.to(x_BTD.dtype)
        return projection_loss(x_BTD, weight_VD, labels_BT, compiled=self.compiled)


class Transformer(nn.Module):
    """Token ids (B, T) to logits (B, T, V), or with labels (B, T) to the summed loss (fp32).

    The sum, not the mean: only the caller knows the training tokens of all ranks and micro-batches.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        sequence_length: int,
        compute_dtype: torch.dtype,
        checkpointing: ActivationCheckpointing = "none",
    ) -> None:
        super().__init__()
        self.config = config
        self.sequence_length = sequence_length
        self.compute_dtype = compute_dtype
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, checkpointing) for _ in range(config.n_layers))
        self.head = Head(config)
        self.cos_TK: Tensor
        self.sin_TK: Tensor
        for name in ("cos_TK", "sin_TK"):
            self.register_buffer(name, None, persistent=False)
        self.build_rope_tables(self.embedding.weight.device)

    def build_rope_tables(self, device: torch.device) -> None:
        """Compute the rotary tables in fp32 on a device (they are never loaded or cast)."""
        self.cos_TK, self.sin_TK = rope_tables(self.config, self.sequence_length, device)

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile each block (one graph for all, as they share their code) and the loss."""
        for block in self.blocks:
            block.compile(fullgraph=True, dynamic=False, backend=backend)
        self.head.compiled = backend == "inductor"

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        x_BTD = self.embedding(tokens_BT, self.compute_dtype)
        length = tokens_BT.shape[1]
        cos_TK, sin_TK = self.cos_TK[:length], self.sin_TK[:length]
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TK, sin_TK)
        return self.head(x_BTD, labels_BT)

    def init_std(self, name: str) -> float | None:
        """Standard deviation of one parameter's initial weights (mean 0); None: all ones.

        The embedding has 1 (``nn.Embedding``'s default), everything else 0.02, and the projections
        that write to the residual stream that over sqrt(2·n_layers) (Radford et al. 2019, section
        2.3). With a small embedding too, a step can move the residual stream by its own size:
        gradient norms begin near 100, and runs that differ in the order of their sums part.
        """
        if "norm" in name:
            return None
        if name.startswith("embedding"):
            return 1.0
        writes_to_residual = name.endswith(("attention.output.weight", "down.weight"))
        return 0.02 / (2 * self.config.n_layers) ** 0.5 if writes_to_residual else 0.02
