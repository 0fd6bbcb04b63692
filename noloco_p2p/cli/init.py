"""Implements the command `noloco init`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noloco_p2p.cli.options import takes_settings
from noloco_p2p.errors import SettingsError
from noloco_p2p.settings import PeerSettings

if TYPE_CHECKING:
    from noloco_p2p.spec import TrainerSpec


@takes_settings("models")
def init(
    file: Annotated[Path, typer.Argument(help="Where to write the run spec.")] = Path("run.toml"),
    preset: Annotated[
        str,
        typer.Option(
            help="tiny, small, medium or large (the last three are the paper's sizes), or paper (the paper's "
            "exact outer step)."
        ),
    ] = "tiny",
    name: Annotated[str | None, typer.Option(help="Name of the run.", show_default="the preset")] = None,
    private: Annotated[
        bool,
        typer.Option(
            "--private", help="Let only peers with an invitation join. The run key is written next to the spec."
        ),
    ] = False,
    stages: Annotated[
        int,
        typer.Option(min=1, help="Cut the model into this many stages, and print what each stage needs."),
    ] = 1,
    pretrained: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The pretrained model and tokenizer to start from.", show_default=False),
    ] = None,
    *,
    settings: PeerSettings,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented run spec."""
    from noloco_p2p.presets import PRESETS, describe_size, render

    if preset not in PRESETS:
        raise SettingsError(f"--preset {preset}: no such preset; choose one of {', '.join(PRESETS)}")
    if file.exists() and not force:
        raise SettingsError(f"{file} already exists; choose another name, or overwrite it with --force")
    spec = PRESETS[preset]
    if name:
        spec = spec.with_changes({"name": name}, origin="--name")
    if pretrained:
        changes = {"model.pretrained": pretrained, "data.tokenizer": pretrained}
        spec = spec.with_changes(changes, origin="--pretrained")
    needs: list[str] = []
    if stages > 1:
        spec, needs = _in_stages(spec, stages, settings.models)
    key_file = file.with_suffix(".key")
    if private:
        spec = spec.with_changes({"run_key": _run_key(key_file)}, origin="--private")
    try:
        file.write_text(render(spec), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{file} cannot be written: {error}") from None
    how = f"{file} --run-key {key_file}" if private else f"{file}"
    if needs:
        how += " --stage 0"
    print(f"wrote {file}: {describe_size(spec)}; start the run with: noloco join {how}")
    for line in needs:
        print(line)
    if private:
        print(f"{key_file} is the run key, which signs invitations. Back it up and keep it secret.")
        print("each ticket is an invitation; `noloco ticket --run-key FILE --expires 7d` creates one that expires")


def _in_stages(spec: TrainerSpec, num_stages: int, folders: dict[str, str]) -> tuple[TrainerSpec, list[str]]:
    """Return the spec with `pipeline.cut` filled in, and lines that say what each stage needs. This imports torch,
    which takes seconds.

    Raises SpecError or ModelError if the model cannot be cut into `num_stages` stages.
    """
    from noloco_p2p.trainer.stage_needs import StageNeeds

    needs = StageNeeds.of(spec, num_stages, folders=folders)
    return needs.spec, needs.lines()


def _run_key(key_file: Path) -> str:
    """Return the public half of the key in the file, creating the file if it is missing."""
    from noloco_p2p.identity import Identity

    return Identity.load_or_create(key_file).peer_id
