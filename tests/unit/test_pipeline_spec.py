"""Stages in a run spec: they are in the digest, and invalid ones are refused by their dotted name."""

from __future__ import annotations

import pytest

from noloco_p2p.errors import SpecError
from noloco_p2p.spec import TrainerSpec

WHOLE = TrainerSpec(name="mine")
STAGED = WHOLE.with_changes(
    {"model.parameter_seeds": True, "pipeline.stages": 3, "pipeline.cut": [1, 2, 1], "pipeline.gradients": "bf16"}
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline.stages": 0}, "pipeline.stages must be "),
        ({"pipeline.cut": "even"}, "pipeline.cut 'even' must be 'auto' or list a positive number of blocks"),
        ({"pipeline.cut": [2, 0, 2]}, "pipeline.cut '[2, 0, 2]' must be 'auto' or list"),
        ({"pipeline.cut": [2, True, 1]}, "pipeline.cut '[2, True, 1]' must be 'auto' or list"),
        ({"pipeline.cut": []}, "pipeline.cut '[]' must be 'auto' or list"),
        ({"pipeline.cut": [2, 2]}, "pipeline.cut lists 2 stages, but pipeline.stages is 3"),
        ({"pipeline.cut": [2, 2, 2]}, "change: pipeline.cut lists 6 blocks in total, but model.num_layers is 4"),
        ({"pipeline.microbatch": 17}, "pipeline.microbatch (17) must be at most train.batch_size (16)"),
        ({"pipeline.activations": "modulo"}, "pipeline.activations must be "),
        ({"pipeline.routing": "best"}, "pipeline.routing must be "),
        ({"model.parameter_seeds": False}, "model.parameter_seeds must be true in a run with stages"),
        ({"model.lora.rank": 4}, "model.lora.rank must be 0 in a run with stages"),
    ],
)
def test_stages_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as error:
        STAGED.with_changes(changes)
    assert message in str(error.value)


def test_a_cut_of_a_model_by_name_is_checked_when_the_model_is_known() -> None:
    named = STAGED.with_changes({"model.pretrained": "mine", "pipeline.cut": [9, 9, 9]})
    assert named.pipeline.cut == (9, 9, 9)
