"""noloco simulate"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noloco_p2p.cli.options import Changes, Data, parse_changes
from noloco_p2p.errors import SettingsError

if TYPE_CHECKING:
    from noloco_p2p.simulate.result import Result
    from noloco_p2p.spec import RunSpec


def simulate(
    file: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The run spec.")],
    replicas: Annotated[int, typer.Option(help="Number of replicas, all in this process.", min=1, max=256)] = 8,
    rules: Annotated[
        str,
        typer.Option(help="Outer rules to compare, with commas: noloco, diloco, ddp, local, gasloc, groups, pairs."),
    ] = "noloco",
    steps: Annotated[
        int | None,
        typer.Option(help="Inner steps of each; the schedule shrinks with them.", show_default="the spec's", min=1),
    ] = None,
    speeds: Annotated[str, typer.Option(help="Relative speeds of the replicas, in turn: 1,1,2,4.")] = "1",
    step_seconds: Annotated[float, typer.Option(help="Virtual seconds of an inner step at speed 1.", min=1e-6)] = 1.0,
    link: Annotated[
        str, typer.Option(help="Link profiles of the replicas, in turn: ideal, home-fibre, cable, weak-4g, ...")
    ] = "ideal",
    churn: Annotated[
        str, typer.Option(help="join:8@300,leave:2@500,crash:3@200 (virtual seconds), lose:0.2, absent:0.2 (shares).")
    ] = "",
    changes: Changes = None,
    seed: Annotated[int, typer.Option(help="Of pairing, faults and start weights.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="Threads of torch; the bits depend on it.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda:N, mps or auto; same bits each time on a CPU only.")] = "cpu",
    data: Data = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write results as JSON.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw the curves there (PNG).", show_default=False)
    ] = None,
) -> None:
    """Train many replicas in one process on a virtual clock: loss, spread, bytes and hours before anybody pays."""
    from noloco_p2p.settings import parse_bindings
    from noloco_p2p.simulate.plan import Plan, parse_churn, parse_links, parse_speeds
    from noloco_p2p.spec import RunSpec

    spec = RunSpec.load(file).with_changes(parse_changes(changes), origin="--set")
    if steps:
        warmup = min(spec.train.warmup_steps, steps // 10)
        spec = spec.with_changes({"train.total_steps": steps, "train.warmup_steps": warmup}, origin="--steps")
    plan = Plan(
        replicas,
        seed=seed,
        step_s=step_seconds,
        speeds=parse_speeds(speeds),
        links=parse_links(link.split(",")),
        churn=parse_churn(churn, num_replicas=replicas),
    )
    names = [name.strip() for name in rules.split(",")]
    import torch

    from noloco_p2p.simulate import plot as drawing
    from noloco_p2p.simulate.result import table
    from noloco_p2p.simulate.run import check_rules
    from noloco_p2p.simulate.run import simulate as run
    from noloco_p2p.train.compute import choose_device

    check_rules(names, plan)
    if plot:
        drawing.check(plot)
    torch.set_num_threads(threads)
    results: list[Result] = []
    began_s = time.monotonic()
    for result in run(spec, plan, rules=names, bindings=parse_bindings(data or []), device=choose_device(device)):
        results.append(result)
        print(f"{result.rule}: done after {time.monotonic() - began_s:.0f} s", flush=True)
        if json_file:
            _write(json_file, results, spec=spec, plan_seed=seed)
    for line in table(results):
        print(line)
    if plot:
        print(f"wrote {drawing.draw(results, plot)}")


def _write(file: Path, results: list[Result], *, spec: RunSpec, plan_seed: int) -> None:
    report = {
        "spec": spec.model_dump(mode="json"),
        "seed": plan_seed,
        "results": [result.as_dict() for result in results],
    }
    try:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--json {file}: cannot be written: {error.strerror}") from None
