"""Implements the command `noloco simulate`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import typer

from noloco_p2p.cli.options import Changes, parse_changes, takes_settings
from noloco_p2p.errors import SettingsError
from noloco_p2p.settings import PeerSettings
from noloco_p2p.simulate.plot import POINTS
from noloco_p2p.telemetry.console import percent
from noloco_p2p.telemetry.progress import Progress


@takes_settings("data", "models")
def simulate(
    file: Path = typer.Argument(..., metavar="SPEC.toml", help="The run spec."),
    replicas: str = typer.Option(
        "8", help="Number of replicas. With stages: one number for all stages, or one per stage (4,8,4)."
    ),
    steps: int | None = typer.Option(
        None, help="Inner steps per replica; the schedule is shortened to match.", show_default="the spec's", min=1
    ),
    speeds: str = typer.Option(
        "1", help="Relative speeds, assigned to replicas in turn, for example 1,1,2,4. Separate stages with /: 1/2/1,4."
    ),
    step_seconds: float = typer.Option(
        1.0, help="Virtual seconds per inner step of the whole model at speed 1.", min=1e-6
    ),
    link: str = typer.Option(
        "ideal",
        help="Links, assigned to replicas in turn: ideal, home-fibre, cable, weak-4g, ..., or 100mbit-50ms. "
        "Separate stages with /: cable/ideal.",
    ),
    churn: str = typer.Option(
        "",
        help="Events in the form kind:replica@seconds (virtual time), for example "
        "join:8@300,leave:2@500,crash:3@200 (with stages: kind:stage.replica@seconds). lose:0.2 breaks this share "
        "of calls, and absent:0.2 keeps replicas from swapping in this share of their steps.",
    ),
    stages: int | None = typer.Option(
        None, help="Number of stages to cut the model into.", show_default="the spec's", min=1, max=64
    ),
    window: int | None = typer.Option(
        None,
        help="With stages: number of microbatches that each head keeps in flight.",
        show_default="a quarter of its batch",
        min=1,
    ),
    changes: Changes = None,
    seed: int = typer.Option(0, help="Seed of the pairing, the faults and the initial weights.", min=0),
    threads: int = typer.Option(
        1, help="Number of torch threads. The results are bit-identical only if this number is the same.", min=1
    ),
    device: str = typer.Option(
        "cpu", help="cpu, cuda:N, mps or auto. Only the CPU gives bit-identical results every time."
    ),
    *,
    settings: PeerSettings,
    json_file: Path | None = typer.Option(
        None, "--json", metavar="FILE", help="Write the results to FILE as JSON.", show_default=False
    ),
    plot: Path | None = typer.Option(
        None,
        metavar="DIR",
        help=f"Write plots of the curves (PNG) to DIR. A curve has {POINTS} points, or one for every "
        "evaluate.every_steps steps if these are more (--set evaluate.every_steps=10). Short runs measure them on few "
        "of the held-out sequences.",
        show_default=False,
    ),
) -> None:
    """Train many replicas in one process on a virtual clock, to predict the loss, spread, traffic and time of a run."""
    import torch

    from noloco_p2p.simulate import plot as drawing
    from noloco_p2p.simulate.material import Material, shortened
    from noloco_p2p.simulate.plan import Plan, parse_churn, parse_links, parse_speeds
    from noloco_p2p.simulate.replica import SimulatedPeer
    from noloco_p2p.simulate.result import table
    from noloco_p2p.simulate.stage_result import simulate_stages
    from noloco_p2p.simulate.staged import StagedPlan, by_stage, parse_replicas, staged
    from noloco_p2p.simulate.swarm import simulate_swarm
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.trainer.compute import choose_device

    spec = TrainerSpec.load(file).with_changes(parse_changes(changes), origin="--set")
    settings.check_names(spec)
    spec = shortened(spec, steps) if steps else spec
    num_stages = stages or spec.pipeline.stages
    num_replicas = parse_replicas(replicas, num_stages=num_stages)
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing has to be cleaned up
    made = list[SimulatedPeer]()
    progress = Progress(print).task(lambda: f"simulated {percent(max([0.0, *(peer.progress for peer in made)]))}")
    if num_stages > 1:
        pipeline = StagedPlan(
            num_replicas,
            seed=seed,
            step_s=step_seconds,
            speeds=by_stage(speeds, parse_speeds, num_stages=num_stages, flag="--speeds"),
            links=by_stage(link, lambda each: parse_links(each.split(",")), num_stages=num_stages, flag="--link"),
            churn=parse_churn(churn, num_replicas=num_replicas),
            window=window,
        )
        if plot or device != "cpu":
            raise SettingsError("--plot and --device cannot be used with stages")
        if spec.train.batch_size % spec.pipeline.microbatch:
            raise SettingsError(
                f"train.batch_size ({spec.train.batch_size}) must be a multiple of pipeline.microbatch "
                f"({spec.pipeline.microbatch}); otherwise, the heads would take larger steps than the spec says"
            )
        material = Material.of(staged(spec, num_stages), settings.data, seed=seed)
        with progress:
            result = simulate_stages(material, pipeline, on_made=made.extend)
        lines = result.lines()
    else:
        if window:
            raise SettingsError("--window requires --stages")
        plan = Plan(
            num_replicas[0],
            seed=seed,
            step_s=step_seconds,
            speeds=parse_speeds(speeds),
            links=parse_links(link.split(",")),
            churn=parse_churn(churn, num_replicas=num_replicas[0]),
            evaluations=max(POINTS, spec.train.total_steps // spec.evaluate.every_steps),
        )
        if plot:
            drawing.check(plot)
        material = Material.of(spec, settings.data, device=choose_device(device), seed=seed, folders=settings.models)
        with progress:
            result = simulate_swarm(material, plan, on_made=made.extend)
        lines = table([result]) + ([f"wrote {drawing.draw([result], plot)}"] if plot else [])
    print("\n".join(lines))
    if json_file:
        report = {"spec": spec.model_dump(mode="json"), "seed": seed, "result": result.as_dict()}
        try:
            json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"--json {json_file} cannot be written: {error.strerror}") from None
