"""What a simulation is asked to do: replicas, their speeds and links, and what happens to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_p2p.errors import SettingsError
from noloco_p2p.optim.gates import LIMITS, GateLimits
from noloco_p2p.simulate.network import IDEAL, LINKS
from noloco_p2p.testing.link_proxy import LinkProfile

EVENT = re.compile(r"(join|leave|crash):(\d+)@(\d+(?:\.\d+)?)")
SHARE = re.compile(r"(lose|absent):(0?\.\d+|0|1)")
EXAMPLE = "join:8@300, leave:2@500, crash:3@200 (replica@virtual seconds), lose:0.2, absent:0.2 (shares)"


@dataclass(frozen=True, slots=True)
class Event:
    kind: Literal["join", "leave", "crash"]
    replica: int
    at_s: float  # on the virtual clock


@dataclass(frozen=True, slots=True)
class Churn:
    """What goes wrong, and who comes and goes.

    lose: share of calls whose connection breaks on the way; the peers then look for others, as they do on a network.
    absent: share of the rounds in which a replica cannot be reached from the opening to the end: a lonely round.
    """

    events: tuple[Event, ...] = ()
    lose: float = 0.0
    absent: float = 0.0

    def joins_at_s(self, replica: int) -> float | None:
        """None for a replica that is there from the start."""
        return next((event.at_s for event in self.events if (event.kind, event.replica) == ("join", replica)), None)


@dataclass(frozen=True, slots=True)
class Plan:
    """num_replicas: those that join later are counted, too.

    step_s: virtual seconds of an inner step at speed 1. speeds, links: one each for a replica, used again from the
    front when there are fewer.
    """

    num_replicas: int
    seed: int = 0
    step_s: float = 1.0
    speeds: tuple[float, ...] = (1.0,)
    links: tuple[LinkProfile, ...] = (IDEAL,)
    churn: Churn = Churn()
    gates: GateLimits = LIMITS  # of all replicas
    attackers: tuple[tuple[int, str], ...] = ()  # replica, name of its `hostile.Attack`; results do not count them
    evaluations: int = 4  # points of the curve of validation loss

    def seconds_per_step(self, replica: int) -> float:
        return self.step_s / self.speeds[replica % len(self.speeds)]

    def link(self, replica: int) -> LinkProfile:
        return self.links[replica % len(self.links)]


def parse_churn(text: str, *, num_replicas: int) -> Churn:
    """Items with commas between them, as in EXAMPLE. Raises SettingsError that names the item."""
    events: list[Event] = []
    shares = {"lose": 0.0, "absent": 0.0}
    for item in filter(None, (part.strip() for part in text.split(","))):
        if match := EVENT.fullmatch(item):
            kind, replica, at_s = match.groups()
            if int(replica) >= num_replicas:
                raise SettingsError(f"--churn {item}: replicas are 0 to {num_replicas - 1}; raise --replicas")
            assert kind in ("join", "leave", "crash")
            events.append(Event(kind, int(replica), float(at_s)))
        elif match := SHARE.fullmatch(item):
            shares[match[1]] = float(match[2])
        else:
            raise SettingsError(f"--churn {item}: is none of {EXAMPLE}")
    churn = Churn(tuple(sorted(events, key=lambda event: event.at_s)), **shares)
    if all(churn.joins_at_s(replica) is not None for replica in range(num_replicas)):
        raise SettingsError("--churn: one replica at least must be there from the start, as the donor of the others")
    return churn


def parse_speeds(text: str) -> tuple[float, ...]:
    """`1,1,2,4`: relative speeds. Raises SettingsError."""
    try:
        speeds = tuple(float(part) for part in text.split(","))
    except ValueError:
        speeds = ()
    if not speeds or not all(0 < speed < float("inf") for speed in speeds):
        raise SettingsError(f"--speeds {text}: must be numbers above 0 with commas between them, for example 1,1,2,4")
    return speeds


def parse_links(names: Sequence[str]) -> tuple[LinkProfile, ...]:
    """Names of profiles. Raises SettingsError."""
    for name in names:
        if name not in LINKS:
            raise SettingsError(f"--link {name}: must be one of {', '.join(LINKS)}")
    return tuple(LINKS[name] for name in names) or (IDEAL,)
