"""Defines and parses the input of a simulation of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from noloco_p2p.errors import SettingsError
from noloco_p2p.flow.limits import IN_FLIGHT_SHARE
from noloco_p2p.simulate.network import IDEAL
from noloco_p2p.simulate.plan import Churn
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.links import LinkProfile

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """The input of a simulation of a pipeline.

    `num_replicas` has one number per stage, and includes replicas that join later. `step_s` is the virtual time in
    which a peer at speed 1 would take an inner step of the whole model without recomputation. Each task takes time in
    proportion to its FLOPs. `speeds` and `links` have the values of each stage in turn; the last ones also apply to all
    later stages.

    `window` is the number of microbatches that a head may have in flight, and that a replica may hold; None means as
    many as `flow.limits` allows. If `gossips` is False, replicas never mix.
    """

    num_replicas: tuple[int, ...]
    seed: int = 0
    step_s: float = 1.0
    speeds: tuple[tuple[float, ...], ...] = ((1.0,),)
    links: tuple[tuple[LinkProfile, ...], ...] = ((IDEAL,),)
    churn: Churn = field(default_factory=Churn)
    window: int | None = None
    gossips: bool = True
    evaluations: int = 4

    @property
    def num_stages(self) -> int:
        return len(self.num_replicas)

    def speed(self, stage: int, replica: int) -> float:
        return _of(self.speeds, stage, replica)

    def link(self, stage: int, replica: int) -> LinkProfile:
        return _of(self.links, stage, replica)

    def num_rooms(self, spec: TrainerSpec) -> int:
        """Return the number of microbatches that a head may have in flight, and that a replica may hold."""
        in_flight = int(IN_FLIGHT_SHARE * spec.train.batch_size / spec.pipeline.microbatch)
        return max(1, in_flight) if self.window is None else self.window


def _of(lists: tuple[tuple[T, ...], ...], stage: int, replica: int) -> T:
    own = lists[min(stage, len(lists) - 1)]
    return own[replica % len(own)]


def parse_replicas(text: str, *, num_stages: int) -> tuple[int, ...]:
    """Parse one number for all stages (`8`) or one per stage (`4,8,4`). Raises SettingsError if it is neither."""
    parts = text.split(",")
    numbers = tuple(int(part) for part in parts if part.strip().isdigit())
    if len(numbers) != len(parts) or not all(1 <= number <= 256 for number in numbers):
        raise SettingsError(
            f"--replicas {text} is invalid: give a number from 1 to 256, or one number per stage, such as 4,8,4"
        )
    if len(numbers) not in (1, num_stages):
        raise SettingsError(f"--replicas {text} has {len(numbers)} numbers, but the number of stages is {num_stages}")
    return numbers * (num_stages // len(numbers))


def by_stage(
    text: str, parse: Callable[[str], tuple[T, ...]], *, num_stages: int, flag: str
) -> tuple[tuple[T, ...], ...]:
    """Parse lists of values for each stage, separated by slashes. The last list also applies to all later stages.

    Raises SettingsError if there are more lists than stages.
    """
    lists = tuple(parse(part) for part in text.split("/"))
    if len(lists) > num_stages:
        raise SettingsError(f"{flag} {text} has lists for {len(lists)} stages, but there are only {num_stages}")
    return lists
