"""The run spec: everything that the peers of one run share.

A spec is frozen. The digest of its canonical JSON names the run: peers with the same digest train the same model on the
same data with the same outer step. What belongs to one machine is in `settings.py`.

Imports no torch, so that `noloco init` and `noloco status` start fast.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from noloco_p2p.errors import SpecError

SPEC_VERSION = 1
MAX_SPEC_BYTES = 64 * 1024  # a larger spec from the network is refused

CodecName = Literal["fp32", "bf16", "int8", "int4"]
# coarse: for outer gradients only, since the coding error stays between partners, and slow weights mix it away
CoarseName = Literal["int2", "sign1"]
GradientCodecName = Literal[CodecName, CoarseName, "none"]
# modulo: for vectors in which partners nearly agree
ModuloName = Literal["modulo8", "modulo4", "modulo"]
StateCodecName = Literal[CodecName, ModuloName]
CODECS, COARSE_CODECS, STATE_CODECS = (", ".join(get_args(names)) for names in (CodecName, CoarseName, ModuloName))
MAX_STAGES = 64
MAX_LAYERS = 4096  # because counting the parameters of a model iterates over its layers


def about(text: str) -> Any:
    """The meaning of a field in one line: its comment in a spec file, its row in docs/ and the help of its flag."""
    return Field(description=text)


Positive = Annotated[int, Field(gt=0, le=10**12)]  # a stranger's spec must not overflow a number
Size = Annotated[int, Field(gt=0, le=2**22)]  # size of a tensor or a batch
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# Fields younger than version 1. At their defaults they are left out, so that runs without them keep their digest.
YOUNG = (
    "model.random_weights",
    "model.parameter_seeds",
    "model.lora",
    "data.mix",
    "outer.weigh_tokens",
    "pipeline",
)
RUN_SPEC_FIELD = "total_steps"  # at the top level in the spec of a script, and in `train` in that of the trainer
OTHER_KIND = {
    "RunSpec": "this run is trained by a script: start that script with the same spec or ticket",
    "TrainerSpec": "this run is trained by `noloco join`, and a RunSpec has no model, data, train or evaluate section",
}
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The hub's libraries take a name without an owner for a packaged builder, or for a folder of this machine.
HUB_NAME = re.compile(rf"{PLAIN_NAME.pattern}/{PLAIN_NAME.pattern}")
MIXTURE = "mix"  # the source of a DataSpec that mixes several


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LoraSpec(Section):
    """Low-rank adapters (arXiv 2106.09685). With a `rank` above 0 only they are trained and sent."""

    rank: Annotated[int, Field(ge=0), about("0 = no adapters: all weights are trained")] = 0
    alpha: Annotated[PositiveFloat, about("adapters are scaled by alpha / rank")] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1), about("dropout on the input of an adapter")] = 0.0
    targets: Annotated[str, about("'all-linear', or comma-separated names of modules: 'q_proj,v_proj'")] = "all-linear"
    base_dtype: Annotated[Literal["fp32", "bf16"], about("dtype of the frozen weights; bf16 takes half the memory")] = (
        "fp32"
    )


class ModelSpec(Section):
    """A Llama built from sizes, or any causal language model by name (`pretrained`, with a `revision`)."""

    pretrained: Annotated[
        str, about('OWNER/NAME on the hub, or a name that --model NAME=FOLDER binds; "" = use the sizes below')
    ] = ""
    revision: Annotated[str, about("commit or tag of `pretrained`; set it, so that all peers start equal")] = ""
    random_weights: Annotated[
        bool, about("true = use only the architecture of `pretrained`, with random weights from seed")
    ] = False
    vocab_size: Annotated[Size, about("size of the vocabulary; at least that of data.tokenizer (bytes: 384)")] = 384
    hidden_size: Annotated[Size, about("hidden width; a multiple of num_heads")] = 128
    num_layers: Annotated[int, Field(gt=0, le=MAX_LAYERS), about("blocks")] = 4
    num_heads: Annotated[Size, about("attention heads, each 32 to 128 wide")] = 4
    num_kv_heads: Annotated[Size | None, about("key-value heads; fewer use less memory; unset = num_heads")] = None
    mlp_size: Annotated[Size, about("inner width of the MLP, 8/3 to 4 times hidden_size")] = 344
    tied_embeddings: Annotated[bool, about("one matrix for input and output, so that fewer parameters are sent")] = True
    seed: Annotated[int, about("seed of the start weights")] = 0
    parameter_seeds: Annotated[
        bool, about("true = each parameter has its own seed, from `seed` and its name; required for stages")
    ] = False
    start: Annotated[
        str, Field(pattern=r"^(blake3:[0-9a-f]{64})?$"), about("digest of a start state; `noloco fork` writes it")
    ] = ""
    lora: Annotated[
        LoraSpec, about("Adapters: with a rank above 0 the model is frozen, and only they are trained and sent.")
    ] = LoraSpec()

    @field_validator("pretrained")
    @classmethod
    def _no_path(cls, pretrained: str) -> str:
        return _name(pretrained)

    @model_validator(mode="after")
    def _names_a_model(self) -> ModelSpec:
        if self.random_weights and not self.pretrained:
            raise ValueError("random_weights needs a model: set model.pretrained to a name")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSpec:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}")
        if self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} / num_heads {self.num_heads} must be even, for rotary positions"
            )
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self

    def num_parameters(self) -> int:
        """The exact count for a Llama built from sizes (rotary positions have no parameters); 0 when `pretrained` is
        set.
        """
        if self.pretrained:
            return 0
        kv_size = self.hidden_size // self.num_heads * (self.num_kv_heads or self.num_heads)
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * kv_size
        block = attention + 3 * self.hidden_size * self.mlp_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * block + embeddings + self.hidden_size


class SourceSpec(Section):
    """A source of text: the built-in corpus, the hub, or a name that `--data NAME=GLOB` binds on each machine."""

    source: Annotated[
        str, about("'stdlib' (built in), 'hub:OWNER/NAME' (streamed), a NAME that --data NAME=GLOB binds, or 'mix'")
    ] = "stdlib"
    subset: Annotated[str, about("subset of a hub data set")] = ""
    revision: Annotated[str, about("commit or tag of a hub data set")] = ""
    split: Annotated[str, about("split of a hub data set to train on")] = "train"
    validation_split: Annotated[
        str, about('split of a hub data set to validate on; "" = hold out documents of `split`')
    ] = "validation"
    text_field: Annotated[str, about("text field of JSON lines or Parquet; token ids in `input_ids` are read too")] = (
        "text"
    )

    @field_validator("source")
    @classmethod
    def _no_paths(cls, source: str) -> str:
        if source.startswith("hub:"):
            if not HUB_NAME.fullmatch(source[4:]):
                raise ValueError(f"{source!r} must be hub:OWNER/NAME, for example hub:allenai/c4")
        elif not source.replace("-", "").replace("_", "").isalnum():
            raise ValueError(
                f"{source!r} must be 'stdlib', 'hub:NAME', or a plain name that --data NAME=GLOB binds; "
                "a spec never holds a path"
            )
        return source


class MixSpec(SourceSpec):
    """One source of a mixture. Its share of the tokens is `weight` over the sum of all weights."""

    weight: Annotated[
        PositiveFloat, about("weight of this source; its share of the tokens is weight over the sum of all weights")
    ] = 1.0

    @field_validator("source")
    @classmethod
    def _no_mixture_within(cls, source: str) -> str:
        if source == MIXTURE:
            raise ValueError("'mix' cannot contain itself")
        return source


class DataSpec(SourceSpec):
    """What is read, and how it becomes tokens: one source, or with source = "mix" those of `mix`."""

    tokenizer: Annotated[
        str, about("'bytes' (no download), OWNER/NAME on the hub, or a name that --model NAME=FOLDER binds")
    ] = "bytes"
    tokenizer_revision: Annotated[
        str, about("commit or tag of the tokenizer; set it, so that all peers use the same one")
    ] = ""
    sequence_length: Annotated[Size, about("tokens a sequence")] = 256
    holdout: Annotated[
        float,
        Field(gt=0, lt=0.5),
        about("share of documents held out for validation if the source has no validation split"),
    ] = 0.02
    mix: Annotated[
        tuple[MixSpec, ...],
        Field(max_length=64),
        about("for source = 'mix': one [[data.mix]] per source, with source, weight and the other fields of a source"),
    ] = ()

    @field_validator("tokenizer")
    @classmethod
    def _no_path(cls, tokenizer: str) -> str:
        return _name(tokenizer)

    @model_validator(mode="after")
    def _mixture_is_named(self) -> DataSpec:
        if (self.source == MIXTURE) != bool(self.mix):
            raise ValueError("source must be 'mix' if [[data.mix]] lists sources, and only then")
        return self

    def parts(self) -> tuple[tuple[SourceSpec, float], ...]:
        """Return every source with its share of the tokens; the shares sum to 1."""
        if not self.mix:
            return ((self, 1.0),)
        total = sum(part.weight for part in self.mix)
        return tuple((part, part.weight / total) for part in self.mix)


class TrainSpec(Section):
    """The inner optimization: AdamW or Muon with clipping, and warm-up and cosine over the run's progress."""

    total_steps: Annotated[Positive, about("inner steps of one peer, over which the learning rate is scheduled")] = (
        60_000
    )
    batch_size: Annotated[Size, about("sequences per inner step of one peer")] = 16
    learning_rate: Annotated[
        PositiveFloat, about("peak of the schedule; a higher one increases the spread of the replicas")
    ] = 1e-3
    min_learning_rate: Annotated[float, Field(ge=0, le=1), about("share of the peak at the end of the cosine")] = 0.1
    warmup_steps: Annotated[int, Field(ge=0), about("inner steps of linear warm-up")] = 100
    weight_decay: Annotated[NonNegative, about("weight decay of matrices; the paper uses none")] = 0.0
    clip_norm: Annotated[PositiveFloat, about("largest norm of a gradient; larger ones are clipped")] = 1.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1), about("decay of the first moment")] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1), about("decay of the second moment")] = 0.95
    inner_optimizer: Annotated[
        Literal["adamw", "muon"],
        about("adamw; muon = Muon for hidden matrices, AdamW for embeddings, head and vectors"),
    ] = "adamw"
    muon_momentum: Annotated[float, Field(ge=0, lt=1), about("momentum of Muon")] = 0.95

    @model_validator(mode="after")
    def _warmup_fits(self) -> TrainSpec:
        if self.warmup_steps >= self.total_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be less than total_steps {self.total_steps}")
        return self


class OuterSpec(Section):
    """The NoLoCo outer step (arXiv 2506.10911): what is mixed, how strongly, and how long a peer waits for its
    partner.
    """

    inner_steps: Annotated[
        Positive | Literal["auto"],
        about('inner steps per round; fewer mix better and send more; "auto" = the best length for the link'),
    ] = 50
    min_inner_steps: Annotated[Positive, about('shortest round of "auto"')] = 5
    max_inner_steps: Annotated[Positive, about('longest round of "auto", however slow the link is')] = 200
    alpha: Annotated[
        float, Field(ge=0, lt=1), about("share of the outer momentum that is kept each round; 0 did best, paper: 0.5")
    ] = 0.0
    beta: Annotated[PositiveFloat, about("strength of the outer gradient; paper: 0.7")] = 1.0
    gamma: Annotated[
        PositiveFloat,
        about("pull towards the partner's weights; choose about 1 - alpha^2 (an upper bound is checked); paper: 0.7"),
    ] = 1.0
    swap_momentum: Annotated[bool, about("average the outer momentum too; false = the paper's exact rule")] = True
    weigh_tokens: Annotated[
        bool, about("true = weigh each of the two outer gradients by the tokens behind it; paper: false")
    ] = False
    max_wait_s: Annotated[
        NonNegative, about("longest wait for a partner's outer gradient at the end of a round, in seconds")
    ] = 60.0
    closing_rounds: Annotated[
        Annotated[int, Field(ge=0, le=64)] | Literal["auto"],
        about('rounds of mixing without training at the end of the run; "auto" = log2 of the peers, plus 3'),
    ] = "auto"

    @property
    def is_auto(self) -> bool:
        """Whether round lengths are chosen during training (`gossip/round_length.py`)."""
        return self.inner_steps == "auto"

    @property
    def keeps_momentum(self) -> bool:
        """Whether the outer momentum is carried over. With alpha 0 it is neither in memory, in checkpoints nor on the
        wire.
        """
        return self.alpha > 0

    @property
    def sends_momentum(self) -> bool:
        """Whether the outer momentum is a section of every swap."""
        return self.swap_momentum and self.keeps_momentum

    @property
    def first_inner_steps(self) -> int:
        """Length of a peer's first round, before anything is measured; with "auto" the middle of its bounds."""
        if self.inner_steps == "auto":
            return round(math.sqrt(self.min_inner_steps * self.max_inner_steps))
        return self.inner_steps

    @property
    def longest_round(self) -> int:
        """The longest round of any peer of the run, in inner steps."""
        return self.max_inner_steps if self.inner_steps == "auto" else self.inner_steps

    @field_validator("inner_steps", mode="before")
    @classmethod
    def _a_number_or_auto(cls, value: object) -> object:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        raise ValueError(f"{str(value)!r} must be a number of inner steps above 0, or 'auto'")

    @model_validator(mode="after")
    def _bounds_in_order(self) -> OuterSpec:
        if self.min_inner_steps > self.max_inner_steps:
            raise ValueError(
                f"min_inner_steps {self.min_inner_steps} must be at most max_inner_steps {self.max_inner_steps}"
            )
        return self

    def gamma_bound(self) -> float:
        """The mixing strength at which the spread of randomly paired replicas stops shrinking (exact, mean square)."""
        if self.swap_momentum:
            return 2 * (2 - self.alpha**2) / (2 + self.alpha)
        return 2 * (1 - self.alpha**2)

    @model_validator(mode="after")
    def _stable(self) -> OuterSpec:
        bound = self.gamma_bound()
        if self.gamma >= bound:
            formula = "2 (2 - alpha^2) / (2 + alpha)" if self.swap_momentum else "2 (1 - alpha^2)"
            raise ValueError(
                f"gamma must be < {formula} = {bound:.4g} for alpha {self.alpha:g} and "
                f"swap_momentum {str(self.swap_momentum).lower()}; it is {self.gamma:g}, which diverges"
            )
        return self

    def warnings(self) -> list[str]:
        """Return warnings about settings that have no effect or are unwise."""
        defaults = OuterSpec.model_fields
        bounds = () if self.is_auto else ("min_inner_steps", "max_inner_steps")
        changed = [name for name in bounds if getattr(self, name) != defaults[name].default]
        why = "it bounds outer.inner_steps = 'auto', which is fixed here"
        warnings = [f"outer.{name} is ignored: {why}" for name in changed]
        if self.alpha > 0.5:
            warnings.append(f"outer.alpha {self.alpha:g} is above 0.5: replicas drift further apart between swaps")
        return warnings


class CodecSpec(Section):
    """How each section of a swap is coded."""

    slow_weights: Annotated[
        StateCodecName,
        about(
            "int8 or better; modulo8 is as large as int8 and far more exact; modulo takes half while partners are near"
        ),
    ] = "bf16"
    outer_momentum: Annotated[StateCodecName, about("bf16 or modulo8 recommended")] = "bf16"
    outer_gradient: Annotated[
        GradientCodecName,
        about('int8 loses nothing in published runs, int4 hardly anything; "none" = not sent and not waited for'),
    ] = "int8"

    @property
    def has_late_part(self) -> bool:
        """Whether outer gradients travel, at the end of each round."""
        return self.outer_gradient != "none"

    @model_validator(mode="after")
    def _weights_need_bits(self) -> CodecSpec:
        if self.slow_weights == "int4":
            raise ValueError("slow_weights cannot be int4: weights need at least int8, or the replicas stop improving")
        return self


class EvaluateSpec(Section):
    """Perplexity on the same held-out sequences for every peer."""

    every_rounds: Annotated[Positive, about("rounds between two evaluations")] = 10
    num_sequences: Annotated[Size, about("held-out sequences per evaluation")] = 64


class PipelineSpec(Section):
    """A model that is larger than a peer. Each peer holds one of `stages` runs of blocks; with 1 it holds all."""

    stages: Annotated[int, Field(ge=1, le=MAX_STAGES), about("1 = every peer holds the whole model")] = 1
    cut: Annotated[
        tuple[int, ...] | Literal["auto"],
        about('number of blocks of each stage; stage 0 also holds the vocabulary; "auto" = not cut yet'),
    ] = "auto"
    microbatch: Annotated[Size, about("sequences that travel through the stages together")] = 1
    activations: Annotated[
        CodecName, about(f"codec of the activations that a stage sends to the next one: {CODECS}")
    ] = "int8"
    gradients: Annotated[CodecName, about("codec of the gradients of activations, which travel backward")] = "int8"
    routing: Annotated[
        Literal["random", "fast"],
        about("how the replica for a microbatch is chosen: at random, or by measured rate (fast)"),
    ] = "random"

    @field_validator("cut", mode="before")
    @classmethod
    def _numbers_or_auto(cls, value: object) -> object:
        if value == "auto":
            return value
        counts = value if isinstance(value, (list, tuple)) else ()
        if counts and all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in counts):
            return value
        raise ValueError(f"{str(value)!r} must list the number of blocks of each stage, all above 0, or be 'auto'")

    @model_validator(mode="after")
    def _cut_is_of_the_stages(self) -> PipelineSpec:
        if self.cut != "auto" and len(self.cut) != self.stages:
            raise ValueError(f"cut has {len(self.cut)} numbers of blocks, and stages is {self.stages}")
        return self


class Spec(Section):
    """What the peers of any run share.

    `digest()` names the run, `load()` and `from_json()` check what they read, and `canonical_json()` travels between
    peers. `RunSpec` is the spec of a training script, `TrainerSpec` that of `noloco join`.
    """

    version: Annotated[Literal[1], about("format of this file")] = SPEC_VERSION
    name: Annotated[
        str,
        Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
        about("letters, digits, . _ -; this name and the digest of all settings identify the run"),
    ]
    run_key: Annotated[
        str,
        Field(pattern=r"^(12D3KooW[1-9A-HJ-NP-Za-km-z]{44})?$"),
        about(
            'key that signs invitations to a private run, written by `noloco init --private`; "" = everybody may enter'
        ),
    ] = ""
    outer: Annotated[
        OuterSpec, about("The NoLoCo outer step (arXiv 2506.10911): mixing with one random live peer after each round.")
    ] = OuterSpec()
    codec: Annotated[
        CodecSpec,
        about(
            f"How vectors travel: {CODECS}; slow weights and momentum also {STATE_CODECS}, "
            f"outer gradients {COARSE_CODECS}."
        ),
    ] = CodecSpec()

    @property
    def schedule_steps(self) -> int:
        """Inner steps of the whole run; `progress` is counted in shares of them."""
        raise NotImplementedError

    @property
    def boundary_wait_s(self) -> float:
        """The longest wait of training at the end of a round, in seconds; 0 if swaps have no late part."""
        return self.outer.max_wait_s if self.codec.has_late_part else 0.0

    def warnings(self) -> list[str]:
        """Return warnings about settings that have no effect or are unwise."""
        warnings = self.outer.warnings()
        if not self.codec.has_late_part:
            why = "outer gradients do not travel (codec.outer_gradient = 'none')"
            if self.outer.weigh_tokens:
                warnings.append(f"outer.weigh_tokens is ignored: {why}")
            if self.outer.max_wait_s != OuterSpec.model_fields["max_wait_s"].default:
                warnings.append(f"outer.max_wait_s has an effect only in closing rounds: {why}")
        return warnings

    def canonical_json(self) -> bytes:
        """The one byte string of a spec: sorted keys, no spaces, and all fields including defaults.

        Fields in YOUNG are left out at their defaults; so is the run key of an open run.
        """
        values = self.model_dump(mode="json", exclude=None if self.run_key else {"run_key"})
        for dotted in YOUNG:
            section, _, key = dotted.rpartition(".")
            own: Section | None = getattr(self, section, None) if section else self
            fields = {} if own is None else type(own).model_fields
            if key in fields and getattr(own, key) == fields[key].default:
                del (values[section] if section else values)[key]
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> str:
        """The digest: 64 hexadecimal digits (blake3 of the canonical JSON)."""
        return blake3(self.canonical_json()).hexdigest()

    @property
    def first_inner_steps(self) -> int:
        """Length of a peer's first round; with "auto" at most a fifth of the run, if the bounds allow that."""
        first, total_steps = self.outer.first_inner_steps, self.schedule_steps
        if not self.outer.is_auto:
            return first
        return min(first, max(self.outer.min_inner_steps, total_steps // 5), total_steps)

    @property
    def run_id(self) -> str:
        """The name and the first eight digits of the digest: short enough for folders and log lines."""
        return f"{self.name}-{self.digest()[:8]}"

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, origin: str) -> Self:
        """Check `values`. Raises SpecError, which names every wrong dotted field and `origin`.

        `Spec.from_dict` returns a RunSpec or a TrainerSpec; each of the two refuses values of the other kind.
        """
        kind = RunSpec if RUN_SPEC_FIELD in values else TrainerSpec
        if not issubclass(kind, cls):
            raise SpecError(f"{origin}: {OTHER_KIND[kind.__name__]}")
        try:
            return cast("Self", kind.model_validate(values))
        except ValidationError as error:
            raise SpecError(f"{origin}: {describe(error)}") from None

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a TOML file. Raises SpecError when it is missing, is not TOML, or holds a wrong value."""
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            is_cut = path.name.startswith("noloco1")
            fix = "a ticket is longer: copy all of it" if is_cut else f"`noloco init {path}` writes one"
            raise SpecError(f"{path} does not exist; {fix}") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SpecError(f"{path} cannot be read as TOML: {error}") from None
        return cls.from_dict(values, origin=str(path))

    @classmethod
    def from_json(cls, data: bytes, *, expected_digest: str, origin: str) -> Self:
        """Read what another peer sent, and check that it has the digest of the ticket. Raises SpecError."""
        if len(data) > MAX_SPEC_BYTES:
            raise SpecError(f"{origin}: a spec of {len(data)} bytes is over the limit of {MAX_SPEC_BYTES}")
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{origin} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise SpecError(f"{origin}: a spec is a table of fields, not {type(values).__name__}")
        spec = cls.from_dict(values, origin=origin)
        if spec.digest() != expected_digest:
            got, asked = spec.digest()[:16], expected_digest[:16]
            raise SpecError(f"{origin}: its spec has the digest {got}.., but the ticket has {asked}..")
        return spec

    def with_changes(self, changes: dict[str, Any], *, origin: str = "change") -> Self:
        """Return a new spec with dotted fields replaced, for example `{"outer.alpha": 0.3}`. Raises SpecError."""
        values = self.model_dump(mode="json")
        for dotted, value in changes.items():
            *sections, key = dotted.split(".")
            target = values
            for section in sections:
                target = target.get(section)
                if not isinstance(target, dict):
                    raise SpecError(f"{origin}: {dotted} is not a field of a run spec")
            if key not in target:
                raise SpecError(f"{origin}: {dotted} is not a field of a run spec")
            target[key] = value
        return self.from_dict(values, origin=origin)


class RunSpec(Spec):
    """The run of a training script, which has its own model, data and inner optimizer outside the spec."""

    total_steps: Annotated[Positive, about("inner steps of one peer, over which progress goes from 0 to 1")] = 60_000

    @property
    def schedule_steps(self) -> int:
        return self.total_steps


class TrainerSpec(Spec):
    """The run of a language model that `noloco join` trains."""

    model: Annotated[ModelSpec, about("A Llama built from sizes, or any causal language model by name.")] = ModelSpec()
    data: Annotated[
        DataSpec,
        about("The training data. A spec names data and never holds a path, since paths belong to one machine."),
    ] = DataSpec()
    train: Annotated[TrainSpec, about("The inner optimization of each peer.")] = TrainSpec()
    evaluate: Annotated[EvaluateSpec, about("Perplexity on the same held-out sequences for all peers.")] = (
        EvaluateSpec()
    )
    pipeline: Annotated[
        PipelineSpec,
        about("Stages, for a model that is too large for one peer; `noloco init --stages N` writes this section."),
    ] = PipelineSpec()

    @model_validator(mode="after")
    def _stages_fit_the_model(self) -> TrainerSpec:
        cut, num_layers = self.pipeline.cut, self.model.num_layers
        if cut != "auto" and not self.model.pretrained and sum(cut) != num_layers:
            raise ValueError(f"pipeline.cut has {sum(cut)} blocks in all, and model.num_layers is {num_layers}")
        if self.pipeline.stages == 1:
            return self
        if not self.model.parameter_seeds:
            raise ValueError("model.parameter_seeds must be true in a run with stages: a peer draws only its own part")
        if self.model.lora.rank:
            raise ValueError("model.lora.rank must be 0 in a run with stages: adapters cannot be cut yet")
        if self.pipeline.microbatch > self.train.batch_size:
            raise ValueError(
                f"pipeline.microbatch {self.pipeline.microbatch} must be at most train.batch_size "
                f"{self.train.batch_size}"
            )
        return self

    @classmethod
    def of(cls, spec: Spec) -> TrainerSpec:
        """Return the same spec, typed. Raises SpecError when it is the spec of a script."""
        if not isinstance(spec, TrainerSpec):
            raise SpecError(f"{spec.name}: {OTHER_KIND['RunSpec']}")
        return spec

    @property
    def schedule_steps(self) -> int:
        return self.train.total_steps


def _name(name: str) -> str:
    """A name on the hub, or one that a machine binds. With a path, a stranger could choose a place on each machine."""
    if name and not (HUB_NAME.fullmatch(name) or PLAIN_NAME.fullmatch(name)):
        raise ValueError(
            f"{name!r} must be OWNER/NAME on the hub, or a plain name that is bound with --model NAME=FOLDER; "
            "a spec never holds a path"
        )
    return name


def describe(error: ValidationError) -> str:
    """Format one line per wrong field, with its dotted name: `outer.gamma must be < ...`."""
    lines = []
    for item in error.errors():
        dotted = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        first_word = message.split(" ", 1)[0]
        if item["type"] == "value_error" and first_word.isidentifier():  # our own check names its field itself
            dotted, message = f"{dotted}.{first_word}" if dotted else first_word, message.partition(" ")[2]
        elif item["type"] == "extra_forbidden":
            message = "is not a known field"
        lines.append(f"{dotted}: {message}" if item["type"] != "value_error" else f"{dotted} {message}".lstrip())
    return "; ".join(lines)
