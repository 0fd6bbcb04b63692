"""The bounds and times of the pipeline, each with its reason. Sizes follow from the run spec."""

from __future__ import annotations

# Lateness is the enemy: a gradient three inner steps late costs more loss than a lost one. With a quarter of a batch in
# flight, gradients are at most a quarter of a step late in the mean.
IN_FLIGHT_SHARE = 0.25
# A step on less than half a batch is noise; the gradients count for the next step instead.
SMALLEST_STEP_BATCHES = 0.5
# A replica with so much in one step makes the heads that are ahead of the median wait for the others.
LARGEST_STEP_BATCHES = 4.0

# A head that is not heard from for so long has no vote: dead heads must not hold up the median. The time is a multiple
# of what usually passes between two of its microbatches here, as a stage may have few replicas or a hundred.
VOTE_INTERVALS = 8.0
SHORTEST_VOTE_S = 15.0  # a head at the boundary of a round waits for some seconds
VOTE_S = 120.0  # the longest, and that of a head that was heard from once

# A microbatch is given up after this multiple of the head's median latency: queues make latencies vary by two or three.
DEADLINE_LATENCIES = 4.0
NUM_LATENCIES = 32  # that the median is taken over: some steps of the head
FIRST_DEADLINE_S = 120.0  # before a latency is measured: the first tasks compile and allocate
SHORTEST_DEADLINE_S = 10.0  # a loopback swarm is not to lose microbatches to a pause of the machine
LONGEST_DEADLINE_S = 600.0  # bounds how long a forged Want can hold room

# A head that lost a microbatch pauses, twice as long from one loss to the next, so that it does not use up its data.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 32.0

TICK_S = 0.25  # how often the driver calls `tick`
ASK_PATIENCE_S = 1.0  # a neighbour that does not answer a Want in this time is not waited for: the next one is asked
ASK_AGAIN_S = 5.0  # all neighbours are asked again after this: one may have room, or a frame was lost

# Forwards that one node has under way at a time: room is asked for one while others travel to different neighbours, as
# one alone rarely fills the uplink. With many, the room that they reserve would wait for the uplink of this node.
MAX_UNDER_WAY = 4
MAX_SINKS = 8  # in a Want: enough to choose from, and 400 bytes
MAX_WANTS_PER_PEER = 8  # queued for one neighbour, which asks for MAX_UNDER_WAY at a time, and may have lost others
FAIR_SHARES = 2.0  # that a head gets of the room of a step while others wait
MAX_HEADS = 1024  # remembered by a replica; those not heard from for longest are forgotten
SEEN_NUMBERS = 1024  # of each head: more than it launches within the longest deadline


def num_rooms(*, memory_bytes: int, microbatch_bytes: int, batch_tokens: int, microbatch_tokens: int) -> int:
    """Microbatches that a replica may hold, or a head have in flight; at least 1.

    microbatch_bytes: of one room, that is, the encoded input, the encoded output and the encoded gradient.
    """
    in_flight = int(IN_FLIGHT_SHARE * batch_tokens / microbatch_tokens)
    return max(1, min(in_flight, memory_bytes // microbatch_bytes))
