"""Training steps on a tiny model, run by one process and by the ranks of torchrun alike.

``torchrun --nproc-per-node N tests/parity_cases.py OUT CASE,CASE,…`` runs cases and saves, on rank
0, what the tests compare: full gradients, losses, gradient norms, full initial weights. Faults are
planted here and only here.
"""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed import Sharding, World, leave, shard, sharded_world
from model import ActivationCheckpointing, Transformer, TransformerConfig
from step import train_step
from weights import init_weights

CONFIG = TransformerConfig(
    dim=64, n_layers=3, n_heads=8, n_kv_heads=2, multiple_of=32, vocab_size=97
)
SEQUENCE_LENGTH = 24
GLOBAL_BATCH = 8
SEED = 7


@dataclass(frozen=True)
class Case:
    """One configuration that must (or, with a fault, must not) train like one process."""

    accumulation: int = 1
    replicas: int = 1
    reshard: bool = True
    cpu_offload: bool = False
    checkpointing: ActivationCheckpointing = "none"
    empty_rank: bool = False
    compile: bool = False
    dtype: torch.dtype = torch.float32
    exchange: bool = False
    fault: str = ""


CASES = {
    "plain": Case(),
    "accumulation": Case(accumulation=2),
    "replicas": Case(replicas=2),
    "no_reshard": Case(reshard=False),
    "cpu_offload": Case(cpu_offload=True),
    "checkpointing": Case(checkpointing="full"),
    "empty_rank": Case(empty_rank=True),
    "selective": Case(checkpointing="selective"),
    "compile": Case(compile=True),
    "compile_full": Case(compile=True, checkpointing="full"),
    "compile_selective": Case(compile=True, checkpointing="selective"),
    "reduced": Case(dtype=torch.bfloat16),
    "exchanged": Case(dtype=torch.bfloat16, exchange=True),
    "offloaded": Case(dtype=torch.bfloat16, exchange=True, cpu_offload=True),
    "reduced_accumulation": Case(dtype=torch.bfloat16, accumulation=2),
    "exchanged_accumulation": Case(dtype=torch.bfloat16, accumulation=2, exchange=True),
    "same_rows": Case(fault="same_rows"),
    "mean_of_means": Case(fault="mean_of_means"),
    "local_clipping": Case(fault="local_clipping"),
}


@dataclass(frozen=True)
class LocalClippingWorld(World):
    """A planted fault: every rank clips by the norm of its own shard."""

    def sum_over_shards(self, value: Tensor) -> Tensor:
        return value


class RecordingSGD(torch.optim.SGD):
    """Plain SGD that keeps the (full) gradients of its last step."""

    gradients: list[Tensor]

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.gradients = [full(p.grad).clone() for p in parameters]
        super().step(closure)


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on all ranks."""
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.size() == 1:
            return tensor.to_local()
        return tensor.full_tensor()
    return tensor


def global_batches(num_steps: int, case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, labels) of shape (G, T), ragged: row j is padded after its own length."""
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(num_steps):
        # Each row counts up from a number of its own: something that ten steps can learn.
        first = torch.randint(CONFIG.vocab_size, (GLOBAL_BATCH, 1), generator=generator)
        rows = (first + torch.arange(SEQUENCE_LENGTH + 1)) % CONFIG.vocab_size
        tokens, labels = rows[:, :-1].clone(), rows[:, 1:].clone()
        lengths = torch.randint(1, SEQUENCE_LENGTH, (GLOBAL_BATCH,), generator=generator)
        lengths[0], lengths[-1] = SEQUENCE_LENGTH, 2
        if case.empty_rank:
            lengths[GLOBAL_BATCH // 2 :] = 0
        labels[torch.arange(SEQUENCE_LENGTH) >= lengths[:, None]] = -100
        yield tokens, labels


def build(case: Case, world: World) -> Transformer:
    """The tiny model with its initial weights, sharded where the world has a mesh."""
    with torch.device("meta"):
        model = Transformer(
            CONFIG,
            sequence_length=SEQUENCE_LENGTH,
            compute_dtype=case.dtype,
            checkpointing=case.checkpointing,
        )
    model = model.to(case.dtype)
    if case.compile:
        model.compile_parts(backend="aot_eager")
    if world.mesh is not None:
        shard(model, world, Sharding(case.dtype, case.reshard, case.cpu_offload, case.exchange))
    model.to_empty(device=world.device)
    model.build_rope_tables(world.device)
    init_weights(model, seed=SEED, device=world.device, init_std=model.init_std)
    return model


def take_steps(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    case: Case,
    world: World,
    *,
    num_steps: int,
    max_norm: float,
) -> tuple[list[float], list[float]]:
    """Global losses and gradient norms of some steps."""
    losses, norms = [], []
    rows_per_rank = GLOBAL_BATCH // world.size
    for tokens, labels in global_batches(num_steps, case):
        rank = 0 if case.fault == "same_rows" else world.rank
        mine = slice(rank * rows_per_rank, (rank + 1) * rows_per_rank)
        size = rows_per_rank // case.accumulation
        num_local = int((labels[mine] != -100).sum())
        [num_tokens] = world.sum_host([num_local])
        if case.fault == "mean_of_means":
            num_tokens = num_local * world.size
        loss_sum, norm = train_step(
            model,
            optimizer,
            list(zip(tokens[mine].split(size), labels[mine].split(size), strict=True)),
            world=world,
            loss_scale=1 / num_tokens,
            max_norm=max_norm,
        )
        [loss] = world.sum_host([loss_sum.item() / num_tokens])
        losses.append(loss)
        norms.append(norm.item())
    return losses, norms


def run_case(name: str, world: World) -> dict[str, Any]:
    """Initial weights, gradients of one SGD step, traces of ten clipped AdamW steps."""
    case = CASES[name]
    if case.fault == "local_clipping":
        fields = {f.name: getattr(world, f.name) for f in dataclasses.fields(world)}
        world = LocalClippingWorld(**fields)
    model = build(case, world)
    initial = {key: full(value).clone() for key, value in model.named_parameters()}
    sgd = RecordingSGD(model.parameters(), lr=0.1)
    sgd_losses, sgd_norms = take_steps(model, sgd, case, world, num_steps=1, max_norm=float("inf"))
    gradients = dict(zip(initial, sgd.gradients, strict=True))
    model = build(case, world)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses, norms = take_steps(model, adamw, case, world, num_steps=10, max_norm=0.5)
    final = {key: full(value).clone() for key, value in model.named_parameters()}
    return {
        "initial": {k: v.detach() for k, v in initial.items()},
        "gradients": {k: v.detach() for k, v in gradients.items()},
        "sgd": (sgd_losses, sgd_norms),
        "losses": losses,
        "norms": norms,
        "final": {k: v.detach() for k, v in final.items()},
    }


def main() -> None:
    """Run cases on the ranks of torchrun; rank 0 saves the results."""
    out, names = Path(sys.argv[1]), sys.argv[2].split(",")
    torch.set_num_threads(1)
    with sharded_world(replicas=1) as world:
        results = {}
        for name in names:
            shape = (CASES[name].replicas, world.size // CASES[name].replicas)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            results[name] = run_case(name, dataclasses.replace(world, mesh=mesh))
        if world.rank == 0:
            torch.save(results, out)
    leave("completed")


if __name__ == "__main__":
    main()
