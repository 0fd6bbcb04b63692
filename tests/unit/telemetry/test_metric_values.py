"""A script sets metrics to whatever its loop holds. A value that is no number is refused where it is set."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from noloco_p2p.errors import SettingsError
from noloco_p2p.telemetry.metrics import Metrics


@pytest.mark.parametrize(
    "value",
    [2.5, torch.tensor(2.5, requires_grad=True), torch.tensor([2.5]).bfloat16(), np.float32(2.5), np.array(2.5)],
    ids=lambda value: type(value).__name__,
)
def test_a_metric_takes_what_holds_one_number(value: Any) -> None:
    metrics = Metrics()
    metrics.loss = value
    assert type(metrics.loss) is float
    assert metrics.loss == 2.5


def test_whole_numbers_missing_values_and_nan_stay_what_they_are() -> None:
    metrics = Metrics(tokens=np.int64(7), loss=3)  # pyright: ignore[reportArgumentType]
    metrics.swaps += 1
    assert (metrics.tokens, type(metrics.tokens), metrics.swaps) == (7, int, 1)
    metrics.loss, metrics.tokens = math.nan, None
    assert math.isnan(metrics.loss)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss", "2.5", "metrics.loss must be one number, but it was set to a str"),
        ("loss", torch.ones(2), "metrics.loss must be one number, but it was set to a Tensor"),
        ("loss", 10**400, "metrics.loss must be one number"),
        ("loss", [2.5], "metrics.loss must be one number, but it was set to a list"),
        ("tokens", 2.5, "metrics.tokens must be a whole number of at least 0, but it was set to 2.5"),
        ("tokens", -1, "metrics.tokens must be a whole number of at least 0, but it was set to -1"),
        ("step", 2**60, "metrics.step must be a whole number"),
        ("last_partner", "a\nb", "metrics.last_partner must be a short printable text"),
        ("last_partner", "a" * 321, "metrics.last_partner must be a short printable text"),
        ("step", None, "metrics.step must be a whole number"),
        ("last_partner", 3, "metrics.last_partner must be a short printable text"),
    ],
)
def test_other_values_are_refused_by_name(name: str, value: object, message: str) -> None:
    metrics = Metrics()
    with pytest.raises(SettingsError, match=message):
        setattr(metrics, name, value)
    assert metrics == Metrics()


def test_a_metric_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no metric 'los'"):
        Metrics().los = 1.0  # pyright: ignore[reportAttributeAccessIssue]
