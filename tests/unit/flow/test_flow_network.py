"""Whole pipelines under faults: each gradient counts once, nothing deadlocks, and memory is bounded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_network import MICROBATCH_TOKENS, Network, Rates, run_network

from noloco_p2p.flow.rooms import Kind


@given(
    seed=st.integers(0, 1 << 30),
    num_heads=st.integers(1, 4),
    num_replicas=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    num_rooms=st.integers(1, 3),
)
@settings(max_examples=12, deadline=None)
def test_without_faults_each_gradient_is_counted_exactly_once(
    seed: int, num_heads: int, num_replicas: tuple[int, ...], num_rooms: int
) -> None:
    async def test(network: Network) -> None:
        await network.run(20.0)
        for head in network.heads:
            head.leave()
        await network.run(30.0)
        book = network.book
        assert book.losses
        assert set(book.counted) == {(id, stage) for id in book.losses for stage in range(network.num_stages)}
        assert sum(replica.num_lost for replica in network.replicas) == 0

    run_network(test, seed=seed, num_heads=num_heads, num_replicas=num_replicas, num_rooms=num_rooms)


FAULTS = st.lists(
    st.tuples(
        st.floats(0.0, 25.0),
        st.sampled_from(["kill", "restart", "cut", "redraw"]),
        st.integers(0, 8),
        st.integers(0, 8),
    ),
    max_size=25,
)


async def strike(network: Network, kind: str, one: int, other: int) -> None:
    names = list(network.peers)
    name, second = names[one % len(names)], names[other % len(names)]
    match kind:
        case "kill":
            await network.kill(name)
        case "restart":
            network.restart(name)
        case "cut" if name != second:
            network.cut(name, second)
        case "redraw" if network.peers[name].is_alive:
            following = network.stages[(network.stage_of(name) + 1) % network.num_stages]
            network.peers[name].node.neighbours_changed(following[: 1 + other % len(following)])


@given(
    seed=st.integers(0, 1 << 30),
    faults=FAULTS,
    num_rooms=st.integers(1, 2),
    rates=st.builds(
        Rates,
        damaged=st.sampled_from([0.0, 0.05]),
        failed=st.sampled_from([0.0, 0.05]),
        cut=st.sampled_from([0.0, 0.1]),
    ),
)
@settings(max_examples=25, deadline=None)
def test_under_faults_each_gradient_is_counted_at_most_once_and_the_pipeline_goes_on(
    seed: int, faults: list[tuple[float, str, int, int]], num_rooms: int, rates: Rates
) -> None:
    """There are 3 stages of 3 replicas, with room for one or two microbatches each."""

    async def test(network: Network) -> None:
        for at_s, kind, one, other in sorted(faults):
            await network.run(at_s - network.now_s)
            await strike(network, kind, one, other)
        await network.run(30.0 - network.now_s)
        # Heads complete microbatches once faults have ceased, except heads that are ahead of others.
        network.rates = Rates()
        for name, peer in list(network.peers.items()):
            network.restart(name)
            network.peers[name].node.neighbours_changed(network.stages[(peer.stage + 1) % network.num_stages])
        await network.run(150.0, until=lambda: all(head.num_done > 20 for head in network.heads))
        before, least = [head.num_done for head in network.heads], min(head.progress for head in network.heads)
        await network.run(20.0)
        for head, num_before in zip(network.heads, before, strict=True):
            assert head.num_done > num_before or head.progress > least

    run_network(test, seed=seed, num_rooms=num_rooms, rates=rates)


def test_a_stage_with_few_replicas_takes_larger_steps_not_more() -> None:
    """Ten batches reach it for each of its steps. If it stopped at four, the whole pipeline would stop."""

    async def test(network: Network) -> None:
        await network.run(300.0, until=lambda: all(head.progress >= 1.0 for head in network.heads))
        assert all(head.progress >= 1.0 for head in network.heads)
        await network.run(1.0)
        assert all(replica.steps.progress == 1.0 for replica in network.replicas)
        assert all(peer.num_steps <= 4 for peer in network.peers.values())

    run_network(test, num_heads=10, num_replicas=(1, 1), num_rooms=4, num_steps=4)


def test_gradients_are_at_most_a_quarter_of_a_step_late_in_the_mean() -> None:
    """A batch has 16 microbatches, so a quarter is 4 rooms, which the heads keep full."""

    async def test(network: Network) -> None:
        await network.run(300.0)
        steps = network.book.step_of
        for stage in (1, 2):
            late = [
                step - steps[Kind.FORWARD, id, at]
                for (kind, id, at), step in steps.items()
                if (kind, at) == (Kind.BACKWARD, stage)
            ]
            assert len(late) > 500
            assert sum(late) / len(late) <= 0.25

    run_network(test, num_rooms=4, batch_tokens=16 * MICROBATCH_TOKENS)
