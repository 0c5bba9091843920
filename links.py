"""What does the link between GPUs cost a step of FSDP, and what would it cost on more of them?"""

from collections.abc import Mapping
from typing import Any

from model_config import ScalingStrategy

# Name -> environment that makes NCCL take it, between two GPUs of one host.
TRANSPORTS: dict[str, dict[str, str]] = {
    "NVLink": {},
    "shared memory": {"NCCL_P2P_DISABLE": "1"},
    "sockets on loopback": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
SHAPES: tuple[tuple[ScalingStrategy, int], ...] = (
    ("all", 2), ("all", 6), ("all", 10), ("n_layers", 1),
)  # fmt: skip

MESSAGE_SHAPES: tuple[tuple[ScalingStrategy, int], ...] = (*SHAPES, ("all", 8))


def transport_of(record: Mapping[str, Any]) -> str:
    """The transport that the ranks of a ``Run:`` record used; "" where there was only one rank."""
    if record["world_size"] == 1:
        return ""
    switches = {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"}
    own = {k: v for k, v in record["nccl_environment"].items() if k in switches}
    return next(name for name, environment in TRANSPORTS.items() if environment == own)
