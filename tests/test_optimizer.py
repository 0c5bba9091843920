"""Does the compiled AdamW do what torch.optim.AdamW does?"""

import copy

import pytest
import torch
from torch import Tensor, nn

from distributed import World
from optimizer import CompiledAdamW
from step import clipped_update


def model_of(dtype: torch.dtype) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(24, 16) for _ in range(3)).to(dtype)


def gradients_of(model: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    scale = 10.0 ** (step % 5 - 3)
    return [
        scale * torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)
        for p in model.parameters()
    ]


@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_follows_torch_adamw_on_a_clipped_trace(dtype: torch.dtype, tensor_rate: bool) -> None:
    ours, theirs = model_of(dtype), model_of(dtype)
    compiled = CompiledAdamW(list(ours), lr=0.0, backend="aot_eager")
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.0, fused=True)
    for step in range(1, 41):
        rate = 1e-2 * min(1.0, step / 10)
        compiled.param_groups[0]["lr"] = torch.tensor(rate) if tensor_rate else rate
        plain.param_groups[0]["lr"] = rate
        divisor = torch.tensor(3.0 if step % 2 else 0.1)  # below 1 nothing is clipped
        gradients = gradients_of(ours, step)
        clipped_update(compiled, gradients, divisor)
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        clipped_update(plain, [p.grad for p in theirs.parameters()], divisor)  # type: ignore
        if step == 20:  # a saved state goes on, in either
            compiled.load_state_dict(copy.deepcopy(plain.state_dict()))
            for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
                mine.data.copy_(their.data)
    start = model_of(dtype)
    for mine, their, first in zip(
        ours.parameters(), theirs.parameters(), start.parameters(), strict=True
    ):
        moved = (their - first).float().norm()
        assert moved > 0.05 * first.float().norm()
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert (mine - their).float().norm() <= tolerance * moved
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        expected = plain.state[their]
        assert compiled.state[mine].keys() == expected.keys()
        assert compiled.state[mine]["step"] == expected["step"] == 40


def test_the_norm_of_a_large_gradient_is_exact() -> None:
    gradient = torch.full((2**25,), 1e-3).bfloat16()  # all of one size: the worst case
    exact = 2**12.5 * gradient[0].item()
    for gradients in ([gradient], [gradient.view(2**10, -1)[:, :-1], gradient[: 2**10]]):
        found = World(torch.device("cpu")).grad_norm(gradients)
        assert found.item() == pytest.approx(exact, rel=1e-5)
