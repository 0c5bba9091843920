"""How large is a model, and how much arithmetic does one of its tokens cost?

Everything here comes from the configuration alone. Counting ``model.parameters()`` instead goes
wrong as soon as a wrapper holds only its rank's shard: the MFU is then off by up to the world size.
"""

from dataclasses import dataclass
from typing import Literal, get_args

ScalingStrategy = Literal["all", "n_layers"]


# Tokens per chunk of the loss. Compiled, the fp32 values never leave registers, and a longer chunk
# means fewer passes over the weight's gradient; eagerly they stand in memory (512 MiB at 131,072
# words).
CHUNK_COMPILED = 4096
CHUNK_EAGER = 1024


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a Llama-style decoder (RMSNorm, rotary embedding, grouped heads, SwiGLU)."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    multiple_of: int
    vocab_size: int
    ffn_dim_multiplier: float = 1.3
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0

    def __post_init__(self) -> None:
        if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
            raise ValueError(f"dim {self.dim} must be an even multiple of n_heads {self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads together."""
        return self.n_kv_heads * self.head_size

    @property
    def ffn_hidden(self) -> int:
        """Hidden width of the SwiGLU: two thirds of 4·dim, times the multiplier, rounded up.

        Source: the reference implementation of Llama 3 (``FeedForward.__init__``).
        """
        hidden = int(self.ffn_dim_multiplier * int(2 * 4 * self.dim / 3))
        return self.multiple_of * -(-hidden // self.multiple_of)


def build_config(strategy: ScalingStrategy, factor: int, vocab_size: int) -> TransformerConfig:
    """Shape of the model at one scaling factor.

    ``all`` widens and deepens together (the head size stays 32); ``n_layers`` only deepens a
    4096-wide model. Raises ValueError for an unknown strategy, a factor or a vocabulary below 1.
    """
    if factor < 1:
        raise ValueError(f"--scaling-factor must be at least 1, not {factor}")
    if vocab_size < 1:
        raise ValueError(f"the vocabulary must hold at least one token, not {vocab_size}")
    if strategy == "all":
        return TransformerConfig(256 * factor, 8 * factor, 8 * factor, 8, 256, vocab_size)
    if strategy == "n_layers":
        return TransformerConfig(4096, 32 + 8 * (factor - 1), 32, 8, 1024, vocab_size)
    raise ValueError(
        f"--scaling-strategy must be one of {', '.join(get_args(ScalingStrategy))}, not {strategy}"
    )


def count_block_params(config: TransformerConfig) -> int:
    """Parameters of one block: query and output, key and value, three of SwiGLU, two norms."""
    dim = config.dim
    return 2 * dim * dim + 2 * dim * config.kv_dim + 3 * dim * config.ffn_hidden + 2 * dim


def count_params(config: TransformerConfig) -> int:
    """All parameters: input embedding, blocks, last norm, untied output projection."""
    ends = 2 * config.vocab_size * config.dim + config.dim
    return config.n_layers * count_block_params(config) + ends


def flops_per_token(config: TransformerConfig, sequence_length: int) -> int:
    """Floating-point operations of forward and backward for one token.

    6·(N − vocab·dim) + 12·n_layers·n_heads·head_size·T: two per multiply-add, the backward twice
    the forward; the input embedding is a look-up and does not count; attention counts in full (not
    only its causal half); recomputation does not count. Source: Chowdhery et al. 2022 (PaLM),
    appendix B; Kaplan et al. 2020, table 1.
    """
    matmul_params = count_params(config) - config.vocab_size * config.dim
    attention = 12 * config.n_layers * config.n_heads * config.head_size * sequence_length
    return 6 * matmul_params + attention
