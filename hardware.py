"""What is the peak of this GPU, when does it wait for the CPU, and what do its neighbours change?

The dense bf16 peak is keyed by the exact name that the driver reports: a guess from part of a name
makes every MFU wrong.
"""

# Below this much arithmetic a micro-batch ends before the CPU has launched its kernels: about half
# of it took as long to launch as to compute on an H200, all of it under FSDP, with its hooks.
LAUNCH_BOUND_FLOPS = 1.5e14

GPUS_PER_NODE = 8  # where no launcher says how many

# Dense (no sparsity) bf16 tensor-core peak in TFLOP/s, from the vendor's datasheets.
PEAK_BF16_TFLOPS: dict[str, float] = {
    "NVIDIA H100 80GB HBM3": 989.0,  # SXM
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.0,  # SXM
    "NVIDIA H200 NVL": 836.0,
    "NVIDIA GH200 120GB": 989.0,
    "NVIDIA GH200 480GB": 989.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA B200": 2250.0,
}


def is_graphed_by_default(
    microbatch_flops: float, *, fsdp: bool, compiled: bool, replicas: int, cpu_offload: bool
) -> bool:
    """Whether a step on a GPU is one CUDA graph where nobody asks for it, or against it.

    Under FSDP only what was run so: compiled blocks, one replica, nothing offloaded.
    """
    was_run = not fsdp or (compiled and replicas == 1 and not cpu_offload)
    return was_run and microbatch_flops < LAUNCH_BOUND_FLOPS


def exchanges_gradients(
    shards: int, *, replicas: int, nodes: int, num_bytes: tuple[int, int]
) -> bool:
    """Whether FSDP exchanges gradients as they are and adds them in fp32 (distributed.shard).

    That sends half of what a reduction in fp32 would, and rounds where it does: once, to the dtype
    of the parameters, whose ``num_bytes`` (and those of the computation) must be two. Not between
    nodes, where it would send more, nor where replicas add up further.
    """
    return num_bytes == (2, 2) and shards > 1 and replicas == nodes == 1


def nodes_of(gpus: int) -> int:
    """Nodes that so many GPUs fill, where no launcher tells."""
    return -(-gpus // GPUS_PER_NODE)


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak in TFLOP/s, or None for a device that the table does not name."""
    return PEAK_BF16_TFLOPS.get(device_name)
