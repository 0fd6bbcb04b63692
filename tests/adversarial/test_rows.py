"""Every flag of the hostile peer against the invariants, over real gRPC.

I1  data that is not applied leaves weights and random state bit-identical to a peer that never received it
I2  data that is applied moves the weights by no more than the peer's own training has moved them
I3  the victim survives: it swaps with the next partner
I4  one log line names the peer, and what happened
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.loopback import LoopbackSwarm
from harness.patience import PATIENCE_S
from harness.specs import FP32
from harness.swapping import Swapping, wait_until
from torch import Tensor, nn

from adversarial.flags import FLAGS, Flag
from noloco_p2p.gossip.seams import Deadlines
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.peer_name import named
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.faults import Faults
from noloco_p2p.testing.memory import Wrap, unchanged

ADVERSARY = "the-adversary"
SPEC = RunSpec(name="adversarial", codec=FP32)
DEADLINES = Deadlines(status_s=2.0, progress_s=2.0, farewell_s=0.5)


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 5))


def train(model: nn.Module) -> None:
    """Stand in for an inner step, the same one for the victim and its twin."""
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) * 0.01)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


class Coded:
    """A codec whose payloads are changed."""

    def __init__(self, codec: Any, change: Callable[[bytes], bytes]) -> None:
        self._codec = codec
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def encode(self, values: Tensor) -> bytes:
        return self._change(bytes(self._codec.encode(values)))


class Victim:
    """A peer that trains, and a twin without partners."""

    def __init__(self, swarm: LoopbackSwarm, folder: Path) -> None:
        self.model, self.twin = make_model(), make_model()
        self.struck: list[str] = []
        self.peer = swarm.peer("victim", run_folder=folder)
        service = self.peer.service
        service._outside = replace(service._outside, on_corrupt=lambda peer_id, reason: self.struck.append(peer_id))
        self.outer = NoLoCo(self.model, None, self.peer, save_every_s=0)

    def train_until(self, holds: Callable[[], object]) -> int:
        """Return the number of swaps that have been applied."""
        num_swaps, until_s = 0, time.monotonic() + PATIENCE_S
        while not num_swaps and not holds():
            assert time.monotonic() < until_s
            num_swaps += self.train()
            time.sleep(0.001)
        return num_swaps

    def train(self) -> int:
        train(self.model)
        train(self.twin)
        return len(self.outer.step())


def attack(swarm: LoopbackSwarm, flag: Flag) -> Faults | None:
    """Add the hostile peer, which starts where the victim started."""
    faults = Faults(flag.kind, flag.fault, again=True) if flag.fault else None
    wrap: Wrap = faults or unchanged
    swapping = Swapping(swarm.peer(ADVERSARY, wrap=wrap), flag.lie(flat(make_model())))
    if flag.code:
        gossip = swapping.peer.service.gossip
        assert gossip
        coder = gossip._shared.coder
        coder.plain = Coded(coder.plain, flag.code)  # pyright: ignore[reportAttributeAccessIssue]
    return faults


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
def test_a_row(flag: Flag, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO)
    random_state = torch.get_rng_state()
    with LoopbackSwarm(SPEC, deadlines=DEADLINES) as swarm:
        victim = Victim(swarm, tmp_path)
        victim.train()  # who has not moved is not moved by others, either
        faults = attack(swarm, flag)
        num_swaps = victim.train_until(lambda: victim.peer.service.counts.failures)
        assert faults is None or faults.fired
        if flag.left == "clipped":
            own = float((flat(victim.twin) - flat(make_model())).norm())
            moved = float((flat(victim.model) - flat(victim.twin)).norm())
            assert 0 < moved <= 1.01 * num_swaps * own  # I2
        else:
            assert num_swaps == 0
            assert torch.equal(flat(victim.model), flat(victim.twin))  # I1
            wait_until(lambda: any(named(ADVERSARY) in text and flag.says in text for text in caplog.messages))  # I4
        wait_until(lambda: set(victim.struck) == ({ADVERSARY} if flag.is_strike else set()))
        assert torch.equal(torch.get_rng_state(), random_state)
        swarm.addresses.pop(ADVERSARY)
        Swapping(swarm.peer("a-friend"), flat(make_model()))
        assert victim.train_until(lambda: False)  # I3
