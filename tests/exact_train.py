"""A training script whose runs can be held against each other bit by bit. Run by tests.

    python tests/exact_train.py UPDATE train_fsdp.py --flags

UPDATE: ``adamw``; ``sgd``, which rounds alike on a CPU and on a GPU where the rate is a power of
two; or ``noise``, AdamW after which one weight in NOISE_ONE_IN has its last bit turned over, others
with each NOISE_SEED. Ranks that share one GPU, which NCCL refuses, exchange through the host.
"""

import inspect
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import step  # noqa: E402
from optimizer import CompiledAdamW, local_tensor  # noqa: E402

NOISE_ONE_IN = 100_000
RANKS_SHARE_A_GPU = 0 < torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
original_init = dist.init_process_group
original_build = step.build_optimizer
original_update = step.clipped_update
noise: torch.Generator | None = None


def init_gloo(*, backend: str, device_id: torch.device | None, **named: Any) -> None:
    """A process group whose collectives know the host alone."""
    original_init(backend="gloo", **named)


def through_host(collective: Callable[..., Any]) -> Callable[..., None]:
    """The collective on copies of its tensors on the host, which are copied back."""
    signature = inspect.signature(collective)

    def call(*arguments: Any, **named: Any) -> None:
        given: dict[str, Any] = signature.bind(*arguments, **named).arguments
        given["async_op"] = False
        on_host = {name: each.cpu() for name, each in given.items() if isinstance(each, Tensor)}
        collective(**given | on_host)
        for name, tensor in on_host.items():
            given[name].copy_(tensor)

    return call


def build_sgd(model: Any, config: Any) -> torch.optim.Optimizer:
    """No state, and a product that needs no rounding."""
    return torch.optim.SGD(model.parameters(), lr=config.learning_rate)


def noisy_update(optimizer: Any, gradients: Sequence[Tensor], divisor: Tensor) -> None:
    """The update, and then other roundings of a few weights."""
    global noise
    original_update(optimizer, gradients, divisor)
    assert isinstance(optimizer, CompiledAdamW)
    for parameter in (parameter for part in optimizer.parts for parameter in part):
        bits = local_tensor(parameter).detach().view(torch.int16).view(-1)
        if noise is None:
            noise = torch.Generator(bits.device).manual_seed(int(os.environ["NOISE_SEED"]))
        chosen = torch.randint(
            len(bits), (len(bits) // NOISE_ONE_IN,), generator=noise, device=bits.device
        )
        bits[chosen] ^= 1


if RANKS_SHARE_A_GPU:
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group = init_gloo
    for name in (
        "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
        "reduce_scatter_single", "all_to_all_single", "all_reduce",
    ):  # fmt: skip
        if hasattr(dist, name):
            setattr(dist, name, through_host(getattr(dist, name)))
update, script = sys.argv[1:3]
sys.argv = [str(ROOT / script), *sys.argv[3:]]
if update == "sgd":
    step.build_optimizer = build_sgd
if update == "noise":
    step.clipped_update = noisy_update
runpy.run_path(sys.argv[0], run_name="__main__")
