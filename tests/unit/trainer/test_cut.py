"""The cut of a model into stages, and the traffic between them."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.errors import SettingsError, SpecError
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import ModelSpec, PipelineSpec, TrainerSpec, TrainSpec
from noloco_p2p.trainer.cut import (
    Part,
    Sizes,
    auto_cut,
    block_range,
    bytes_per_token,
    check_stages,
    cut_of,
    filling_tokens,
    link_tokens_per_s,
)
from noloco_p2p.trainer.loop import Trainer
from noloco_p2p.trainer.needs import training_bytes

BLOCK = Part(num_parameters=100, num_matrix_parameters=90, flops=800.0)
INT8 = PipelineSpec(stages=4)


def sizes(num_blocks: int, vocabulary: Part) -> Sizes:
    return Sizes(num_blocks, BLOCK, vocabulary, hidden_size=4096)


def largest_share(sized: Sizes, cut: tuple[int, ...]) -> float:
    stages = [sized.stage(cut, index) for index in range(len(cut))]
    num_parameters = sum(stage.num_parameters for stage in stages)
    flops = sum(stage.flops for stage in stages)
    return max(max(stage.num_parameters / num_parameters, stage.flops / flops) for stage in stages)


@given(
    num_blocks=st.integers(1, 8),
    num_stages=st.integers(1, 4),
    parameters=st.integers(0, 2000),
    flops=st.floats(0, 20_000),
)
def test_no_cut_has_a_smaller_largest_stage(num_blocks: int, num_stages: int, parameters: int, flops: float) -> None:
    sized = sizes(num_blocks, Part(parameters, 0, flops))
    if num_stages > num_blocks:
        with pytest.raises(
            SpecError, match=rf"pipeline\.stages is {num_stages}, but the model has only {num_blocks} blocks"
        ):
            auto_cut(sized, num_stages)
        return
    cut = auto_cut(sized, num_stages)
    own = [number for index in range(num_stages) for number in block_range(cut, index)]
    assert own == list(range(num_blocks))
    assert min(cut) >= 1
    others = (other for other in product(range(1, num_blocks + 1), repeat=num_stages) if sum(other) == num_blocks)
    assert largest_share(sized, cut) <= min(largest_share(sized, other) for other in others) + 1e-12


def test_a_vocabulary_takes_the_place_of_blocks_in_the_head() -> None:
    assert auto_cut(sizes(12, Part(0, 0, 0.0)), 4) == (3, 3, 3, 3)
    assert auto_cut(sizes(12, Part(300, 0, 1600.0)), 3) == (2, 5, 5)
    assert auto_cut(sizes(12, Part(5000, 0, 1600.0)), 3) == (1, 5, 6)
    by_flops = Part(0, 0, 2400.0)
    assert auto_cut(sizes(12, by_flops), 3) == (2, 5, 5)


def test_a_cut_that_is_not_made_is_refused_with_the_command_that_makes_it() -> None:
    spec = TrainerSpec(name="r", model=ModelSpec(parameter_seeds=True), pipeline=PipelineSpec(stages=2))
    with pytest.raises(SpecError, match=r"pipeline\.cut is 'auto'.* `noloco init --stages 2` writes a spec"):
        cut_of(spec)


def test_links_carry_what_the_arithmetic_says() -> None:
    """An inner peer moves 2 b bytes per token each way; the model is 4,096 wide and the link has 100 Mbit/s."""
    carried = {name: (bytes_per_token(name, 4096), _rate(name)) for name in ("fp32", "bf16", "int8")}
    assert carried == {"fp32": (16384, 381), "bf16": (8192, 763), "int8": (4160, 1502)}
    assert bytes_per_token("int8", 160) == 160 + 2 * 2
    mixed = PipelineSpec(activations="bf16", gradients="int8")
    assert link_tokens_per_s(mixed, 4096, mbit_s=8) == 1e6 / (8192 + 4160)


def _rate(codec: str) -> int:
    pipeline = PipelineSpec.model_validate({"activations": codec, "gradients": codec})
    return round(link_tokens_per_s(pipeline, 4096, mbit_s=100))


def test_a_quarter_of_the_smallest_batch_is_four_times_what_one_path_holds() -> None:
    one = filling_tokens(INT8, 4096, sequence_length=2048, mbit_s=100)
    rate = link_tokens_per_s(INT8, 4096, mbit_s=100)
    hops_s = 4 * (2048 / rate + 2 * 0.1)  # both directions
    assert one == round(4 * 4 * rate * hops_s) == 150_303
    assert filling_tokens(INT8, 4096, sequence_length=512, mbit_s=100) == 51_999


def test_memory_counts_one_moment_of_what_muon_takes() -> None:
    spec = TrainerSpec(name="r")
    assert training_bytes(spec, num_parameters=100, num_matrix_parameters=90) == 100 * (4 + 4 + 8)
    muon = spec.with_changes({"train.inner_optimizer": "muon", "outer.alpha": 0.3})
    assert training_bytes(muon, num_parameters=100, num_matrix_parameters=90) == 100 * (8 + 8) + 90 * 4 + 10 * 8


def test_what_a_run_with_stages_cannot_do_is_refused() -> None:
    staged = TrainerSpec(
        name="r",
        model=ModelSpec(parameter_seeds=True),
        train=TrainSpec(),
        pipeline=PipelineSpec(stages=2, cut=(2, 2)),
    )
    assert cut_of(staged) == (2, 2)
    check_stages(TrainerSpec(name="r"), PeerSettings(gpus=2))
    with pytest.raises(SettingsError, match="--gpus is not yet supported in a run with stages"):
        check_stages(staged, PeerSettings(gpus=2))
    check_stages(staged, PeerSettings(stage=1))
    with pytest.raises(SettingsError, match="--stage 1 cannot be used: the run r has no stages"):
        check_stages(TrainerSpec(name="r"), PeerSettings(stage=1))
    peer: Any = SimpleNamespace(spec=TrainerSpec(name="r"), settings=PeerSettings(stage=1, device="cpu"))
    with pytest.raises(SettingsError, match="--stage 1 cannot be used: the run r has no stages"):
        Trainer(peer, say=print)  # with a ticket, too, as its spec is not known before
    with pytest.raises(SpecError, match=r"pipeline\.cut is 'auto'"):
        check_stages(staged.with_changes({"pipeline.cut": "auto"}), PeerSettings())
