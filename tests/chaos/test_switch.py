"""A peer of a crowded stage moves to one that lacks peers, between real processes, and swaps there as a replica."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.patience import PATIENCE_S
from harness.processes import PeerProcess, small_spec, until, write_spec

from noloco_p2p.control import ask
from noloco_p2p.peer.run_folder import stage_folder
from noloco_p2p.trainer.stage_trainer import SWITCH_EPOCH_S

SPEC = small_spec(
    "switch",
    model__num_layers=7,
    model__parameter_seeds=True,
    pipeline__stages=2,
    pipeline__cut=[1, 6],  # one peer with the long stage is slower than three with the short one
)

pytestmark = pytest.mark.slow


def test_a_peer_switches_to_the_stage_that_needs_it_and_swaps_there(tmp_path: Path) -> None:
    with ExitStack() as stack:

        def join(target: str | Path, name: str, stage: int) -> PeerProcess:
            """Start a peer that resumes `stage` from its folder; a peer that is started with --stage never moves."""
            folder = tmp_path / name
            stage_folder(folder / "runs" / SPEC.run_id, stage).mkdir(parents=True)
            return stack.enter_context(PeerProcess(target, folder, "--save-every-s", "1"))

        heads = [join(write_spec(SPEC, tmp_path), "head-0", 0)]
        ticket = heads[0].ticket
        inner = join(ticket, "inner", 1)
        heads += [join(ticket, f"head-{number}", 0) for number in (1, 2)]
        everybody = [*heads, inner]

        def moved() -> PeerProcess | None:
            return next((head for head in heads if "switching to stage" in head.text), None)

        switcher = until(moved, timeout_s=PATIENCE_S + 4 * SWITCH_EPOCH_S, what="a head that switches")
        switcher.swap_with(inner)
        swaps = inner.swap_with(switcher)["swaps"]
        status = until(lambda: ask(switcher.folder, "status", timeout_s=10.0), what="a status")
        assert status["stage"] == 1
        assert status["loss"] is None, "an inner stage has no loss"
        left, other = [head for head in heads if head is not switcher]
        left.swap_with(other)
        # more often than it takes to ban a partner that proposes another layout
        inner.report_where(lambda event: event["swaps"] > swaps + 5)
        assert not [peer.text for peer in everybody if "Traceback" in peer.text or "banned" in peer.text]
        assert all(peer.process.poll() is None for peer in everybody)
