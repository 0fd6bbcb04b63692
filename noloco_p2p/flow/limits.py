"""The bounds and times of the pipeline, each with its reason. Sizes follow from the run spec."""

from __future__ import annotations

# Lateness is harmful: a gradient three inner steps late costs more loss than a lost one. With a quarter of a batch in
# flight, gradients are at most a quarter of a step late in the mean.
IN_FLIGHT_SHARE = 0.25
# A step on less than half a batch is noise; its gradients count towards the next step instead.
SMALLEST_STEP_BATCHES = 0.5
# A replica with this many batches in one step makes the heads that are ahead of the median wait for the others.
LARGEST_STEP_BATCHES = 4.0

# A head that is silent for this long has no vote, because dead heads must not hold up the median. The time is a
# multiple of the usual interval between two of its microbatches here, as a stage may have few replicas or a hundred.
VOTE_INTERVALS = 8.0
SHORTEST_VOTE_S = 15.0  # a head at the boundary of a round waits for some seconds
VOTE_S = 120.0  # the longest, and that of a head that was heard from once

# A microbatch is given up after this multiple of the head's median latency: queues vary latencies by two or three.
DEADLINE_LATENCIES = 4.0
NUM_LATENCIES = 32  # in the median: some steps of the head
FIRST_DEADLINE_S = 120.0  # before a latency is measured: the first tasks compile and allocate
SHORTEST_DEADLINE_S = 10.0  # a loopback swarm must not lose microbatches to a pause of the machine
LONGEST_DEADLINE_S = 600.0  # bounds how long a forged Want can hold room

# A head that lost a microbatch pauses, twice as long after each further loss, so that it does not waste its data.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 32.0

TICK_S = 0.25  # how often the driver calls `tick`
# after this, a neighbour that does not answer a Want is no longer waited for, and the next one is asked
ASK_PATIENCE_S = 1.0
ASK_AGAIN_S = 5.0  # after this, all neighbours are asked again: one may have room, or a frame was lost

# The forwards of one node in flight at a time. Room is requested for one while others travel to different neighbours,
# because a single one rarely fills the uplink. With many, reserved room would wait for the uplink of this node.
MAX_UNDER_WAY = 4
MAX_SINKS = 8  # in a Want: enough to choose from, and 400 bytes
MAX_WANTS_PER_PEER = 8  # queued for one neighbour, which asks for MAX_UNDER_WAY at a time, and may have lost others
FAIR_SHARES = 2.0  # of the room of a step that a head gets while others wait
MAX_HEADS = 1024  # remembered by a replica; those silent for longest are forgotten
SEEN_NUMBERS = 1024  # of each head: more than it launches within the longest deadline


def num_rooms(*, memory_bytes: int, microbatch_bytes: int, batch_tokens: int, microbatch_tokens: int) -> int:
    """The microbatches that a replica may hold, or a head have in flight; at least 1.

    microbatch_bytes: of one room, that is, the encoded input, the encoded output and the encoded gradient.
    """
    in_flight = int(IN_FLIGHT_SHARE * batch_tokens / microbatch_tokens)
    return max(1, min(in_flight, memory_bytes // microbatch_bytes))
