"""Run specs to start from, and their rendering as commented TOML. Imports no torch.

tiny: learns visibly within minutes on two cores, and needs no download. small, medium, large: the sizes of the NoLoCo
paper (arXiv 2506.10911) and its data and schedule: Llama blocks, C4, sequence 1024, no weight decay, clip 1.0, 1,000
warm-up steps, cosine to a tenth, 25,000 steps. The paper's tokens a step are the whole swarm's: half a million, one and
two million, here divided by 8, 16 and 16 peers. All four have what did best in docs/results.md: Muon inside, rounds as
short as the link carries, modulo-coded state and int4 gradients.

paper: as small, with the paper's exact rule: Adam, 50 inner steps, alpha 0.5, beta = gamma = 0.7, outer momentum not
swapped, everything uncoded, no closing rounds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from noloco_p2p.spec import (
    CodecName,
    CodecSpec,
    DataSpec,
    EvaluateSpec,
    ModelSpec,
    OuterSpec,
    StateCodecName,
    TrainerSpec,
    TrainSpec,
)

# The tokenizer of Llama 3 (128,256 entries) from a copy that asks for no account.
LLAMA3_TOKENIZER = "NousResearch/Meta-Llama-3-8B"
LLAMA3_VOCABULARY = 128_256
PAPER_SEQUENCE_LENGTH = 1024
BEST_CODEC = CodecSpec(slow_weights="modulo8", outer_momentum="modulo8", outer_gradient="int4")


def _paper_preset(
    name: str, *, model: ModelSpec, learning_rate: float, swarm_tokens: int, num_peers: int, max_wait_s: float
) -> TrainerSpec:
    """`swarm_tokens`: tokens an inner step of all `num_peers` peers together."""
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
        outer=OuterSpec(inner_steps="auto", max_wait_s=max_wait_s),
        codec=BEST_CODEC,
        evaluate=EvaluateSpec(every_rounds=10, num_sequences=256),
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
        # About 12,000 tokens a second on one core, so 12 steps: `total_steps` are 85 minutes of it.
        model=ModelSpec(hidden_size=160, num_layers=3, mlp_size=432, num_heads=5),
        data=DataSpec(sequence_length=128),
        train=TrainSpec(total_steps=60_000, batch_size=8, learning_rate=6e-3, warmup_steps=100, inner_optimizer="muon"),
        outer=OuterSpec(inner_steps="auto", min_inner_steps=10, max_wait_s=10.0),
        codec=BEST_CODEC,
        evaluate=EvaluateSpec(every_rounds=10, num_sequences=64),
    ),
    "small": _paper_preset(
        "small",
        model=_paper_model(hidden_size=768, num_layers=12, mlp_size=3072, num_heads=12),
        learning_rate=6e-4,
        swarm_tokens=2**19,
        num_peers=8,
        max_wait_s=60.0,
    ),
    "medium": _paper_preset(
        "medium",
        model=_paper_model(hidden_size=2048, num_layers=24, mlp_size=8192, num_heads=32),
        learning_rate=2e-4,
        swarm_tokens=2**20,
        num_peers=16,
        max_wait_s=120.0,
    ),
    "large": _paper_preset(
        "large",
        model=_paper_model(hidden_size=4096, num_layers=32, mlp_size=16384, num_heads=32),
        learning_rate=1.2e-4,
        swarm_tokens=2**21,
        num_peers=16,
        max_wait_s=300.0,
    ),
}

PRESETS["paper"] = PRESETS["small"].with_changes(
    {
        "name": "paper",
        "train.inner_optimizer": "adamw",
        "outer.inner_steps": 50,
        "outer.alpha": 0.5,
        "outer.beta": 0.7,
        "outer.gamma": 0.7,
        "outer.swap_momentum": False,
        "outer.closing_rounds": 0,
        "codec.slow_weights": "fp32",
        "codec.outer_momentum": "fp32",
        "codec.outer_gradient": "fp32",
    }
)

SECTIONS: Mapping[str, str] = {
    "model": "A Llama made from sizes, or any causal language model by name.",
    "model.lora": "Adapters: with a rank above 0 the model is frozen, and they alone are trained and travel.",
    "data": "What the swarm reads. A spec names data and never holds a path: paths belong to one machine.",
    "train": "The inner optimization of each peer.",
    "outer": "The NoLoCo outer step (arXiv 2506.10911): mixing with one random live peer after each round.",
    "codec": f"How vectors travel: {', '.join(get_args(CodecName))}; slow weights and momentum also "
    f"{', '.join(name for name in get_args(StateCodecName) if name not in get_args(CodecName))}.",
    "evaluate": "Perplexity on held-out sequences, the same ones for every peer.",
    "pipeline": "Stages, for a model that is larger than a peer; `noloco init --stages N` writes this section.",
}

COMMENTS: Mapping[str, str] = {
    "version": "format of this file",
    "name": "letters, digits, . _ -; the run is known by this name and a digest of all settings",
    "run_key": 'signs the invitations to a private run; `noloco init --private` makes it; "" = everybody may enter',
    "model.pretrained": 'OWNER/NAME of the hub, or a name that --model NAME=FOLDER binds; "" = the sizes below',
    "model.revision": "commit or tag of `pretrained`; name one, so that all peers start equal",
    "model.random_weights": "true = of `pretrained` take the architecture alone, with weights drawn from seed",
    "model.vocab_size": "tokens the model knows; at least those of data.tokenizer (bytes: 384)",
    "model.hidden_size": "width; a multiple of num_heads",
    "model.num_layers": "blocks",
    "model.num_heads": "attention heads; 32 to 128 wide each",
    "model.num_kv_heads": "fewer key-value heads than num_heads save memory; unset = as many",
    "model.mlp_size": "inner width of the MLP; 8/3 to 4 times hidden_size",
    "model.tied_embeddings": "one matrix for input and output; fewer parameters to send",
    "model.seed": "of the start weights",
    "model.parameter_seeds": "true = each parameter has its own seed, from `seed` and its name; stages need it",
    "model.start": "digest of a start state; `noloco fork` writes it",
    "model.lora.rank": "0 = no adapters, all weights are trained",
    "model.lora.alpha": "adapters count alpha / rank",
    "model.lora.dropout": "of what goes into an adapter",
    "model.lora.targets": "'all-linear', or names of modules with commas: 'q_proj,v_proj'",
    "model.lora.base_dtype": "of the frozen weights: bf16 takes half the memory",
    "data.source": "'stdlib' (built in), 'hub:OWNER/NAME' (streamed), a NAME that --data NAME=GLOB binds, or 'mix'",
    "data.subset": "subset of a hub data set",
    "data.revision": "commit or tag of a hub data set",
    "data.split": "split of a hub data set to train on",
    "data.validation_split": 'split of a hub data set to validate on; "" = hold documents of `split` out',
    "data.text_field": "field of JSON lines or Parquet with the text; token ids in `input_ids` are read too",
    "data.tokenizer": "'bytes' (no download), OWNER/NAME of the hub, or a name that --model NAME=FOLDER binds",
    "data.tokenizer_revision": "commit or tag of the tokenizer; name one, so that all peers read alike",
    "data.sequence_length": "tokens a sequence",
    "data.holdout": "share of documents kept for validation where the source has no split of its own",
    "data.mix": "for source = 'mix': a [[data.mix]] each, with source, weight and what else a source has",
    "train.total_steps": "inner steps of one peer; the schedule of the learning rate covers them",
    "train.batch_size": "sequences an inner step of one peer",
    "train.learning_rate": "peak of the schedule; the spread of the replicas grows with it",
    "train.min_learning_rate": "share of the peak that is left at the end of the cosine",
    "train.warmup_steps": "inner steps of linear warm-up",
    "train.weight_decay": "of matrices; the paper uses none",
    "train.clip_norm": "largest norm of a gradient",
    "train.adam_beta1": "decay of the first moment",
    "train.adam_beta2": "decay of the second moment",
    "train.inner_optimizer": "adamw; muon = Muon for hidden matrices, AdamW for embeddings, head and vectors",
    "train.muon_momentum": "of Muon alone",
    "outer.inner_steps": 'inner steps a round; fewer mix better and send more; "auto" = as few as the link carries',
    "outer.min_inner_steps": 'bounds of inner_steps = "auto"',
    "outer.max_inner_steps": 'the longest round of "auto", however slow the link',
    "outer.alpha": "outer momentum kept from round to round; 0 did best, paper: 0.5",
    "outer.beta": "strength of the outer gradient; paper: 0.7",
    "outer.gamma": "pull towards the partner's weights; about 1 - alpha^2, and bounded (checked); paper: 0.7",
    "outer.weigh_tokens": "true = each of two outer gradients counts by the tokens behind it; paper: false",
    "outer.swap_momentum": "average outer momentum too; false = the paper's exact rule",
    "outer.max_wait_s": "seconds to wait for a partner's gradient at the end of a round, before going on without it",
    "outer.closing_rounds": 'rounds of mixing alone when training is done; "auto" = log2 of the peers, and 3 more',
    "codec.slow_weights": "int8 or better; modulo8 has int8's bytes and is far more exact; modulo4 half of them",
    "codec.outer_momentum": "bf16 or modulo8 recommended",
    "codec.outer_gradient": "int8 loses nothing in published runs, int4 hardly anything",
    "evaluate.every_rounds": "rounds between two evaluations",
    "evaluate.num_sequences": "held-out sequences an evaluation",
    "pipeline.stages": "1 = every peer holds the whole model",
    "pipeline.cut": 'number of blocks of each stage; stage 0 also holds the vocabulary; "auto" = not cut yet',
    "pipeline.microbatch": "sequences that travel through the stages together",
    "pipeline.activations": f"codec of what a stage sends to the next one: {', '.join(get_args(CodecName))}",
    "pipeline.gradients": "codec of the gradients of activations, which travel back",
    "pipeline.routing": "replica that a microbatch goes to: random, or by measured rate (fast)",
}


def render(spec: TrainerSpec, *, comments: Mapping[str, str] = COMMENTS) -> str:
    """TOML that loads back to an equal spec. `comments` by dotted key, one line each; keys without one stand bare.

    Keys begin at column 0. An unset optional key is a comment, since TOML knows no null.
    """
    values = spec.model_dump(mode="json")
    top = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = [*_header(spec), *_assignments("", top, comments)]
    for section in (name for name in SECTIONS if name in values):
        lines += _table(section, values[section], comments)
    return "\n".join(lines) + "\n"


def describe_size(spec: TrainerSpec) -> str:
    """The true number of parameters, in words."""
    num_parameters = spec.model.num_parameters()
    if not num_parameters:
        return f"the parameters of {spec.model.pretrained!r}"
    share = "tied" if spec.model.tied_embeddings else "untied"
    return f"{num_parameters:,} parameters ({share} embeddings, vocabulary {spec.model.vocab_size:,})"


def _header(spec: TrainerSpec) -> list[str]:
    tokens = spec.train.batch_size * spec.data.sequence_length
    shortest = spec.outer.min_inner_steps if spec.outer.inner_steps == "auto" else spec.outer.inner_steps
    a_round = f"{tokens * shortest:,}{' or more' if spec.outer.is_auto else ''} a round"
    return [
        "# Run spec of noloco_p2p: what all peers of one run share.",
        f"# Model: {describe_size(spec)}.",
        f"# One peer reads {tokens:,} tokens an inner step, {a_round}.",
        "# Start the run with `noloco join FILE`. Any change makes another run: `noloco fork` carries weights over.",
        "",
    ]


def _table(name: str, table: Mapping[str, Any], comments: Mapping[str, str]) -> list[str]:
    about = [f"# {SECTIONS[name]}"] if name in SECTIONS else []
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = ["", f"[{name}]", *about, *_assignments(f"{name}.", plain, comments)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _table(f"{name}.{key}", value, comments)
    return lines


def _assignments(prefix: str, table: Mapping[str, Any], comments: Mapping[str, str]) -> list[str]:
    lines = []
    for key, value in table.items():
        unset = value is None
        assignment = f"# {key} =" if unset else f"{key} = {_toml(value)}"
        comment = comments.get(f"{prefix}{key}", "")
        lines.append(f"{assignment}  # {comment}" if comment else assignment)
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
