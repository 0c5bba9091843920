"""One training step: forward, backward, clipping, update, op by op or as one CUDA graph."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from distributed import World
from model import Transformer
from optimizer import CompiledAdamW, local_tensor
from train_config import Inputs, TrainConfig, is_graphed

# Steps before a capture: kernels get compiled and tuned, the optimizer makes its state.
STEPS_BEFORE_CAPTURE = 3

SetPhase = Callable[[str], None]


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rate of one step (from 1): a linear warm-up whose last step has the full rate."""
    return config.learning_rate * min(1.0, step / max(1, config.lr_warmup_steps))


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[tuple[Tensor, Tensor]],
    *,
    world: World,
    loss_scale: float | Tensor,
    max_norm: float,
    set_phase: SetPhase = lambda phase: None,
) -> tuple[Tensor, Tensor]:
    """Forward, backward, clipping and update of one step.

    ``microbatches`` holds this rank's (tokens, labels), each (B, T). ``loss_scale`` is 1 ÷ training
    tokens of all ranks and micro-batches: gradients are summed over ranks, so the summed losses
    times it give the exact gradient, however unevenly the training tokens lie.
    Returns this rank's summed loss and the norm of the whole gradient before clipping, as scalars
    on the device: reading them would make the CPU wait for the GPU.
    """
    local_loss_sum = torch.zeros((), device=world.device)
    for tokens_BT, labels_BT in microbatches:
        set_phase("forward")
        loss_sum = model(tokens_BT, labels_BT)
        set_phase("backward")
        (loss_sum * loss_scale).backward()
        local_loss_sum += loss_sum.detach()
    set_phase("optimizer")
    gradients = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    grad_norm = world.grad_norm(gradients)
    clipped_update(optimizer, gradients, (grad_norm + 1e-6) / max_norm)
    optimizer.zero_grad(set_to_none=True)
    return local_loss_sum, grad_norm


def clipped_update(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], divisor: Tensor
) -> None:
    """Divide the gradients by ``divisor`` where it exceeds 1, and take the optimizer's step.

    Fused optimizers divide by their attribute ``grad_scale`` as they read a gradient (it is how
    torch.amp.GradScaler reaches them): clipping then costs no pass of its own over the gradients,
    and happens in fp32.
    """
    divisor = divisor.clamp(min=1.0).to(gradients[0].device)
    if isinstance(optimizer, CompiledAdamW):
        optimizer.update(gradients, divisor)
        return
    if optimizer.defaults.get("fused"):
        optimizer.grad_scale = divisor  # pyright: ignore[reportAttributeAccessIssue]
    else:
        torch._foreach_div_(list(gradients), divisor)
    optimizer.step()


class Step(Protocol):
    """Takes this rank's rows (R, T) on the host; returns what `train_step` returns."""

    optimizer: torch.optim.AdamW

    def __call__(
        self, tokens_RT: Tensor, labels_RT: Tensor, *, loss_scale: float, rate: float
    ) -> tuple[Tensor, Tensor]: ...


def build_step(
    model: Transformer, config: TrainConfig, inputs: Inputs, world: World, set_phase: SetPhase
) -> Step:
    """The step that suits the device and the flags: one CUDA graph, or launched op by op.

    Under FSDP the collectives are part of the graph.
    """
    kind = GraphedStep if is_graphed(config, inputs, world.device.type) else EagerStep
    return kind(model, config, world, set_phase)


def build_optimizer(model: Transformer, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with PyTorch's defaults (Loshchilov and Hutter 2019); compiled where the blocks are.

    Under CPU offload the update runs on the host, where compiling it gains nothing.
    """
    rate, on_gpu = config.learning_rate, next(model.parameters()).is_cuda
    if config.compile and config.fused_optimizer and on_gpu:
        return CompiledAdamW([model.embedding, *model.blocks, model.head], rate)
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=config.fused_optimizer)


class EagerStep:
    """A step whose kernels the CPU launches one by one."""

    def __init__(
        self, model: Transformer, config: TrainConfig, world: World, set_phase: SetPhase
    ) -> None:
        self.model, self.config, self.world, self.set_phase = model, config, world, set_phase
        self.optimizer = build_optimizer(model, config)

    def __call__(
        self, tokens_RT: Tensor, labels_RT: Tensor, *, loss_scale: float, rate: float
    ) -> tuple[Tensor, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        device = self.world.device
        tokens_RT = tokens_RT.to(device, non_blocking=True)
        labels_RT = labels_RT.to(device, non_blocking=True)
        return self._take(tokens_RT, labels_RT, loss_scale)

    def _take(
        self, tokens_RT: Tensor, labels_RT: Tensor, loss_scale: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        size = self.config.batch_size
        return train_step(
            self.model,
            self.optimizer,
            list(zip(tokens_RT.split(size), labels_RT.split(size), strict=True)),
            world=self.world,
            loss_scale=loss_scale,
            max_norm=self.config.grad_max_norm,
            set_phase=self.set_phase,
        )


class GraphedStep(EagerStep):
    """A step that is captured once as a CUDA graph and then replayed with one launch.

    Rows, loss scale and learning rate are copied to fixed places, which the captured kernels read.
    The first steps are launched one by one. The rate is in fp32: some weights round otherwise than
    in an `EagerStep`.
    """

    def __init__(
        self, model: Transformer, config: TrainConfig, world: World, set_phase: SetPhase
    ) -> None:
        super().__init__(model, config, world, set_phase)
        device = world.device
        shape = (2, config.batch_size * config.grad_accumulation_steps, config.sequence_length)
        self.rows_2RT = torch.zeros(shape, dtype=torch.int64, device=device)
        self.loss_scale = torch.zeros((), device=device)
        self.rate = torch.zeros((), device=device)
        for group in self.optimizer.param_groups:
            group.update(lr=self.rate, capturable=True)
        self.stream = torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.num_steps = 0

    def __call__(
        self, tokens_RT: Tensor, labels_RT: Tensor, *, loss_scale: float, rate: float
    ) -> tuple[Tensor, Tensor]:
        self.rows_2RT[0].copy_(tokens_RT, non_blocking=True)
        self.rows_2RT[1].copy_(labels_RT, non_blocking=True)
        self.loss_scale.fill_(loss_scale)
        self.rate.fill_(rate)
        self.num_steps += 1
        if self.num_steps <= STEPS_BEFORE_CAPTURE:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                results = self._take(self.rows_2RT[0], self.rows_2RT[1], self.loss_scale)
            torch.cuda.current_stream().wait_stream(self.stream)
            return results
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()
        return self.results

    def _capture(self) -> None:
        self.set_phase("graph capture")
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # the graph allocates in a pool of its own
        # Thread-local: the thread that pins the next rows may allocate meanwhile.
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self.results = self._take(self.rows_2RT[0], self.rows_2RT[1], self.loss_scale)
