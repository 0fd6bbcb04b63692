"""Train a model that is sharded over the ranks of a peer (FSDP2), and access its parameters as one flat vector.

Every rank holds the same objects. Between steps, only one parameter is gathered at a time, so that no device ever holds
a second copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from noloco_p2p.errors import CheckpointError
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.optimizer_state import restore_optimizers
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import TrainerSpec, TrainSpec
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.trainer.compute import Compute, blocks, switch_on
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import build_model, causal_lm_loss, loss_for
from noloco_p2p.trainer.ranks import Ranks
from noloco_p2p.trainer.start import load_start


def follow(ranks: Ranks, settings: PeerSettings) -> None:
    """Run a rank other than rank 0. It builds the same model as rank 0 and repeats its calls."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if (told := ranks.share()) is None:
        return
    spec = TrainerSpec.from_dict(told, origin="rank 0")
    model = build_model(spec.model, sequence_length=spec.data.sequence_length, folders=settings.models)
    load_start(model, spec.model.start, state_dir=settings.state_dir)
    compute = Compute.of(settings, rank=ranks.rank, num_ranks=ranks.size)
    switch_on(model, compute)
    shard(model, ranks, compute)
    ranks.follow(ShardedStep(model, spec.train, compute, ranks, loss=loss_for(spec.data)))


def shard(model: nn.Module, ranks: Ranks, compute: Compute) -> None:
    """Shard all parameters over the ranks in place, block by block, each along its first dimension.

    Every rank must call this with the same model. The shards are fp32. If bf16 is enabled, weights are gathered and
    used in bf16, and gradients are summed in fp32. Blocks are resharded after each forward pass, so that writes to the
    shards take effect.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    bf16 = compute.is_bf16(ranks.device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for module in [*blocks(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


class ShardedStep(InnerStep):
    """The inner step of a sharded model. Every rank has one, and all ranks repeat the calls of rank 0.

    Each rank gets the whole batch and computes its own rows. State is saved as whole tensors, so that a checkpoint does
    not depend on the number of ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        train: TrainSpec,
        compute: Compute,
        ranks: Ranks,
        *,
        loss: Callable[[nn.Module, Tensor], Tensor] = causal_lm_loss,
    ) -> None:
        super().__init__(model, train, compute, loss=loss)
        self.num_updates = 0
        self._ranks = ranks

    def fit(self, batch: Tensor) -> int:
        self._ranks.tell("fit", batch.cpu())
        return super().fit(batch)

    def backward(self, batch: Tensor, *, seed: int | None = None) -> Tensor:
        self._ranks.tell("backward", batch.cpu(), seed=seed)
        return super().backward(batch, seed=seed)

    def update(self, *, progress: float) -> None:
        self._ranks.tell("update", progress=progress)
        super().update(progress=progress)
        self.num_updates += 1

    def forget(self) -> None:
        self._ranks.tell("forget")
        super().forget()

    def evaluate(self, batches: Sequence[Tensor], *, progress: Progress | None = None) -> float:
        self._ranks.tell("evaluate", batches)
        return super().evaluate(batches, progress=progress)

    def gather(self, key: str) -> Tensor:
        """Gather a whole parameter, or a whole tensor of the optimizers' state."""
        self._ranks.tell("gather", key)
        return self._sharded(key).full_tensor()

    def scatter(self, key: str, values: Tensor | None = None) -> None:
        """Write a whole tensor back to the shards. Rank 0 passes its `values`, and the other ranks receive them."""
        self._ranks.tell("scatter", key)
        tensor = self._sharded(key)
        values = torch.empty(tensor.shape, device=self.device) if values is None else values.reshape(tensor.shape)
        whole = values.to(self.device, tensor.dtype)
        tensor.to_local().copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local())

    def state(self) -> dict[str, Tensor]:
        """Return the state of the optimizers as whole tensors on the CPU."""
        tensors = super().state().items()
        return {key: self.gather(key).cpu() if isinstance(value, DTensor) else value for key, value in tensors}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            name = key.partition("/")[2]
            if name not in self.trainable or (tensor.ndim and tensor.shape != self.trainable[name].shape):
                raise CheckpointError(
                    f"optimizer state {key} {tuple(tensor.shape)} does not match any parameter of this model"
                )
        self.make_room({key: None if tensor.ndim else float(tensor) for key, tensor in tensors.items()})
        for key, tensor in tensors.items():
            if tensor.ndim:
                self.scatter(key, tensor)

    def make_room(self, held: Mapping[str, float | None]) -> None:
        """Allocate the state of the optimizers. `held` maps each key to a number or to None.

        None stands for a tensor, which is zero until `scatter` writes it.
        """
        self._ranks.tell("make_room", held)
        tensors = {
            key: torch.zeros_like(self.trainable[key.partition("/")[2]]) if value is None else torch.tensor(value)
            for key, value in held.items()
        }
        restore_optimizers(self.optimizers, self.trainable, tensors)

    def _sharded(self, key: str) -> DTensor:
        """Look up a tensor by the name of a parameter, or by its key in `state`."""
        tensor = self.trainable[key].detach() if key in self.trainable else super().state()[key]
        assert isinstance(tensor, DTensor), key
        return tensor


class ShardedParameters(FlatParameters):
    """Rank 0's view of all trainable parameters. `flush` completes all writes.

    At any time, at most one parameter is gathered for reading and one for writing. All ranks take part, so only the
    training thread can read, between two steps. `layout` is the layout of the model
    before it was sharded. It is passed in because computing it later would involve all ranks: it contains digests of
    the frozen weights.
    """

    is_readable_anywhere = False

    def __init__(self, step: ShardedStep, *, layout: ModelLayout) -> None:
        super().__init__(step.model)
        self.model_layout = layout
        self._step = step
        self._read: tuple[int, Tensor] | None = None  # the index in `named`, and the values
        self._written: tuple[int, Tensor] | None = None
        self._read_at = 0  # number of updates before `_read` was gathered

    def _check(self, name: str, param: Tensor) -> None:
        assert isinstance(param, DTensor), name

    def flush(self) -> None:
        """Scatter the last write to the ranks, and forget what was read before it."""
        super().flush()  # the values may have been written on a stream other than the sending one
        self._put_back()
        self._read = None

    def named_values(self) -> dict[str, Tensor]:
        """Return all parameters as new tensors on the CPU. They need as much memory as the model."""
        return {name: self._step.gather(name).cpu() for name, _ in self.named}

    def _values(self, index: int, *, is_written: bool) -> Tensor:
        held = self._written if is_written else self._read
        is_current = is_written or self._read_at == self._step.num_updates
        if held and held[0] == index and is_current:
            return held[1]
        if is_written:
            self._put_back()
        values = self._step.gather(self.named[index][0])
        if is_written:
            self._written = index, values
        else:
            self._read, self._read_at = (index, values), self._step.num_updates
        return values

    def _put_back(self) -> None:
        if self._written:
            index, values = self._written
            self._step.scatter(self.named[index][0], values)
        self._written = None
