"""What does communication cost a step of FSDP: as a model, for two GPUs that can be measured.

And for hundreds that cannot. A collective of S bytes over n ranks takes a latency and (n-1)/n·S ÷
bandwidth (a ring: Thakur, Rabenseifner and Gropp 2005, section 4); fitted at two ranks. A step
follows the schedule of FSDP2 (Zhao et al. 2023, sections 3.3 and 4.3; torch's
_fsdp_param_group.py): see `step_s`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from model_config import ScalingStrategy, TransformerConfig, count_block_params

# Of benchmarks/bench_links.py; since 2 it has an all-to-all.
METHOD_VERSION = 2
# Name -> environment that makes NCCL take it, between two GPUs of one host.
TRANSPORTS: dict[str, dict[str, str]] = {
    "NVLink": {},
    "shared memory": {"NCCL_P2P_DISABLE": "1"},
    "sockets on loopback": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
Shape = tuple[ScalingStrategy, int]
SHAPES: tuple[Shape, ...] = (("all", 2), ("all", 6), ("all", 10), ("n_layers", 1))
MESSAGE_SHAPES: tuple[Shape, ...] = (*SHAPES, ("all", 8))
# Parameters are gathered in bf16. Gradients are exchanged in bf16 within a node, and reduced in
# fp32 where there are several, or replicas (memory.exchanges_gradients).
GATHERED_BYTES, EXCHANGED_BYTES, REDUCED_BYTES = 2, 2, 4
# A bf16 step of AdamW: the norm reads the gradient; the update reads it, the parameter and two
# moments, and writes three of them. The memory's rate is that of an H200's datasheet.
UPDATE_BYTES, MEMORY_BYTES_PER_S = 16, 4.8e12
# What each further rank of a ring adds, in a node and between nodes: NCCL's own estimate for its
# Simple protocol (hwLatencies in its src/graph/tuning.cc).
HOP_S, NODE_HOP_S = 3.4e-6, 14e-6


@dataclass(frozen=True)
class Line:
    """Seconds of a collective: a latency, and a time for each byte of the whole tensor."""

    latency_s: float
    s_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """Time of one collective of so many bytes, all ranks' parts together."""
        return self.latency_s + num_bytes * self.s_per_byte

    def of_numbers(self, width: int) -> "Line":
        """The same for each number, of ``width`` bytes, in the place of each byte."""
        return Line(self.latency_s, self.s_per_byte * width)

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth of a line that was fitted at two ranks, (n-1)/n of its bytes a second."""
        return (1 - 1 / 2) / self.s_per_byte


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP gathers and reduces at once, and their FLOPs for one token."""

    num_params: int
    flops: float


def check_measured(record: Mapping[str, Any]) -> None:
    """Raise ValueError for a ``Run:`` record that is not of two GPUs, or is of a small series."""
    if record.get("method", METHOD_VERSION) != METHOD_VERSION:
        raise ValueError(f"it is of method {record['method']}, not {METHOD_VERSION}: move it away")
    where, tiny = f"{record['world_size']} {record['device_type']} ranks", record.get("tiny")
    if tiny or where != "2 cuda ranks":
        raise ValueError(f"it ran on {where}{' with --tiny' * bool(tiny)}, not on two GPUs")


def transport_of(record: Mapping[str, Any]) -> str:
    """The transport of a ``Run:`` record; "" where the other rank did not exist.

    Raises ValueError where NCCL was asked for none of them.
    """
    if record["script"] == "simulated_train.py":
        return ""
    switches = {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"}
    own = {k: v for k, v in record["nccl_environment"].items() if k in switches}
    if own not in TRANSPORTS.values():
        raise ValueError(f"no transport is asked for by {own}")
    return next(name for name, environment in TRANSPORTS.items() if environment == own)


def fit_line(links: Iterable[Mapping[str, Any]]) -> Line:
    """The line through ``Link:`` records of one collective that errs least, in relative terms.

    Weighted least squares, the weights 1 ÷ seconds²; a latency below 0 is taken for 0. Raises
    ValueError where there is no line, or where it does not rise.
    """
    points = [(link["bytes"], link["median_s"], link["median_s"] ** -2) for link in links]
    if len({x for x, _, _ in points}) < 2:
        raise ValueError("a line needs messages of two sizes")
    total = sum(w for _, _, w in points)
    mean_x = sum(w * x for x, _, w in points) / total
    mean_t = sum(w * t for _, t, w in points) / total
    slope = sum(w * (x - mean_x) * t for x, t, w in points)
    if slope <= 0:
        raise ValueError("a collective's seconds do not grow with its bytes")
    slope /= sum(w * (x - mean_x) ** 2 for x, _, w in points)
    return Line(max(0.0, mean_t - slope * mean_x), slope)


def groups_of(config: TransformerConfig, sequence_length: int) -> list[Group]:
    """The groups that `distributed.shard` makes, in order; FLOPs as in `flops_per_token`."""
    ends, block = config.vocab_size * config.dim, count_block_params(config)
    attention = 12 * config.n_heads * config.head_size * sequence_length
    head = ends + config.dim
    blocks = [Group(block, 6 * block + attention)] * config.n_layers
    return [Group(ends, 0), *blocks, Group(head, 6 * head)]


def update_s(groups: Iterable[Group], shards: int) -> float:
    """Seconds of the optimizer, which the memory's rate bounds."""
    return UPDATE_BYTES * sum(g.num_params for g in groups) / shards / MEMORY_BYTES_PER_S


class _Track:
    """What a link or the multiprocessors do: one thing at a time, in the order it is asked for."""

    def __init__(self) -> None:
        self.free, self.busy = 0.0, list[tuple[float, float]]()

    def add(self, ready_s: float, seconds: float) -> float:
        """Take so long, from when all is ready and what came before is done; return the end."""
        begin = max(ready_s, self.free)
        self.free = begin + seconds
        self.busy.append((begin, self.free))
        return self.free

    def seconds_beside(self, other: "_Track") -> float:
        """Of the seconds in which this one is busy, those in which the other one is too."""
        shared = (min(x[1], y[1]) - max(x[0], y[0]) for x, y in product(self.busy, other.busy))
        return sum(seconds for seconds in shared if seconds > 0)


def step_s(
    groups: list[Group], compute_s: float, *, gather: Line, scatter: Line,
    all_reduce: Line | None = None, slowdown: float = 0.0,
) -> float:  # fmt: skip
    """Seconds of forward and backward that take ``compute_s`` where nothing travels.

    The lines are those of numbers, not of bytes (`Line.of_numbers`).

    Each group computes for its share of the FLOPs, a third of it forward. An all-gather begins when
    the computation of the group before it does, forward and backward; the embedding's comes before
    all else, and the head, which comes last, stays gathered. A reduce-scatter begins after its
    group's backward. The two share a communicator: one runs after the other, as they are issued. An
    all-reduce over replicas follows its reduce-scatter, on a link of its own. What outlasts the
    computation is exposed. What runs beside it runs on the same multiprocessors and memory, and
    each of these seconds, of each of the two links, costs ``slowdown`` more (Rashidi et al. 2021,
    Enabling Compute-Communication Overlap in Distributed Deep Learning Training Platforms).
    """
    flops = sum(group.flops for group in groups)
    forward_s = [compute_s / 3 * group.flops / flops for group in groups]
    gather_s = [gather.seconds(group.num_params) for group in groups]
    compute, link, replicas = _Track(), _Track(), _Track()
    gathered = link.add(0.0, gather_s[0])
    for seconds, next_s in zip(forward_s, [*gather_s[1:], 0.0], strict=True):
        begin = max(gathered, compute.free)
        gathered = link.add(begin, next_s)
        compute.add(begin, seconds)
    for i in reversed(range(len(groups))):
        begin = max(gathered, compute.free)
        if i > 0:
            gathered = link.add(begin, gather_s[i - 1])
        compute.add(begin, 2 * forward_s[i])
        reduced = link.add(compute.free, scatter.seconds(groups[i].num_params))
        if all_reduce is not None:
            replicas.add(reduced, all_reduce.seconds(groups[i].num_params))
    beside_s = link.seconds_beside(compute) + replicas.seconds_beside(compute)
    return max(link.free, replicas.free) + slowdown * beside_s


def ring(measured: Line, *, gpus: int, nodes: int, link_bytes_per_s: float) -> Line:
    """A collective over more GPUs, from the line of two in a node; an exchange in one node only.

    Each byte enters a node once, through the links of all its GPUs: they bound the bandwidth where
    NVLink does not. Latency grows with the hops of the ring, of which nodes - 1 leave a node.
    Raises ValueError for fewer than two GPUs, or links that carry nothing.
    """
    if gpus < 2 or link_bytes_per_s <= 0:
        raise ValueError(f"a ring has two GPUs and a bandwidth, not {gpus}, {link_bytes_per_s}")
    bus_bytes_per_s = measured.bus_bytes_per_s
    if nodes > 1:
        bus_bytes_per_s = min(bus_bytes_per_s, gpus // nodes * link_bytes_per_s)
    hops_s = (gpus - 1 - nodes) * HOP_S + (nodes - 1) * NODE_HOP_S  # the first hop was measured
    return Line(measured.latency_s + hops_s, (1 - 1 / gpus) / bus_bytes_per_s)


def projected_step_s(
    groups: list[Group], compute_s: float, lines: tuple[Line, Line, Line], *, gpus: int,
    gpus_per_node: int, link_bytes_per_s: float, replicate: bool, slowdown: float = 0.0,
) -> float:  # fmt: skip
    """Seconds of a step on many GPUs: FSDP over all, or in each node with replicas across nodes.

    ``lines``: all-gather, exchange and reduce-scatter of two GPUs in a node, of bytes. Replicas
    all-reduce the shards of each GPU of a node over its own link, in a ring of nodes: twice (M-1)/M
    of their bytes.
    Raises ValueError where a node would be left half full: of another ring, and another shard.
    """
    nodes, rest = divmod(gpus, gpus_per_node) if gpus > gpus_per_node else (1, 0)
    if rest:
        raise ValueError(f"{gpus} GPUs do not fill nodes of {gpus_per_node}")
    shards = gpus // nodes if replicate else gpus
    ring_nodes = 1 if replicate else nodes
    across = {"gpus": shards, "nodes": ring_nodes, "link_bytes_per_s": link_bytes_per_s}
    gather, exchange, scatter = (ring(line, **across) for line in lines)
    all_reduce, scatter = None, scatter.of_numbers(REDUCED_BYTES)
    if nodes == 1:
        scatter = exchange.of_numbers(EXCHANGED_BYTES)
    elif replicate:
        latency_s = lines[2].latency_s + 2 * (nodes - 1) * NODE_HOP_S
        all_reduce = Line(latency_s, 2 * (1 - 1 / nodes) / shards / link_bytes_per_s)
        all_reduce = all_reduce.of_numbers(REDUCED_BYTES)
    gather = gather.of_numbers(GATHERED_BYTES)
    step = step_s(groups, compute_s, gather=gather, scatter=scatter, all_reduce=all_reduce,
                  slowdown=slowdown)  # fmt: skip
    return step + update_s(groups, shards)
