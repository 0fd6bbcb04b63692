"""The progress of a running swap as it is reported: its part, bytes, rate and remaining time."""

from __future__ import annotations

from harness.patience import PATIENCE_S
from harness.rounds import Vectors, end_round, open_round, together, wait_until
from harness.specs import published

from noloco_p2p.codec import CHUNK_ELEMENTS, section_bytes
from noloco_p2p.gossip.frames import Chunk, Part, SectionName
from noloco_p2p.gossip.outcome import Swapped
from noloco_p2p.gossip.watch import LONG_S, SwapProgress, SwapWatch
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.faults import At, FaultPlan, NotFinite, Stall
from noloco_p2p.testing.peers import MemorySwarm

NUM_ELEMENTS = CHUNK_ELEMENTS + 100
SPEC = RunSpec(name="watched", outer=published())


def test_a_swap_is_told_from_its_early_part_to_its_end() -> None:
    with MemorySwarm(SPEC) as swarm:
        peers = [swarm.peer(name) for name in "ab"]
        vectors = [Vectors.random(seed, num_elements=NUM_ELEMENTS) for seed in range(2)]
        watch = SwapWatch(peers[0].driver)
        watch.sample(now_s=0.0)
        assert watch.now(now_s=0.0) is None
        for peer, own in zip(peers, vectors, strict=True):
            open_round(peer, own)

        def early_is_committed() -> bool:
            running = peers[0].driver.swap_now()
            return running is not None and Part.EARLY in running[0].ledger.committed

        wait_until(early_is_committed)
        running = peers[0].driver.swap_now()
        assert running is not None
        began_s = running[1]
        watch.sample(now_s=began_s + 1.0)
        waiting = watch.now(now_s=began_s + 1.0)
        assert waiting is not None
        early_bytes = sum(section_bytes(plan.codec, NUM_ELEMENTS) for plan in running[0]._plans[:-1])
        assert (waiting.partner, waiting.part) == ("b", "waiting")
        assert waiting.sent_bytes == waiting.received_bytes == waiting.total_bytes == early_bytes
        assert (waiting.since_s, waiting.left_s) == (1.0, 0.0)
        assert waiting.sent_bytes_per_s == round(early_bytes / 1.0, 1)

        outcomes = together(
            *(lambda p=p, v=v: end_round(p, v, wait_s=PATIENCE_S) for p, v in zip(peers, vectors, strict=True))
        )
        assert all(isinstance(outcome, Swapped) for outcome in outcomes)
        watch.sample(now_s=began_s + 2.0)
        assert watch.now(now_s=began_s + 2.0) is None


def test_a_swap_that_has_failed_is_no_swap_that_runs() -> None:
    faults = FaultPlan().fail_at(At(Chunk), send=NotFinite()).wrapper()
    with MemorySwarm(SPEC) as swarm:
        peers = [swarm.peer("a"), swarm.peer("b", wrap=faults, wrap_accepted=faults)]
        for peer, seed in zip(peers, range(2), strict=True):
            open_round(peer, Vectors.random(seed, num_elements=NUM_ELEMENTS))
        wait_until(lambda: all(peer.driver.last_fault for peer in peers))
        wait_until(lambda: all(peer.driver.swap_now() is None for peer in peers))


def test_a_swap_that_stands_still_says_so_and_is_told_again_and_again() -> None:
    faults = FaultPlan().fail_at(At(Chunk, section=SectionName.SLOW_WEIGHTS, index=1), send=Stall()).wrapper()
    with MemorySwarm(SPEC) as swarm:
        peers = [swarm.peer("a", wrap=faults), swarm.peer("b", wrap=faults)]  # either may open the stream
        for peer, seed in zip(peers, range(2), strict=True):
            open_round(peer, Vectors.random(seed, num_elements=NUM_ELEMENTS))
        wait_until(lambda: faults.fired > 0 and all(peer.driver.swap_now() for peer in peers))
        watches = [SwapWatch(peer.driver) for peer in peers]
        told: list[SwapProgress] = []
        began_s = max(running[1] for peer in peers if (running := peer.driver.swap_now()))
        for watch in watches:
            watch.on_long = told.append
            for second in range(2 * int(LONG_S) + 2):
                watch.sample(now_s=began_s + second)
        lacking = [progress for progress in told if progress.received_bytes < progress.total_bytes]
        assert len(lacking) >= 2, "told twice in 20 s by the acceptor, which lacks something"
        assert {progress.part for progress in told} == {"early"}
        assert None in {progress.left_s for progress in lacking}, "nothing moves"
