"""A swap with a fault at an exact frame ends in time, with a consistent outcome on both sides and no torn data."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import pytest
import torch
from blake3 import blake3
from harness.patience import AT_ONCE_S, PATIENCE_S, PATIENT
from harness.rounds import Vectors, end_round, one_round, open_round, wait_until
from harness.specs import FP32, published

from noloco_p2p.codec import CHUNK_ELEMENTS, get_codec
from noloco_p2p.errors import PeerError, Unreachable
from noloco_p2p.gossip.deadlines import Deadlines
from noloco_p2p.gossip.frames import (
    Abort,
    AbortCode,
    Accept,
    Boundary,
    Chunk,
    End,
    FetchItem,
    FetchWant,
    Frame,
    Grid,
    Header,
    Hello,
    Part,
    PeerStatus,
    Ready,
    Refuse,
    RefuseCode,
    SectionName,
    SwapState,
    chunk_digest,
)
from noloco_p2p.gossip.outcome import Alone, Half, Outcome, Swapped
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.gossip.seams import FrameStream, Service
from noloco_p2p.gossip.swap import Ledger
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.faults import (
    Announce,
    At,
    Cut,
    Drop,
    Fault,
    FaultPlan,
    FlipBit,
    NotFinite,
    Repeat,
    Replace,
    Stall,
    SwapWithNext,
    Truncate,
)
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm

SPEC = RunSpec(name="faults", codec=FP32, outer=published())
SHORT = Deadlines(offer_s=1.0, status_s=1.0, progress_s=1.0, farewell_s=0.05)  # they expire when a peer freezes

# The frames that one side sends in a swap of three sections of one chunk. The first is its Offer or its Accept. A Ready
# may precede the last frames of its part, as both directions are independent.
FRAMES = ("Offer", *("Header", "Chunk", "End") * 2, "Ready EARLY", "Header", "Chunk", "End", "Ready LATE")
EARLY_READY, LATE_READY = 8, 12
MOST_DRIPS = 60  # 12 times `SHORT.progress_s`


EVERY_POSITION = pytest.mark.parametrize(
    "position", range(1, len(FRAMES) + 1), ids=lambda position: f"{position}-{FRAMES[position - 1]}"
)


def after_cut(position: int) -> type[Outcome]:
    """Return the outcome of both sides when the connection breaks at this frame. Each peer asks for a lost Ready."""
    return Alone if position < EARLY_READY else Half if position < LATE_READY else Swapped


def allowed_after_cut(position: int) -> set[type[Outcome]]:
    """Return the possible outcomes. A peer that is asked for a lost Ready before it has verified the part says no."""
    both_ways = {after_cut(position - 1)} if position in (EARLY_READY, LATE_READY) else set()
    return {after_cut(position), *both_ways}


def round_with_fault(
    plan: FaultPlan, *, num_elements: int = 100, deadlines: Deadlines = PATIENT
) -> tuple[list[Outcome], list[str], int]:
    """Run a round of `a`, whose streams have the fault, and `b`; return outcomes, last faults and number of faults."""
    vectors = [Vectors.random(seed, num_elements=num_elements) for seed in (1, 2)]
    before = [own.slow_weights.clone() for own in vectors] + [own.outer_momentum.clone() for own in vectors]
    faults = plan.wrapper()
    with MemorySwarm(SPEC, deadlines=deadlines) as swarm:
        peers = [swarm.peer("a", wrap=faults, wrap_accepted=faults), swarm.peer("b")]
        began_s = time.monotonic()
        outcomes = one_round(peers, vectors, wait_s=PATIENCE_S)
        assert time.monotonic() - began_s < AT_ONCE_S
        last_faults = [peer.driver.last_fault for peer in peers]
    after = [own.slow_weights for own in vectors] + [own.outer_momentum for own in vectors]
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True)), "nothing is written here"
    for outcome in outcomes:
        if not isinstance(outcome, Alone):
            for pair in outcome.received.sections.values():
                pair.half_difference(0)  # sections of an outcome are whole
    return outcomes, last_faults, faults.fired


@EVERY_POSITION
def test_a_cut_at_any_frame_that_is_sent_leaves_both_sides_alike(position: int) -> None:
    outcomes, last_faults, fired = round_with_fault(FaultPlan().fail_at(At(nth=position), send=Cut()))
    assert fired
    kinds = {type(outcome) for outcome in outcomes}
    assert len(kinds) == 1
    # Each peer asks for a lost Ready; one that is asked before it has verified the part says no.
    assert kinds in (
        {after_cut(position)},
        {after_cut(position - 1)} if position in (EARLY_READY, LATE_READY) else set(),
    )
    assert kinds == {Swapped} or all(last_faults), "who, and what happened"


@EVERY_POSITION
def test_a_cut_at_any_frame_that_comes_leaves_both_sides_alike(position: int) -> None:
    outcomes, _, fired = round_with_fault(FaultPlan().fail_at(At(nth=position), receive=Cut()))
    assert fired
    kinds = {type(outcome) for outcome in outcomes}
    assert len(kinds) == 1
    assert kinds <= allowed_after_cut(position)


@EVERY_POSITION
def test_a_partner_that_vanishes_at_any_frame_costs_no_more_than_the_round(position: int) -> None:
    """Nobody can ask it which parts it committed, and unknown counts as not committed."""
    with MemorySwarm(SPEC, deadlines=PATIENT) as swarm:
        faults = FaultPlan().fail_at(At(nth=position), send=Cut()).wrapper(on_fault=lambda: swarm.network.vanish("a"))
        peers = [swarm.peer("a", wrap=faults, wrap_accepted=faults), swarm.peer("b")]
        began_s = time.monotonic()
        _, survivor = one_round(peers, [Vectors.random(1), Vectors.random(2)], wait_s=PATIENCE_S)
        assert time.monotonic() - began_s < AT_ONCE_S
    assert faults.fired
    assert isinstance(survivor, Alone if position <= EARLY_READY else Half)


@pytest.mark.parametrize(
    ("at", "allowed"),
    [
        (At(nth=1), {Alone}),
        (At(Header), {Alone}),
        (At(Chunk), {Alone}),
        (At(Ready, part=Part.EARLY), {Alone, Half}),
        (At(Header, section=SectionName.OUTER_GRADIENT), {Half}),
        (At(Chunk, section=SectionName.OUTER_GRADIENT), {Half}),
        (At(Ready, part=Part.LATE), {Half, Swapped}),
    ],
    ids=["offer", "early-header", "early-chunk", "early-ready", "late-header", "late-chunk", "late-ready"],
)
def test_a_partner_that_freezes_at_a_frame_is_given_up_in_time(at: At, allowed: set[type[Outcome]]) -> None:
    """A partner that announces a section and then freezes is given up too, however long a round may wait."""
    outcomes, last_faults, fired = round_with_fault(FaultPlan().fail_at(at, send=Stall()), deadlines=SHORT)
    assert fired
    kinds = {type(outcome) for outcome in outcomes}
    assert len(kinds) == 1
    assert kinds <= allowed
    assert kinds == {Swapped} or all(last_faults)


CORRUPT: list[tuple[str, Fault, At, str]] = [
    ("bit-flip", FlipBit(5), At(Chunk), "chunk 0 of {} is damaged"),
    ("truncated", Truncate(40), At(Chunk), "chunk 0 of {} is damaged"),
    ("truncated-digest-fits", Truncate(40, digests="section"), At(Chunk), "must have 400 bytes, but it has 40"),
    ("bit-flip-digest-fits", FlipBit(5, digests="chunk"), At(Chunk), "{} does not end with the expected digest"),
    ("nan", NotFinite(), At(Chunk), "contains NaN or infinity"),
    ("repeated", Repeat(), At(Chunk), "{} does not end with the expected digest"),
    ("dropped", Drop(), At(Chunk), "expected chunk 0 of {}, got End"),
    ("after-its-end", SwapWithNext(), At(Chunk), "expected chunk 0 of {}, got End"),
    ("no-header", Drop(), At(Header), "got chunk 0 of {}"),
    ("other-size", Announce(num_elements=10**12), At(Header), "num_elements=1000000000000"),
    ("other-codec", Announce(codec="bf16"), At(Header), "codec='bf16'"),
    ("other-chunks", Announce(num_chunks=10**9), At(Header), "num_chunks=1000000000"),
    ("other-bytes", Announce(num_bytes=2**60), At(Header), "num_bytes=1152921504606846976"),
    (
        "another-frame",
        Replace(Refuse(RefuseCode.BUSY, "not now")),
        At(Header),
        "got Refuse",
    ),
    (
        "long-frame",
        Replace(Grid(SectionName.OUTER_MOMENTUM, bytes(1 << 20))),
        At(Header),
        "got Grid of outer_mom",
    ),
    ("long-codec", Announce(codec=1000 * "x"), At(Header), "codec='xxx"),
]


@pytest.mark.parametrize("section", [SectionName.SLOW_WEIGHTS, SectionName.OUTER_GRADIENT], ids=["early", "late"])
@pytest.mark.parametrize(("fault", "at", "sentence"), [row[1:] for row in CORRUPT], ids=[row[0] for row in CORRUPT])
def test_what_is_damaged_is_refused_in_words_and_not_applied(
    fault: Fault, at: At, sentence: str, section: SectionName
) -> None:
    plan = FaultPlan().fail_at(At(at.kind, section=section), send=fault)
    outcomes, last_faults, fired = round_with_fault(plan)
    assert fired
    expected = Alone if section is SectionName.SLOW_WEIGHTS else Half
    assert [type(outcome) for outcome in outcomes] == [expected, expected]
    what = section.name.lower()
    assert sentence.format(what) in last_faults[1]
    assert all(len(each) < 1000 for each in last_faults), "a partner does not choose how long a line is"
    assert "..a" in last_faults[1], "the partner is named"
    assert ("nothing applied" if expected is Alone else "early part kept") in last_faults[1]
    assert AbortCode.CORRUPT.name in last_faults[0], "the sender is told why"


def test_a_section_without_an_end_is_refused() -> None:
    outcomes, last_faults, _ = round_with_fault(FaultPlan().fail_at(At(End), send=Drop()))
    assert [type(outcome) for outcome in outcomes] == [Alone, Alone]
    assert "slow_weights does not end with the expected digest" in last_faults[1]


def test_chunks_in_another_order_are_refused() -> None:
    at = At(Chunk, section=SectionName.OUTER_MOMENTUM, index=0)
    plan = FaultPlan().fail_at(at, send=SwapWithNext())
    outcomes, last_faults, _ = round_with_fault(plan, num_elements=CHUNK_ELEMENTS + 100)
    assert [type(outcome) for outcome in outcomes] == [Alone, Alone]
    assert "expected chunk 0 of outer_momentum, got chunk 1" in last_faults[1]


@pytest.mark.parametrize("bit", [0, 7, 3199, 1600])
def test_a_flipped_bit_is_found_wherever_it_is(bit: int) -> None:
    _, last_faults, fired = round_with_fault(FaultPlan().fail_at(At(Chunk), send=FlipBit(bit)))
    assert fired
    assert "is damaged" in last_faults[1]


# a lost Ready


class Questioned:
    """A wrapper of a Service that records the swap ids in status calls."""

    def __init__(self, service: Service, questions: list[bytes]) -> None:
        self.admit, self.on_swap, self.on_fetch = service.admit, service.on_swap, service.on_fetch
        self._service = service
        self._questions = questions

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        self._questions.append(swap_id)
        return await self._service.on_status(swap_id)


def note_questions(swarm: MemorySwarm) -> list[bytes]:
    """Start to record the swap ids of all status calls, in the returned list."""
    questions: list[bytes] = []
    for peer_id, service in list(swarm.network.services.items()):
        swarm.network.services[peer_id] = Questioned(service, questions)
    return questions


@pytest.mark.parametrize(("part", "expected"), [(Part.EARLY, Half), (Part.LATE, Swapped)])
def test_a_ready_that_is_lost_with_its_connection_is_asked_for(part: Part, expected: type[Outcome]) -> None:
    """Both sides have verified the part, both lose the other's Ready, and then the connection breaks."""
    faults = FaultPlan().fail_at(At(Ready, part=part), send=Drop(), receive=Drop()).wrapper()
    streams: list[FrameStream] = []

    def wrap(stream: FrameStream) -> FrameStream:
        streams.append(faults(stream))
        return streams[-1]

    vectors = [Vectors.random(1), Vectors.random(2)]
    with MemorySwarm(SPEC) as swarm:
        peers = [swarm.peer("a", wrap=wrap, wrap_accepted=wrap), swarm.peer("b")]
        questions = note_questions(swarm)
        for peer, own in zip(peers, vectors, strict=True):
            open_round(peer, own)
        if part is Part.LATE:
            wait_until(lambda: all(peer.driver.phase is RoundPhase.EARLY for peer in peers))
            for peer, own in zip(peers, vectors, strict=True):
                peer.exchange.stage(own.gradient_chunks)
        wait_until(lambda: faults.fired == 2)
        for stream in streams:
            asyncio.run_coroutine_threadsafe(stream.close(), swarm.loop).result(PATIENCE_S)
        wait_until(lambda: all(peer.driver.phase in (RoundPhase.HALF, RoundPhase.DONE) for peer in peers))
        outcomes = [peer.exchange.collect(PATIENCE_S) for peer in peers]
    assert [type(outcome) for outcome in outcomes] == [expected, expected]
    assert len(questions) == 2, "each side asks once"
    assert len(set(questions)) == 1, "about the same swap"


def test_a_ready_that_never_comes_over_a_living_stream_is_asked_for() -> None:
    faults = FaultPlan().fail_at(At(Ready, part=Part.LATE), send=Drop()).wrapper()
    with MemorySwarm(SPEC, deadlines=SHORT) as swarm:
        peers = [swarm.peer("a", wrap=faults, wrap_accepted=faults), swarm.peer("b")]
        questions = note_questions(swarm)
        outcomes = one_round(peers, [Vectors.random(1), Vectors.random(2)], wait_s=PATIENCE_S)
    assert [type(outcome) for outcome in outcomes] == [Swapped, Swapped]
    assert len(questions) == 1


def test_a_partner_that_says_it_gave_up_is_believed() -> None:
    """Both have verified the late part and lose the other's Ready; then b reaches its next boundary and sends Abort."""
    at = At(Ready, part=Part.LATE)
    faults = FaultPlan().fail_at(at, send=Drop(), receive=Drop()).wrapper()
    vectors = [Vectors.random(1), Vectors.random(2)]
    with MemorySwarm(SPEC) as swarm:
        peers = a, b = swarm.peer("a", wrap=faults, wrap_accepted=faults), swarm.peer("b")
        for peer, own in zip(peers, vectors, strict=True):
            open_round(peer, own)
        wait_until(lambda: all(peer.driver.phase is RoundPhase.EARLY for peer in peers))
        for peer, own in zip(peers, vectors, strict=True):
            peer.exchange.stage(own.gradient_chunks)
        wait_until(lambda: faults.fired == 2)
        questions = note_questions(swarm)
        assert isinstance(b.exchange.collect(0.0), Half)
        open_round(b, vectors[1], round_index=1)
        end_round(b, vectors[1], wait_s=0.0)
        outcome = a.exchange.collect(PATIENCE_S)
        assert isinstance(outcome, Half)
        assert "the late part did not arrive before the next boundary" in outcome.reason
        assert questions == []


class HeldAnswers(Questioned):
    """Delays answers about a swap, as a slow link does."""

    def __init__(self, service: Service, questions: list[bytes], may_answer: asyncio.Event) -> None:
        super().__init__(service, questions)
        self._may_answer = may_answer

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        status = await super().on_status(swap_id)
        await self._may_answer.wait()
        return status


class LongFarewell:
    """A stream that sends Abort only when the test allows it."""

    def __init__(self, stream: FrameStream, may_go: asyncio.Event) -> None:
        self.peer, self.receive, self.close = stream.peer, stream.receive, stream.close
        self._stream = stream
        self._may_go = may_go

    async def send(self, frame: Frame) -> None:
        if isinstance(frame, Abort):
            await self._may_go.wait()
        await self._stream.send(frame)


def test_nothing_is_committed_after_a_swap_was_given_up() -> None:
    """The round of a ends solo. While a still sends its last frames, it learns that b has verified the early part."""
    faults = FaultPlan().fail_at(At(Ready, part=Part.EARLY), send=Drop(), receive=Drop()).wrapper()
    may_answer, may_go, questions = asyncio.Event(), asyncio.Event(), list[bytes]()
    streams: list[FrameStream] = []

    def wrap(stream: FrameStream) -> FrameStream:
        streams.append(LongFarewell(faults(stream), may_go))
        return streams[-1]

    with MemorySwarm(SPEC, deadlines=PATIENT) as swarm:
        a, b = swarm.peer("a", wrap=wrap, wrap_accepted=wrap), swarm.peer("b")
        swarm.network.services["b"] = HeldAnswers(swarm.network.services["b"], questions, may_answer)
        for peer, own in ((a, Vectors.random(1)), (b, Vectors.random(2))):
            open_round(peer, own)
        wait_until(lambda: faults.fired == 2)
        for stream in streams:
            asyncio.run_coroutine_threadsafe(stream.close(), swarm.loop).result(PATIENCE_S)
        wait_until(lambda: bool(questions))
        assert isinstance(a.exchange.collect(0.0), Alone)
        swarm.loop.call_soon_threadsafe(may_answer.set)

        async def state() -> SwapState:
            for _ in range(100):  # let the loop run, so that the answer is processed
                await asyncio.sleep(0)
            return a.driver.swap_state(questions[0])

        known = asyncio.run_coroutine_threadsafe(state(), swarm.loop).result(PATIENCE_S)
        swarm.loop.call_soon_threadsafe(may_go.set)
    assert (known.known, known.verified, known.committed) == (True, (), ())


def test_a_part_that_was_given_up_counts_as_not_verified() -> None:
    """If it counted as verified, the partner would commit a part that this peer has not committed."""
    ledger = Ledger()
    ledger.verified |= {Part.EARLY, Part.LATE}
    ledger.committed.add(Part.EARLY)
    assert set(ledger.state().verified) == {Part.EARLY, Part.LATE}
    ledger.has_ended = True
    assert ledger.state().verified == (Part.EARLY,)


# a partner that cheats


class Stranger:
    """Accepts every offer, and then sends what a subclass likes."""

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = {
            SectionName.SLOW_WEIGHTS: vectors.slow_weights,
            SectionName.OUTER_MOMENTUM: vectors.outer_momentum,
            SectionName.OUTER_GRADIENT: vectors.outer_gradient,
        }

    async def on_swap(self, stream: FrameStream) -> None:
        await stream.receive(PATIENCE_S)
        await stream.send(Accept(Hello("stranger", SPEC.name, SPEC.digest()), Boundary(0, None, None, 0.0)))
        with contextlib.suppress(PeerError):
            await self._go_on(stream)

    async def _go_on(self, stream: FrameStream) -> None:
        raise NotImplementedError

    def _section(self, name: SectionName) -> list[Frame]:
        payload = get_codec("fp32").encode(self._vectors[name])
        digest = chunk_digest(payload)
        header = Header(name, "fp32", 100, 1, len(payload))
        return [header, Chunk(name, 0, payload, digest), End(name, blake3(digest).digest())]

    def admit(self, hello: Hello) -> None: ...

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        raise Unreachable("never")

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        raise Unreachable("never")


class Hasty(Stranger):
    """Sends all frames of a swap at once, Ready first, whatever the other side has sent."""

    def __init__(self, vectors: Vectors) -> None:
        super().__init__(vectors)
        self.heard: list[Frame] = []

    async def _go_on(self, stream: FrameStream) -> None:
        frames = [
            Ready(Part.EARLY),
            Ready(Part.LATE),
            *(frame for name in SectionName for frame in self._section(name)),
        ]
        for frame in frames:
            await stream.send(frame)
        while True:
            self.heard.append(await stream.receive(PATIENCE_S))


class Dripping(Stranger):
    """Sends the given number of its frames, and only Ready after that."""

    def __init__(self, vectors: Vectors, num_frames: int) -> None:
        super().__init__(vectors)
        self.num_drips = 0
        self._num_frames = num_frames

    async def _go_on(self, stream: FrameStream) -> None:
        early = [frame for name in tuple(SectionName)[:2] for frame in self._section(name)]
        frames = [*early, Ready(Part.EARLY), *self._section(SectionName.OUTER_GRADIENT)]
        for frame in frames[: self._num_frames]:
            await stream.send(frame)
        while self.num_drips < MOST_DRIPS:
            await asyncio.sleep(SHORT.progress_s / 5)
            await stream.send(Ready(Part.EARLY))
            self.num_drips += 1


def phase_in_a_while(swarm: MemorySwarm, peer: MemoryPeer) -> RoundPhase:
    async def later() -> RoundPhase:
        for _ in range(100):  # let the loop run
            await asyncio.sleep(0)
        return peer.driver.phase

    return asyncio.run_coroutine_threadsafe(later(), swarm.loop).result(PATIENCE_S)


def test_nothing_is_committed_before_it_was_sent_whatever_the_partner_claims() -> None:
    """Otherwise the outer step would look for a coded gradient that does not exist yet, and training would fail."""
    own, theirs = Vectors.random(1), Vectors.random(2)
    with MemorySwarm(SPEC) as swarm:
        a = swarm.peer("a")
        swarm.network.add("stranger", stranger := Hasty(theirs))
        open_round(a, own)
        wait_until(lambda: Ready(Part.LATE) in stranger.heard)  # a has received everything that the stranger sends
        assert phase_in_a_while(swarm, a) is RoundPhase.EARLY
        outcome = end_round(a, own, wait_s=PATIENCE_S)
        assert isinstance(outcome, Swapped)
        gradient = outcome.received.sections[SectionName.OUTER_GRADIENT]
        assert torch.equal(gradient.half_difference(0), theirs.outer_gradient * 0.5 - own.outer_gradient * 0.5)


@pytest.mark.parametrize("num_frames", [0, 2, 8], ids=["nothing", "in-the-early-part", "after-the-late-header"])
def test_a_partner_that_drips_ready_and_sends_no_chunk_is_given_up_by_progress(num_frames: int) -> None:
    stranger = Dripping(Vectors.random(2), num_frames)
    with MemorySwarm(SPEC, deadlines=SHORT) as swarm:
        a = swarm.peer("a")
        swarm.network.add("stranger", stranger)
        open_round(a, Vectors.random(1))
        wait_until(lambda: bool(a.driver.last_fault) or stranger.num_drips == MOST_DRIPS)
        assert "no progress" in a.driver.last_fault
    assert stranger.num_drips < MOST_DRIPS


@pytest.mark.parametrize("first", [(), (0,), (1,)], ids=["both-train", "one-trains", "the-other-trains"])
def test_who_waits_for_a_partner_that_trains_gives_it_up_only_when_it_falls_silent(first: tuple[int, ...]) -> None:
    vectors = [Vectors.random(1), Vectors.random(2)]
    with MemorySwarm(SPEC, deadlines=SHORT) as swarm:
        peers = [swarm.peer("a"), swarm.peer("b")]
        for peer, own in zip(peers, vectors, strict=True):
            open_round(peer, own)
        wait_until(lambda: all(peer.driver.phase is RoundPhase.EARLY for peer in peers))
        for index in first:
            peers[index].exchange.stage(vectors[index].gradient_chunks)
        time.sleep(2.5 * SHORT.progress_s)
        for index in {0, 1} - set(first):
            peers[index].exchange.stage(vectors[index].gradient_chunks)
        assert [type(peer.exchange.collect(PATIENCE_S)) for peer in peers] == [Swapped, Swapped]
