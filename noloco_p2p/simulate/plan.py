"""The input of a simulation: replicas, their speeds and links, and the events and faults that affect them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_p2p.errors import SettingsError
from noloco_p2p.testing.links import IDEAL, PROFILES, LinkProfile

EVENT = re.compile(r"(join|leave|crash):(?:(\d+)\.)?(\d+)@(\d+(?:\.\d+)?)")
RATE_AND_DELAY = re.compile(r"(\d+(?:\.\d+)?)mbit-(\d+(?:\.\d+)?)ms")
SHARE = re.compile(r"(lose|absent):(0?\.\d+|0|1)")
EXAMPLE = "join:8@300, leave:2@500, crash:3@200 (replica@virtual seconds), lose:0.2, absent:0.2 (shares)"
LISTED_S = 60.0  # how long a peer stays listed after a crash: the lifetime of a record
ABSENT_STEPS = 10  # inner steps for which a replica is absent


@dataclass(frozen=True, slots=True)
class Event:
    kind: Literal["join", "leave", "crash"]
    replica: int
    at_s: float  # on the virtual clock
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Churn:
    """The faults of a run, and the peers that join, leave or crash.

    `lose` is the share of calls whose connection breaks. The peers of such a call then look for other partners, as on a
    real network. `absent` is the share of stretches of ABSENT_STEPS inner steps in which a replica does not swap.
    """

    events: tuple[Event, ...] = ()
    lose: float = 0.0
    absent: float = 0.0

    def joins_at_s(self, replica: int, stage: int = 0) -> float | None:
        """Return the time at which a replica joins, or None if it is present from the start."""
        joins = (event for event in self.events if event.kind == "join")
        return next((event.at_s for event in joins if (event.stage, event.replica) == (stage, replica)), None)

    def is_absent(self, peer_id: str, step: int, *, seed: int) -> bool:
        """Return whether a replica is absent in its inner step `step`."""
        return random.Random(f"absent/{seed}/{peer_id}/{step // ABSENT_STEPS}").random() < self.absent


@dataclass(frozen=True, slots=True)
class Plan:
    """The input of a simulation. `num_replicas` includes replicas that join later.

    `step_s` is the virtual time of an inner step at speed 1. `speeds` and `links` have one item per replica. If there
    are fewer items, they are repeated.
    """

    num_replicas: int
    seed: int = 0
    step_s: float = 1.0
    speeds: tuple[float, ...] = (1.0,)
    links: tuple[LinkProfile, ...] = (IDEAL,)
    churn: Churn = Churn()
    evaluations: int = 4  # number of points on the curve of the validation loss, after the one at the start

    def seconds_per_step(self, replica: int) -> float:
        return self.step_s / self.speeds[replica % len(self.speeds)]

    def link(self, replica: int) -> LinkProfile:
        return self.links[replica % len(self.links)]


def peer_name(replica: int) -> str:
    """Return the peer id of a replica, which also determines the order of its data."""
    return f"replica-{replica}"


def parse_churn(text: str, *, num_replicas: int | tuple[int, ...]) -> Churn:
    """Parse comma-separated items such as those in EXAMPLE. Raises SettingsError if an item is invalid, and names it in
    the message.

    In a run with stages, `num_replicas` has one number per stage, and events also name the stage of a replica, for
    example `crash:1.2@200`.
    """
    stages = (num_replicas,) if isinstance(num_replicas, int) else num_replicas
    events: list[Event] = []
    shares = {"lose": 0.0, "absent": 0.0}
    for item in filter(None, (part.strip() for part in text.split(","))):
        if match := EVENT.fullmatch(item):
            events.append(_event(match, item, stages))
        elif match := SHARE.fullmatch(item):
            shares[match[1]] = float(match[2])
        else:
            raise SettingsError(f"--churn {item} is neither an event nor a share; examples: {EXAMPLE}")
    churn = Churn(tuple(sorted(events, key=lambda event: event.at_s)), **shares)
    for stage, num in enumerate(stages):
        if all(churn.joins_at_s(replica, stage) is not None for replica in range(num)):
            of_stage = f" of stage {stage}" if len(stages) > 1 else ""
            raise SettingsError(
                f"--churn: at least one replica{of_stage} must be present from the start as a donor for the others"
            )
    return churn


def _event(match: re.Match[str], item: str, stages: tuple[int, ...]) -> Event:
    kind, stage, replica, at_s = match.groups()
    if (stage is not None) != (len(stages) > 1):
        wanted = "a stage and a replica, as in crash:1.2@200" if stage is None else "only a replica, as in crash:2@200"
        raise SettingsError(f"--churn {item} must name {wanted}")
    index = int(stage or 0)
    if index >= len(stages):
        raise SettingsError(f"--churn {item}: no such stage (they are numbered 0 to {len(stages) - 1})")
    if int(replica) >= stages[index]:
        raise SettingsError(
            f"--churn {item}: no such replica (they are numbered 0 to {stages[index] - 1}); increase --replicas"
        )
    assert kind in ("join", "leave", "crash")
    return Event(kind, int(replica), float(at_s), index)


def parse_speeds(text: str) -> tuple[float, ...]:
    """Parse relative speeds like `1,1,2,4`. Raises SettingsError if they are not positive numbers."""
    try:
        speeds = tuple(float(part) for part in text.split(","))
    except ValueError:
        speeds = ()
    if not speeds or not all(0 < speed < float("inf") for speed in speeds):
        raise SettingsError(f"--speeds {text} is invalid: give comma-separated numbers above 0, for example 1,1,2,4")
    return speeds


def parse_links(names: Sequence[str]) -> tuple[LinkProfile, ...]:
    """Parse links, each of which is the name of a profile, or a rate and a delay such as `100mbit-50ms`.

    `100mbit-50ms` is a link with 100 Mbit/s in each direction, and with 50 ms of delay between two peers with such
    links.
    """
    return tuple(_link(name) for name in names) or (IDEAL,)


def _link(name: str) -> LinkProfile:
    if match := RATE_AND_DELAY.fullmatch(name):
        rate, delay_ms = float(match[1]), float(match[2])
        if rate > 0:
            return LinkProfile(name, down_mbit_s=rate, up_mbit_s=rate, delay_ms=delay_ms / 2, jitter_ms=0)
    if name not in PROFILES:
        raise SettingsError(
            f"--link {name} is unknown; choose from {', '.join(PROFILES)}, or give a rate and a delay, such as "
            "100mbit-50ms"
        )
    return PROFILES[name]
