"""The means of the stages form the whole model: exported from a live run, or evaluated from checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from donors import Crowd, Donor, use
from harness.identities import identity_of
from safetensors.torch import load_file, save_file
from staged_reference import spec_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from noloco_p2p.cli.app import run
from noloco_p2p.errors import CheckpointError
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.outer.checkpoint import Checkpoints
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.peer.run_folder import stage_folder
from noloco_p2p.peer_name import named
from noloco_p2p.presets import render
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.cut import cut_of
from noloco_p2p.trainer.model import build_model
from noloco_p2p.trainer.stage import build_part, build_stage
from noloco_p2p.trainer.start import load_start
from noloco_p2p.trainer.swarm_evaluation import evaluate_swarm, spread
from noloco_p2p.transfer.donor import SavedState, describe_state

NUM_STAGES, NUM_REPLICAS = 3, 2
PROGRESS, ROUND = 0.5, 2
SPECS = {tied: spec_of(NUM_STAGES, **{"model.tied_embeddings": tied}) for tied in (True, False)}


def layout_of(spec: TrainerSpec, stage: int) -> FlatParameters:
    length = spec.data.sequence_length
    return FlatParameters(build_part(spec.model, cut_of(spec), index=stage, sequence_length=length))


def replica(spec: TrainerSpec, number: int) -> dict[str, Tensor]:
    """Return the initial weights of the whole model, with small noise that differs between replicas."""
    model = build_model(spec.model, sequence_length=spec.data.sequence_length)
    draws = torch.Generator().manual_seed(number)
    return {
        name: param.detach() + 0.001 * torch.randn(param.shape, generator=draws)
        for name, param in model.named_parameters()
    }


def stage_of(spec: TrainerSpec, stage: int, weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].flatten() for name, _ in layout_of(spec, stage).named])


def mean_of_replicas(spec: TrainerSpec) -> dict[str, Tensor]:
    replicas = [replica(spec, number) for number in range(NUM_REPLICAS)]
    return {name: torch.stack([each[name] for each in replicas]).mean(0) for name in replicas[0]}


def peer(stage: int, number: int) -> str:
    return identity_of(f"stage {stage} replica {number}").peer_id


def saved(spec: TrainerSpec, stage: int, weights: Tensor, path: Path) -> SavedState:
    flat = layout_of(spec, stage)
    save_file({"weights": weights}, path)
    return describe_state(path, layout=flat.layout(), num_elements=flat.num_elements, progress=PROGRESS)


def crowd_of(spec: TrainerSpec, folder: Path) -> Crowd:
    """Return a crowd in which every replica holds one stage."""
    assert not spec.outer.keeps_momentum
    crowd = Crowd(spec)
    for stage in range(NUM_STAGES):
        for number in range(NUM_REPLICAS):
            own = stage_of(spec, stage, replica(spec, number))
            name = peer(stage, number)
            candidate = Candidate(name, name, progress=PROGRESS, stage=stage)
            crowd.add(candidate, saved(spec, stage, own, folder / f"{stage}-{number}.safetensors"))
    return crowd


@pytest.mark.parametrize("tied", [True, False])
def test_the_export_of_a_live_run_is_the_mean_and_loads_in_transformers(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, folder = SPECS[tied], tmp_path / "model"
    ticket = use(crowd_of(spec, tmp_path), monkeypatch)
    assert run(["export", "--merge", ticket, str(folder)]) == 0
    out = capsys.readouterr().out
    assert [f"stage {stage}: the mean of 2 peers" in out for stage in range(NUM_STAGES)] == [True] * NUM_STAGES
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    expected = mean_of_replicas(spec)
    assert dict(model.named_parameters()).keys() == expected.keys()
    for name, param in model.named_parameters():
        assert torch.allclose(param, expected[name], atol=1e-7), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.dtype == torch.float32
    assert model.config.use_cache
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id == 1
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-0000{stage + 1}-of-00003.safetensors" for stage in range(NUM_STAGES)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {name: file for file in files for name in load_file(folder / file)}
    assert index["weight_map"] == held
    assert held.keys() == expected.keys(), "a tied tensor is there once"


def test_a_lie_is_left_out_of_its_stage_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, liar = SPECS[True], identity_of("liar").peer_id
    crowd = crowd_of(spec, tmp_path)
    weights = torch.full_like(stage_of(spec, 1, replica(spec, 0)), torch.nan)
    candidate = Candidate(liar, liar, progress=PROGRESS, stage=1)
    crowd.add(candidate, saved(spec, 1, weights, tmp_path / "lie.safetensors"))
    assert run(["export", "--merge", use(crowd, monkeypatch), str(tmp_path / "model")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("stage 1: the mean of 2 peers") == 1
    told = [line for line in lines if "was left out" in line]
    assert len(told) == 1
    assert told[0].startswith(f"the state of {named(liar)} was left out: ")


def test_a_stage_that_nobody_holds_is_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    crowd = crowd_of(SPECS[True], tmp_path)
    crowd.candidates = [each for each in crowd.candidates if each.stage != 2]
    assert run(["export", "--merge", use(crowd, monkeypatch), str(tmp_path / "model")]) != 0
    printed = capsys.readouterr()
    assert "no peer of stage 2 of staged can be reached at the moment" in printed.err
    assert "fetching" not in printed.out
    assert not (tmp_path / "model").exists()


def test_a_stage_of_which_nobody_gives_a_state_is_named_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    crowd = crowd_of(SPECS[True], tmp_path)
    for number in range(NUM_REPLICAS):
        cast(Donor, crowd.network.service(peer(1, number))).states.saved = None
    (tmp_path / "exports").mkdir()
    assert run(["export", "--merge", use(crowd, monkeypatch), str(tmp_path / "exports" / "model")]) != 0
    assert "none of the 2 live peers of stage 1 of staged provided a usable state" in capsys.readouterr().err
    assert not list((tmp_path / "exports").iterdir())


@pytest.mark.parametrize(
    ("changes", "cut"),
    [
        (["outer.alpha=0.3", f"run_key={identity_of('a').peer_id}"], (1, 1, 1)),
        (["pipeline.stages=2"], (1, 2)),
        (["pipeline.stages=2", "pipeline.cut=[2, 1]"], (2, 1)),
        (["pipeline.stages=1"], "auto"),
    ],
    ids=["as-it-was", "fewer-stages", "another-cut", "whole"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_fork_begins_with_the_weights_of_every_stage(
    tied: bool,
    changes: list[str],
    cut: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each stage of the new run reads its own part, and the weights of each old stage are those of one replica."""
    old, new = SPECS[tied], tmp_path / "new.toml"
    ticket, state_dir = use(crowd_of(old, tmp_path), monkeypatch), tmp_path / "state"
    sets = [part for change in changes for part in ("--set", change)]
    assert run(["fork", ticket, str(new), "--state-dir", str(state_dir), *sets]) == 0
    spec, length = TrainerSpec.load(new), old.data.sequence_length
    assert (spec.name, spec.pipeline.cut) == ("staged-fork", cut)
    assert (" --run-key FILE" in capsys.readouterr().out) == bool(spec.run_key)
    if spec.pipeline.stages == 1:
        models = [build_model(spec.model, sequence_length=length)]
    else:
        stages = range(spec.pipeline.stages)
        models = [build_stage(spec.model, cut_of(spec), index=stage, sequence_length=length).model for stage in stages]
    found: dict[str, Tensor] = {}
    for model in models:
        load_start(model, spec.model.start, state_dir=state_dir)
        found |= {name: param.detach() for name, param in model.named_parameters()}
    replicas = [replica(old, number) for number in range(NUM_REPLICAS)]
    assert found.keys() == replicas[0].keys()
    for stage in range(NUM_STAGES):
        names = [name for name, _ in layout_of(old, stage).named]
        assert any(all(torch.equal(found[name], each[name]) for name in names) for each in replicas), stage


@pytest.mark.parametrize("cut", [(1, 2), "auto"])
def test_a_whole_model_can_be_forked_into_stages(cut: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = spec_of(1, **{"model.num_layers": 3, "model.parameter_seeds": False})
    weights, crowd = replica(old, 0), Crowd(old)
    model = build_model(old.model, sequence_length=old.data.sequence_length)
    flat = FlatParameters(model)
    vector = torch.cat([weights[name].flatten() for name, _ in flat.named])
    save_file({"weights": vector}, tmp_path / "state.safetensors")
    state = describe_state(
        tmp_path / "state.safetensors",
        layout=flat.layout(),
        num_elements=flat.num_elements,
        progress=PROGRESS,
    )
    crowd.add(Candidate(peer(0, 0), peer(0, 0), progress=PROGRESS), state)
    new, ticket = tmp_path / "new.toml", use(crowd, monkeypatch)
    sets = ["--set", "pipeline.stages=2"] + (["--set", "pipeline.cut=[1, 2]"] if cut != "auto" else [])
    assert run(["fork", ticket, str(new), "--state-dir", str(tmp_path / "state"), *sets]) == 0
    spec = TrainerSpec.load(new)
    assert spec.pipeline.cut == (1, 2)
    stage = build_stage(spec.model, (1, 2), index=1, sequence_length=old.data.sequence_length)
    load_start(stage.model, spec.model.start, state_dir=tmp_path / "state")
    for name, param in stage.model.named_parameters():
        assert torch.equal(param, weights[name]), name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("pipeline.stages=9", "pipeline.stages is 9, but the model has only 3 blocks"),
        ("pipeline.cut=[2, 2, 2]", "pipeline.cut lists 6 blocks in total, but model.num_layers is 3"),
        ("model.num_layers=4", "the model cannot change"),
    ],
)
def test_a_fork_that_cannot_be_cut_is_refused_before_anything_is_fetched(
    change: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticket = use(crowd_of(SPECS[True], tmp_path), monkeypatch)
    arguments = ["fork", ticket, str(tmp_path / "new.toml"), "--state-dir", str(tmp_path / "state"), "--set", change]
    assert run(arguments) != 0
    printed = capsys.readouterr()
    assert said in printed.err
    assert "fetching" not in printed.out
    assert not list(tmp_path.glob("state/starts/*"))


def checkpoints_of(spec: TrainerSpec, folder: Path) -> list[list[Path]]:
    """Write a checkpoint of each peer; return their folders by stage."""
    kept: list[list[Path]] = []
    for stage in range(NUM_STAGES):
        flat, own = layout_of(spec, stage), [folder / f"{stage}-{number}" for number in range(NUM_REPLICAS)]
        place = {"layout": flat.layout(), "tensors": flat.model_layout.as_json().decode()}
        for number, run_folder in enumerate(own):
            Checkpoints(stage_folder(run_folder, stage)).save(
                1,
                files={"weights": {"weights": stage_of(spec, stage, replica(spec, number))}},
                meta={"spec": spec.model_dump(mode="json"), "outer": place},
            )
        kept.append(own)
    return kept


@pytest.mark.parametrize("tied", [True, False])
def test_the_judge_puts_the_means_of_the_stages_together(tied: bool, tmp_path: Path) -> None:
    spec = SPECS[tied]
    evaluation = evaluate_swarm(spec, [*checkpoints_of(spec, tmp_path)])
    expected = mean_of_replicas(spec)
    for name, param in evaluation.model.named_parameters():
        assert torch.allclose(param, expected[name], atol=1e-7), name
    replicas = [
        torch.cat([values.flatten() for values in replica(spec, number).values()]) for number in range(NUM_REPLICAS)
    ]
    mean = torch.cat([values.flatten() for values in expected.values()])
    assert evaluation.spread == pytest.approx(spread(replicas, mean), rel=1e-4)
    assert 5 < evaluation.merged_loss < 7, "the start, of 384 tokens"


def test_the_judge_names_a_stage_without_a_checkpoint(tmp_path: Path) -> None:
    folders = checkpoints_of(SPECS[True], tmp_path)
    (tmp_path / "nobody").mkdir()
    with pytest.raises(CheckpointError, match="no peer of stage 1 has written a checkpoint"):
        evaluate_swarm(SPECS[True], [folders[0], [tmp_path / "nobody"], folders[2]])


@pytest.mark.parametrize("command", ["export", "evaluate", "fork"])
def test_a_checkpoint_of_one_stage_is_no_model(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = checkpoints_of(SPECS[True], tmp_path)[1][0]
    (tmp_path / "run.toml").write_text(render(SPECS[True]))
    target = [str(tmp_path / "model")] if command == "export" else []
    for folder in (run_folder, stage_folder(run_folder, 1), next(stage_folder(run_folder, 1).glob("0*"))):
        arguments = [command, str(folder), *target]
        if command == "fork":
            arguments = ["fork", str(tmp_path / "run.toml"), str(tmp_path / "model"), "--checkpoint", str(folder)]
            arguments += ["--state-dir", str(tmp_path / "state")]
        assert run(arguments) != 0
        error = capsys.readouterr().err
        assert "contains only one of the 3 stages of the run staged, not a whole model" in error
        assert "`noloco export TICKET DIR --merge`" in error
        assert "`noloco fork TICKET NEW.toml`" in error
    assert not (tmp_path / "model").exists()
