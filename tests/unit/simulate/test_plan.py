"""The values that --churn, --speeds and --link accept, and the messages for all others."""

from __future__ import annotations

import pytest

from noloco_p2p.errors import SettingsError
from noloco_p2p.simulate.plan import ABSENT_STEPS, Churn, Event, Plan, parse_churn, parse_links, parse_speeds


def test_churn_in_order_of_time() -> None:
    churn = parse_churn("leave:2@500, crash:0@20.5,join:3@100, lose:0.2,absent:.5", num_replicas=4)
    assert churn == Churn((Event("crash", 0, 20.5), Event("join", 3, 100.0), Event("leave", 2, 500.0)), 0.2, 0.5)
    assert churn.joins_at_s(3) == 100.0
    assert churn.joins_at_s(2) is None
    absent = [churn.is_absent("replica-0", step, seed=0) for step in range(10_000)]
    assert 0.45 < sum(absent) / len(absent) < 0.55
    assert all(len(set(absent[step : step + ABSENT_STEPS])) == 1 for step in range(0, len(absent), ABSENT_STEPS))
    assert parse_churn("", num_replicas=1) == Churn()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crash:4@20", r"crash:4@20: no such replica \(they are numbered 0 to 3\)"),
        ("lose:1.5", r"lose:1\.5 is neither an event"),
        ("explode:1@3", r"explode:1@3 is neither an event"),
        ("join:0@1,join:1@1,join:2@1,join:3@1", "must be present from the start"),
    ],
)
def test_bad_churn_is_named(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_churn(text, num_replicas=4)


def test_speeds_and_links_go_round() -> None:
    plan = Plan(3, step_s=2.0, speeds=parse_speeds("1,4"), links=parse_links(["cable", "weak-4g"]))
    assert [plan.seconds_per_step(number) for number in range(3)] == [2.0, 0.5, 2.0]
    assert [plan.link(number).name for number in range(3)] == ["cable", "weak-4g", "cable"]


@pytest.mark.parametrize("text", ["", "fast", "1,0", "1,-2", "nan", "inf"])
def test_bad_speeds_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--speeds"):
        parse_speeds(text)


def test_an_unknown_link_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"--link modem is unknown; choose from ideal, .*satellite"):
        parse_links(["modem"])
