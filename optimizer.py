"""What does an update cost? One pass over each weight, its gradient and its two moments.

The update moves far more bytes than it computes: its time is bytes ÷ bandwidth. Compiled, clipping
and all of AdamW are one kernel per parameter, which comes nearer to that bound than the fused
kernel of torch.optim (LOG.md has both).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# The defaults of torch.optim.AdamW.
BETA_1, BETA_2, EPSILON, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 0.01


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's share of a sharded tensor (the tensor itself where it is not sharded)."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def adamw_update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    divisor: Tensor,
    shrink: Tensor,
    step_size: Tensor,
    root_scale: Tensor,
) -> None:
    """Update weights and moments in place, in fp32 whatever their dtype.

    Loshchilov and Hutter 2019, algorithm 2, on gradients ÷ ``divisor``, with the factors that do
    not differ between elements given as fp32 scalars: ``shrink`` = 1 − rate·decay, ``step_size`` =
    rate ÷ (1 − β₁ᵗ), ``root_scale`` = 1 ÷ √(1 − β₂ᵗ).
    """
    for weight, gradient, mean, square in zip(weights, gradients, means, squares, strict=True):
        g = gradient.float() / divisor
        m = mean.float().lerp(g, 1 - BETA_1)
        v = BETA_2 * square.float() + (1 - BETA_2) * g * g
        step = step_size * m / (v.sqrt() * root_scale + EPSILON)
        weight.copy_(shrink * weight.float() - step)
        mean.copy_(m)
        square.copy_(v)


def make_moments(optimizer: torch.optim.AdamW) -> None:
    """Make the state that AdamW would make at its first step, where it does not exist yet."""
    for group in optimizer.param_groups:
        on_device = group["fused"] or group["capturable"]
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device if on_device else "cpu")
                state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)


class CompiledAdamW(torch.optim.AdamW):
    """torch.optim.AdamW, with the same state, whose update is `adamw_update`, compiled.

    ``parts`` holds the parameters in the groups that are updated by one call: blocks share theirs.
    """

    def __init__(self, parts: Sequence[nn.Module], lr: float, backend: str = "inductor") -> None:
        self.parts = [list(part.parameters()) for part in parts]
        super().__init__(
            [parameter for part in self.parts for parameter in part],
            lr=lr,
            betas=(BETA_1, BETA_2),
            eps=EPSILON,
            weight_decay=WEIGHT_DECAY,
            capturable=True,
        )
        self._update: Callable[..., Any] = torch.compile(
            adamw_update, fullgraph=True, dynamic=False, backend=backend
        )
        self._local_parts: list[list[list[Tensor]]] = []
        self.register_load_state_dict_post_hook(lambda optimizer: self._local_parts.clear())

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor], divisor: Tensor) -> None:
        """One step with this rank's ``gradients`` (in the order of the parameters) ÷ ``divisor``.

        The step count, and the rate where it is a tensor, are read on the device.
        """
        if not self._local_parts:
            self._prepare()
        self._step_count.add_(1)
        count, rate = self._step_count.double(), self.param_groups[0]["lr"]
        shrink = (1 - count.new_ones(()) * rate * WEIGHT_DECAY).float()
        step_size = (rate / (1 - BETA_1**count)).float()
        root_scale = (1 - BETA_2**count).rsqrt().float()
        remaining = iter(gradients)
        for weights, means, squares in self._local_parts:
            mine = [next(remaining) for _ in weights]
            self._update(weights, mine, means, squares, divisor, shrink, step_size, root_scale)

    def _prepare(self) -> None:
        """Make the state that does not exist yet; look up this rank's share of all of it."""
        make_moments(self)
        parameters = [parameter for part in self.parts for parameter in part]
        # All parameters are always updated together: one count, which all their states share.
        self._step_count = self.state[parameters[0]]["step"]
        for parameter in parameters:
            self.state[parameter]["step"] = self._step_count
        for part in self.parts:
            states = [self.state[parameter] for parameter in part]
            means = [local_tensor(state["exp_avg"]) for state in states]
            squares = [local_tensor(state["exp_avg_sq"]) for state in states]
            self._local_parts.append([[local_tensor(p) for p in part], means, squares])
