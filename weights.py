"""Which weights does training start from, and how far did they go?

Both answers work on one rank's rows of a parameter at a time. Each run of rows has a generator of
its own, seeded from (seed, parameter name, run), so the full weights are the same bits for every
world size, and no rank ever holds the whole model.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Rows are drawn in runs of about this many numbers: 16 MiB in fp32, and few kernel launches.
RUN_NUMEL = 2**22
NUM_PROJECTIONS = 4


def local_shard(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a parameter, as a view, and the number of the first of them.

    FSDP2 shards dimension 0 as ``torch.chunk`` does: equal runs, the last ones shorter or empty.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    first_row = 0
    for mesh_dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            rows = parameter.shape[0]
            rows_per_rank = -(-rows // parameter.device_mesh.size(mesh_dim))
            first_row = min(rows_per_rank * parameter.device_mesh.get_local_rank(mesh_dim), rows)
    local = parameter.to_local()
    return local.detach(), first_row


def _generator(device: torch.device, *key: object) -> torch.Generator:
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _runs(shard: Tensor, first_row: int, num_rows: int) -> Iterator[tuple[int, slice, slice, int]]:
    """(run, rows of the run that are ours, the same rows of the shard, rows in the run)."""
    rows_per_run = max(1, RUN_NUMEL // math.prod(shard.shape[1:]))
    last_row = first_row + shard.shape[0]
    if last_row == first_row:  # fewer rows than ranks
        return
    for run in range(first_row // rows_per_run, -(-last_row // rows_per_run)):
        start, stop = run * rows_per_run, min((run + 1) * rows_per_run, num_rows)
        low, high = max(start, first_row), min(stop, last_row)
        yield (
            run,
            slice(low - start, high - start),
            slice(low - first_row, high - first_row),
            stop - start,
        )


def _normal(shard: Tensor, num_rows: int, device: torch.device, *key: object) -> Tensor:
    """The (num_rows, …) standard normal numbers that belong to a key, in fp32."""
    shape = (num_rows, *shard.shape[1:])
    return torch.empty(shape, device=device).normal_(generator=_generator(device, *key))


@torch.no_grad()
def init_weights(
    model: nn.Module, *, seed: int, device: torch.device, init_std: Callable[[str], float | None]
) -> None:
    """Fill every parameter (plain, or this rank's shard) with its initial weights.

    ``init_std`` gives a parameter's standard deviation by name, None for ones. Drawn on ``device``
    in fp32, then cast: weights that are kept on the host start from the same numbers.
    """
    for name, parameter in model.named_parameters():
        std = init_std(name)
        shard, first_row = local_shard(parameter)
        if std is None:
            shard.fill_(1.0)
            continue
        for run, ours, place, num_rows in _runs(shard, first_row, parameter.shape[0]):
            shard[place].copy_(_normal(shard, num_rows, device, seed, name, run)[ours].mul_(std))


@torch.no_grad()
def digest_weights(
    model: nn.Module,
    *,
    seed: int,
    device: torch.device,
    init_std: Callable[[str], float | None],
    sum_over_shards: Callable[[Tensor], Tensor],
) -> dict[str, Any]:
    """What training changed: per parameter, random projections and norm of (final − initial).

    The initial weights are drawn anew from the seed. Projections on the same standard normal
    vectors in every run: two runs with equal weights have equal projections, and the difference of
    two projections has the standard deviation ‖difference of the weights‖ (Johnson and
    Lindenstrauss 1984). Sums are in fp64. Also the share of all weights that moved at all.
    """
    names, totals = [], []
    for name, parameter in model.named_parameters():
        std = init_std(name)
        shard, first_row = local_shard(parameter)
        total = torch.zeros(NUM_PROJECTIONS + 2, dtype=torch.float64, device=device)
        for run, ours, place, num_rows in _runs(shard, first_row, parameter.shape[0]):
            initial = torch.ones((), device=device)
            if std is not None:
                initial = _normal(shard, num_rows, device, seed, name, run)[ours].mul_(std)
            change = shard[place].to(device).float() - initial.to(shard.dtype).float()
            for k in range(NUM_PROJECTIONS):
                vector = _normal(shard, num_rows, device, "projection", k, name, run)[ours]
                total[k] += (vector * change).sum(dtype=torch.float64)
            total[-2] += change.square().sum(dtype=torch.float64)
            total[-1] += change.count_nonzero()
        names.append((name, parameter.numel()))
        totals.append(total)
    rows = sum_over_shards(torch.stack(totals)).tolist()
    num_weights = sum(numel for _, numel in names)
    return {
        "seed": seed,
        "num_projections": NUM_PROJECTIONS,
        "moved_share": sum(row[-1] for row in rows) / num_weights,
        "parameters": {
            name: {
                "projections": [float(f"{value:.9g}") for value in row[:NUM_PROJECTIONS]],
                "norm": float(f"{row[-2] ** 0.5:.9g}"),
                "numel": numel,
            }
            for (name, numel), row in zip(names, rows, strict=True)
        },
    }
