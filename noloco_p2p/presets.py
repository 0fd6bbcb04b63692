"""Define run specs to start from, and render them as commented TOML. This module does not import torch.

`tiny` learns visibly within minutes on two cores and needs no download. `small`, `medium` and `large` have the model
sizes, data and schedule of the NoLoCo paper (arXiv 2506.10911): Llama blocks, C4, and a sequence length of 1,024. There
are 1,000 warm-up steps and a cosine decay to a tenth of the learning rate, in a total of 25,000 steps, with gradients
clipped at 1.0 and without weight decay. The paper counts tokens per step over the whole swarm (half a million, one
million and two million). Here, these tokens are divided among 8, 16 and 16 peers, respectively. All four presets use
Muon as the inner optimizer.

`paper` is like `small`, but uses the paper's exact rule: Adam, an outer step after every 50 inner steps with alpha 0.5
and beta = gamma = 0.7, for which training waits, no compression, and no closing swaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, cast

from pydantic.fields import FieldInfo

from noloco_p2p.spec import DataSpec, EvaluateSpec, ModelSpec, OuterSpec, Section, TrainerSpec, TrainSpec

# A copy of the Llama 3 tokenizer (128,256 entries) that can be downloaded without an account.
LLAMA3_TOKENIZER = "NousResearch/Meta-Llama-3-8B"
LLAMA3_VOCABULARY = 128_256
PAPER_SEQUENCE_LENGTH = 1024


def _paper_preset(
    name: str, *, model: ModelSpec, learning_rate: float, swarm_tokens: int, num_peers: int
) -> TrainerSpec:
    """Build a preset with one of the paper's model sizes.

    `swarm_tokens` is the number of tokens that all `num_peers` peers together process per inner step.
    """
    return TrainerSpec(
        name=name,
        model=model,
        data=DataSpec(source="c4", tokenizer=LLAMA3_TOKENIZER, sequence_length=PAPER_SEQUENCE_LENGTH),
        train=TrainSpec(
            total_steps=25_000,
            batch_size=swarm_tokens // num_peers // PAPER_SEQUENCE_LENGTH,
            learning_rate=learning_rate,
            warmup_steps=1_000,
            inner_optimizer="muon",
        ),
        evaluate=EvaluateSpec(num_sequences=256),
    )


def _paper_model(*, hidden_size: int, num_layers: int, mlp_size: int, num_heads: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=LLAMA3_VOCABULARY,
        hidden_size=hidden_size,
        num_layers=num_layers,
        mlp_size=mlp_size,
        num_heads=num_heads,
    )


PRESETS: dict[str, TrainerSpec] = {
    "tiny": TrainerSpec(
        name="tiny",
        # One core trains about 12,000 tokens, or 12 steps, per second, so `total_steps` take 85 minutes.
        model=ModelSpec(hidden_size=160, num_layers=3, mlp_size=432, num_heads=5),
        data=DataSpec(sequence_length=128),
        train=TrainSpec(total_steps=60_000, batch_size=8, learning_rate=6e-3, warmup_steps=100, inner_optimizer="muon"),
        # With so few tokens per step, "auto" would make a swap rare, and the replicas would drift apart.
        outer=OuterSpec(min_inner_steps=1),
    ),
    "small": _paper_preset(
        "small",
        model=_paper_model(hidden_size=768, num_layers=12, mlp_size=3072, num_heads=12),
        learning_rate=6e-4,
        swarm_tokens=2**19,
        num_peers=8,
    ),
    "medium": _paper_preset(
        "medium",
        model=_paper_model(hidden_size=2048, num_layers=24, mlp_size=8192, num_heads=32),
        learning_rate=2e-4,
        swarm_tokens=2**20,
        num_peers=16,
    ),
    "large": _paper_preset(
        "large",
        model=_paper_model(hidden_size=4096, num_layers=32, mlp_size=16384, num_heads=32),
        learning_rate=1.2e-4,
        swarm_tokens=2**21,
        num_peers=16,
    ),
}

PRESETS["paper"] = PRESETS["small"].with_changes(
    {
        "name": "paper",
        "train.inner_optimizer": "adamw",
        "outer.wait": True,
        "outer.alpha": 0.5,
        "outer.beta": 0.7,
        "outer.closing_mixings": 0,
        "codec.weights": "fp32",
    }
)

FIRST_SECTIONS = ("model", "data", "train")  # first in a file; the other sections follow in the order of the fields


def render(spec: TrainerSpec) -> str:
    """Render a spec as TOML that loads back as an equal spec. The description of each field becomes a comment.

    Keys begin at column 0. An optional key that is not set becomes a comment, because TOML has no null.
    """
    lines = [*_header(spec), *_assignments(spec)]
    for name, about, _ in sections():
        lines += ["", f"[{name}]", f"# {about}", *_assignments(attrgetter(name)(spec))]
    return "\n".join(lines) + "\n"


def sections(model: type[Section] = TrainerSpec, prefix: str = "") -> Iterator[tuple[str, str, type[Section]]]:
    """Yield the dotted name, the description and the model of each section, in the order of a spec file."""
    for name in sorted(model.model_fields, key=lambda name: name not in FIRST_SECTIONS):
        field = model.model_fields[name]
        if is_section(field):
            section = cast("type[Section]", field.annotation)
            yield f"{prefix}{name}", field.description or "", section
            yield from sections(section, f"{prefix}{name}.")


def is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def describe_size(spec: TrainerSpec) -> str:
    """Describe the number of parameters of the model."""
    num_parameters = spec.model.num_parameters()
    if not num_parameters:
        return f"the parameters of {spec.model.pretrained!r}"
    share = "tied" if spec.model.tied_embeddings else "untied"
    return f"{num_parameters:,} parameters ({share} embeddings, vocabulary {spec.model.vocab_size:,})"


def _header(spec: TrainerSpec) -> list[str]:
    tokens = spec.train.batch_size * spec.data.sequence_length
    return [
        "# This is a run spec of noloco_p2p, which all peers of one run share.",
        f"# Model: {describe_size(spec)}.",
        f"# Each peer reads {tokens:,} tokens per inner step.",
        "# Start the run with `noloco join FILE`. If you change a setting, the file defines a new run. To start the "
        "new run from the weights of this one, use `noloco fork`.",
        "",
    ]


def _assignments(section: Section) -> list[str]:
    values = section.model_dump(mode="json")
    lines = []
    for key, field in type(section).model_fields.items():
        if not is_section(field):
            assignment = f"# {key} =" if values[key] is None else f"{key} = {_toml(values[key])}"
            lines.append(f"{assignment}  # {field.description}")
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # a basic TOML string
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
