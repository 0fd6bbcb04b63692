"""The seed decides which demo peer is killed and when: one at a time, and not before all peers have started."""

from __future__ import annotations

import random

from noloco_p2p.demo.processes import DemoPeer
from noloco_p2p.demo.swarm import Chaos


class Puppet(DemoPeer):
    """A peer that is back as soon as it restarts, unless a test says otherwise."""

    def __init__(self, story: list[str], name: str) -> None:
        self.has_begun = True
        self.done = False
        self._story = story
        self._name = name

    def is_done(self) -> bool:
        return self.done

    def is_back(self) -> bool:
        return self.has_begun

    def kill(self) -> None:
        self._story.append(f"kill {self._name}")

    def start(self, target: str) -> None:
        self._story.append(f"{target} {self._name}")


def story_of(seed: int, *, seconds: int = 200, done: tuple[int, ...] = (), late: bool = False) -> list[str]:
    story: list[str] = []
    peers = [Puppet(story, str(number)) for number in range(3)]
    peers[2].has_begun = not late
    for number in done:
        peers[number].done = True
    chaos = Chaos(peers, ticket="start", seed=seed, now_s=0.0)
    for now_s in range(seconds):
        chaos.step(float(now_s))
    return story


def test_everybody_who_is_killed_comes_back_before_the_next() -> None:
    story = story_of(1)
    assert len(story) >= 10
    for kill, start in zip(story[::2], story[1::2], strict=False):
        assert kill.replace("kill", "start") == start


def test_the_seed_tells_the_story() -> None:
    assert story_of(5) == story_of(5)
    assert len({tuple(story_of(seed)) for seed in random.Random(0).sample(range(99), 5)}) > 1


def test_who_is_done_is_left_alone_and_so_is_the_last_one_and_nobody_dies_before_all_have_begun() -> None:
    assert not any("1" in line for line in story_of(1, done=(1,)))
    assert story_of(1, done=(0, 1)) == [], "the last one comes to its end"
    assert story_of(1, late=True) == []
