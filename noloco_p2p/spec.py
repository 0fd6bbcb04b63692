"""The run spec: everything that the peers of one run share.

A spec is frozen. Its canonical JSON is digested, and the digest names the run: peers with the same digest train the
same model on the same recipe with the same outer step. What belongs to one machine only stands in `settings.py`.

Imports no torch: `noloco init` and `noloco status` must start in a blink.
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
MAX_SPEC_BYTES = 64 * 1024  # a spec that comes from the network is refused above this size

CodecName = Literal["fp32", "bf16", "int8", "int4"]
# coarse: for outer gradients alone, as what a code loses stays between partners, and slow weights mix it away
CoarseName = Literal["int2", "sign1"]
GradientCodecName = Literal[CodecName, CoarseName, "none"]
# modulo: for what partners have nearly in common
ModuloName = Literal["modulo8", "modulo4", "modulo"]
StateCodecName = Literal[CodecName, ModuloName]
CODECS, COARSE_CODECS, STATE_CODECS = (", ".join(get_args(names)) for names in (CodecName, CoarseName, ModuloName))
MAX_STAGES = 64
MAX_LAYERS = 4096  # to count what a model takes walks over its layers


def about(text: str) -> Any:
    """The meaning of a field in one line: its comment in a spec file, its row in docs/ and the help of its flag."""
    return Field(description=text)


Positive = Annotated[int, Field(gt=0, le=10**12)]  # a stranger's spec must not overflow a number
Size = Annotated[int, Field(gt=0, le=2**22)]  # of a tensor or a batch
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# Fields younger than version 1: at their default they are left out, so that runs without them keep their digest.
YOUNG = (
    "model.random_weights",
    "model.parameter_seeds",
    "model.lora",
    "data.mix",
    "outer.weigh_tokens",
    "outer.inner_momentum",
    "codec.inner_momentum",
    "pipeline",
)
RUN_SPEC_FIELD = "total_steps"  # stands at the top in the spec of a script, and in `train` in that of the trainer
OTHER_KIND = {
    "RunSpec": "this run is trained by a script: start that script with the same spec or ticket",
    "TrainerSpec": "this run is trained by `noloco join`, and a RunSpec has no model, data, train or evaluate section",
}
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# A name without an owner is taken for a packaged builder, or for a folder of this machine, by the hub's own libraries.
HUB_NAME = re.compile(rf"{PLAIN_NAME.pattern}/{PLAIN_NAME.pattern}")
MIXTURE = "mix"  # the source of a DataSpec that mixes several


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LoraSpec(Section):
    """Low-rank adapters (arXiv 2106.09685): with a `rank` above 0 they alone are trained and travel."""

    rank: Annotated[int, Field(ge=0), about("0 = no adapters, all weights are trained")] = 0
    alpha: Annotated[PositiveFloat, about("adapters count alpha / rank")] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1), about("of what goes into an adapter")] = 0.0
    targets: Annotated[str, about("'all-linear', or names of modules with commas: 'q_proj,v_proj'")] = "all-linear"
    base_dtype: Annotated[Literal["fp32", "bf16"], about("of the frozen weights: bf16 takes half the memory")] = "fp32"


class ModelSpec(Section):
    """A Llama made from sizes, or any causal language model by name (`pretrained`, with a `revision`)."""

    pretrained: Annotated[
        str, about('OWNER/NAME of the hub, or a name that --model NAME=FOLDER binds; "" = the sizes below')
    ] = ""
    revision: Annotated[str, about("commit or tag of `pretrained`; name one, so that all peers start equal")] = ""
    random_weights: Annotated[
        bool, about("true = of `pretrained` take the architecture alone, with weights drawn from seed")
    ] = False
    vocab_size: Annotated[Size, about("tokens the model knows; at least those of data.tokenizer (bytes: 384)")] = 384
    hidden_size: Annotated[Size, about("width; a multiple of num_heads")] = 128
    num_layers: Annotated[int, Field(gt=0, le=MAX_LAYERS), about("blocks")] = 4
    num_heads: Annotated[Size, about("attention heads; 32 to 128 wide each")] = 4
    num_kv_heads: Annotated[Size | None, about("key-value heads; fewer save memory; unset = num_heads")] = None
    mlp_size: Annotated[Size, about("inner width of the MLP; 8/3 to 4 times hidden_size")] = 344
    tied_embeddings: Annotated[bool, about("one matrix for input and output; fewer parameters to send")] = True
    seed: Annotated[int, about("of the start weights")] = 0
    parameter_seeds: Annotated[
        bool, about("true = each parameter has its own seed, from `seed` and its name; stages need it")
    ] = False
    start: Annotated[
        str, Field(pattern=r"^(blake3:[0-9a-f]{64})?$"), about("digest of a start state; `noloco fork` writes it")
    ] = ""
    lora: Annotated[
        LoraSpec, about("Adapters: with a rank above 0 the model is frozen, and they alone are trained and travel.")
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
                f"hidden_size {self.hidden_size} / num_heads {self.num_heads} must be even, for the positions"
            )
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self

    def num_parameters(self) -> int:
        """True count for a Llama made from sizes (rotary positions have no parameters); 0 when `pretrained` is set."""
        if self.pretrained:
            return 0
        kv_size = self.hidden_size // self.num_heads * (self.num_kv_heads or self.num_heads)
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * kv_size
        block = attention + 3 * self.hidden_size * self.mlp_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * block + embeddings + self.hidden_size


class SourceSpec(Section):
    """Where text comes from: the built-in corpus, the hub, or a name that `--data NAME=GLOB` binds on each machine."""

    source: Annotated[
        str, about("'stdlib' (built in), 'hub:OWNER/NAME' (streamed), a NAME that --data NAME=GLOB binds, or 'mix'")
    ] = "stdlib"
    subset: Annotated[str, about("subset of a hub data set")] = ""
    revision: Annotated[str, about("commit or tag of a hub data set")] = ""
    split: Annotated[str, about("split of a hub data set to train on")] = "train"
    validation_split: Annotated[
        str, about('split of a hub data set to validate on; "" = hold documents of `split` out')
    ] = "validation"
    text_field: Annotated[
        str, about("field of JSON lines or Parquet with the text; token ids in `input_ids` are read too")
    ] = "text"

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
    """One source of a mixture, with its share of the tokens: `weight` over the sum of all weights."""

    weight: Annotated[PositiveFloat, about("share of the tokens, over the sum of all weights")] = 1.0

    @field_validator("source")
    @classmethod
    def _no_mixture_within(cls, source: str) -> str:
        if source == MIXTURE:
            raise ValueError("'mix' cannot be a part of itself")
        return source


class DataSpec(SourceSpec):
    """What is read and how it becomes tokens: one source, or with source = "mix" those of `mix`."""

    tokenizer: Annotated[
        str, about("'bytes' (no download), OWNER/NAME of the hub, or a name that --model NAME=FOLDER binds")
    ] = "bytes"
    tokenizer_revision: Annotated[
        str, about("commit or tag of the tokenizer; name one, so that all peers read alike")
    ] = ""
    sequence_length: Annotated[Size, about("tokens a sequence")] = 256
    holdout: Annotated[
        float,
        Field(gt=0, lt=0.5),
        about("share of documents kept for validation where the source has no split of its own"),
    ] = 0.02
    mix: Annotated[
        tuple[MixSpec, ...],
        Field(max_length=64),
        about("for source = 'mix': a [[data.mix]] each, with source, weight and what else a source has"),
    ] = ()

    @field_validator("tokenizer")
    @classmethod
    def _no_path(cls, tokenizer: str) -> str:
        return _name(tokenizer)

    @model_validator(mode="after")
    def _mixture_is_named(self) -> DataSpec:
        if (self.source == MIXTURE) != bool(self.mix):
            raise ValueError("source must be 'mix' where [[data.mix]] lists sources, and only there")
        return self

    def parts(self) -> tuple[tuple[SourceSpec, float], ...]:
        """Every source with its share of the tokens; the shares add up to 1."""
        if not self.mix:
            return ((self, 1.0),)
        total = sum(part.weight for part in self.mix)
        return tuple((part, part.weight / total) for part in self.mix)


class TrainSpec(Section):
    """The inner optimization: AdamW or Muon, clipped, warm-up and cosine over the run's progress."""

    total_steps: Annotated[
        Positive, about("inner steps of one peer; the schedule of the learning rate covers them")
    ] = 60_000
    batch_size: Annotated[Size, about("sequences an inner step of one peer")] = 16
    learning_rate: Annotated[PositiveFloat, about("peak of the schedule; the replicas spread more with it")] = 1e-3
    min_learning_rate: Annotated[
        float, Field(ge=0, le=1), about("share of the peak that is left at the end of the cosine")
    ] = 0.1
    warmup_steps: Annotated[int, Field(ge=0), about("inner steps of linear warm-up")] = 100
    weight_decay: Annotated[NonNegative, about("of matrices; the paper uses none")] = 0.0
    clip_norm: Annotated[PositiveFloat, about("largest norm of a gradient")] = 1.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1), about("decay of the first moment")] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1), about("decay of the second moment")] = 0.95
    inner_optimizer: Annotated[
        Literal["adamw", "muon"],
        about("adamw; muon = Muon for hidden matrices, AdamW for embeddings, head and vectors"),
    ] = "adamw"
    muon_momentum: Annotated[float, Field(ge=0, lt=1), about("of Muon alone")] = 0.95

    @model_validator(mode="after")
    def _warmup_fits(self) -> TrainSpec:
        if self.warmup_steps >= self.total_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be less than total_steps {self.total_steps}")
        return self


class OuterSpec(Section):
    """The NoLoCo outer step (arXiv 2506.10911): who mixes what, how strongly, how long one waits for it."""

    inner_steps: Annotated[
        Positive | Literal["auto"],
        about('inner steps a round; fewer mix better and send more; "auto" = as few as the link carries'),
    ] = 50
    min_inner_steps: Annotated[Positive, about('bounds of inner_steps = "auto"')] = 5
    max_inner_steps: Annotated[Positive, about('the longest round of "auto", however slow the link')] = 200
    alpha: Annotated[
        float, Field(ge=0, lt=1), about("outer momentum kept from round to round; 0 did best, paper: 0.5")
    ] = 0.0
    beta: Annotated[PositiveFloat, about("strength of the outer gradient; paper: 0.7")] = 1.0
    gamma: Annotated[
        PositiveFloat, about("pull towards the partner's weights; about 1 - alpha^2, and bounded (checked); paper: 0.7")
    ] = 1.0
    swap_momentum: Annotated[bool, about("average outer momentum too; false = the paper's exact rule")] = True
    inner_momentum: Annotated[
        Literal["none", "swap"],
        about('"swap" = average momentum of the inner optimizer too, as it was when the round began'),
    ] = "none"
    weigh_tokens: Annotated[
        bool, about("true = each of two outer gradients counts by the tokens behind it; paper: false")
    ] = False
    max_wait_s: Annotated[
        NonNegative, about("seconds to wait for a partner's gradient at the end of a round, before going on without it")
    ] = 60.0
    closing_rounds: Annotated[
        Annotated[int, Field(ge=0, le=64)] | Literal["auto"],
        about('rounds of mixing alone when training is done; "auto" = log2 of the peers, and 3 more'),
    ] = "auto"

    @property
    def is_auto(self) -> bool:
        """Round lengths are chosen while training (`gossip/round_length.py`)."""
        return self.inner_steps == "auto"

    @property
    def keeps_momentum(self) -> bool:
        """With alpha 0 nothing is carried from round to round: no vector in memory, in a checkpoint or on the wire."""
        return self.alpha > 0

    @property
    def sends_momentum(self) -> bool:
        """Outer momentum is a section of every swap."""
        return self.swap_momentum and self.keeps_momentum

    @property
    def sends_inner_momentum(self) -> bool:
        """The inner optimizer's momentum is a section of every swap."""
        return self.inner_momentum == "swap"

    @property
    def first_inner_steps(self) -> int:
        """Length of a peer's first round, before anything is measured: with "auto" the middle of its bounds."""
        if self.inner_steps == "auto":
            return round(math.sqrt(self.min_inner_steps * self.max_inner_steps))
        return self.inner_steps

    @property
    def longest_round(self) -> int:
        """In inner steps: no peer of the run has a longer one."""
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
        """Mixing strength at which the spread of randomly paired replicas stops shrinking (exact, mean square)."""
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
        """What is set and has no effect, or is unwise."""
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
            "int8 or better; modulo8 has int8's bytes and is far more exact; modulo takes half while partners are near"
        ),
    ] = "bf16"
    outer_momentum: Annotated[StateCodecName, about("bf16 or modulo8 recommended")] = "bf16"
    outer_gradient: Annotated[
        GradientCodecName,
        about('int8 loses nothing in published runs, int4 hardly anything; "none" = not sent, nothing is waited for'),
    ] = "int8"

    inner_momentum: Annotated[CodecName, about('of outer.inner_momentum = "swap"')] = "int8"

    @property
    def has_late_part(self) -> bool:
        """Outer gradients travel, at the end of each round."""
        return self.outer_gradient != "none"

    @model_validator(mode="after")
    def _weights_need_bits(self) -> CodecSpec:
        if self.slow_weights == "int4":
            raise ValueError("slow_weights cannot be int4: weights need at least int8, or the replicas stop improving")
        return self


class EvaluateSpec(Section):
    """Perplexity on the same held-out sequences for every peer."""

    every_rounds: Annotated[Positive, about("rounds between two evaluations")] = 10
    num_sequences: Annotated[Size, about("held-out sequences an evaluation")] = 64


class PipelineSpec(Section):
    """A model that is larger than a peer: each peer holds one of `stages` runs of blocks; with 1 it holds all."""

    stages: Annotated[int, Field(ge=1, le=MAX_STAGES), about("1 = every peer holds the whole model")] = 1
    cut: Annotated[
        tuple[int, ...] | Literal["auto"],
        about('number of blocks of each stage; stage 0 also holds the vocabulary; "auto" = not cut yet'),
    ] = "auto"
    microbatch: Annotated[Size, about("sequences that travel through the stages together")] = 1
    activations: Annotated[CodecName, about(f"codec of what a stage sends to the next one: {CODECS}")] = "int8"
    gradients: Annotated[CodecName, about("codec of the gradients of activations, which travel back")] = "int8"
    routing: Annotated[
        Literal["random", "fast"], about("replica that a microbatch goes to: random, or by measured rate (fast)")
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
    """What the peers of any run share. `digest()` names the run, `load()` and `from_json()` check what they read, and
    `canonical_json()` travels between peers.

    `RunSpec` is that of a training script, `TrainerSpec` that of `noloco join`.
    """

    version: Annotated[Literal[1], about("format of this file")] = SPEC_VERSION
    name: Annotated[
        str,
        Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
        about("letters, digits, . _ -; the run is known by this name and a digest of all settings"),
    ]
    run_key: Annotated[
        str,
        Field(pattern=r"^(12D3KooW[1-9A-HJ-NP-Za-km-z]{44})?$"),
        about('signs the invitations to a private run; `noloco init --private` makes it; "" = everybody may enter'),
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
        """Inner steps of the whole run: `progress` is counted in shares of them."""
        raise NotImplementedError

    @property
    def boundary_wait_s(self) -> float:
        """How long training may wait at the end of a round; not at all where swaps have no late part."""
        return self.outer.max_wait_s if self.codec.has_late_part else 0.0

    def warnings(self) -> list[str]:
        """What is set and has no effect, or is unwise."""
        warnings = self.outer.warnings()
        codec_default = CodecSpec.model_fields["inner_momentum"].default
        if self.codec.inner_momentum != codec_default and not self.outer.sends_inner_momentum:
            warnings.append("codec.inner_momentum is ignored: outer.inner_momentum = 'none'")
        if not self.codec.has_late_part:
            why = "outer gradients do not travel (codec.outer_gradient = 'none')"
            if self.outer.weigh_tokens:
                warnings.append(f"outer.weigh_tokens is ignored: {why}")
            if self.outer.max_wait_s != OuterSpec.model_fields["max_wait_s"].default:
                warnings.append(f"outer.max_wait_s has an effect in closing rounds alone: {why}")
        return warnings

    def canonical_json(self) -> bytes:
        """One byte string for one spec: sorted keys, no spaces; all fields, defaults too, but those of YOUNG and, in an
        open run, the run key."""
        values = self.model_dump(mode="json", exclude=None if self.run_key else {"run_key"})
        for dotted in YOUNG:
            section, _, key = dotted.rpartition(".")
            own: Section | None = getattr(self, section, None) if section else self
            fields = {} if own is None else type(own).model_fields
            if key in fields and getattr(own, key) == fields[key].default:
                del (values[section] if section else values)[key]
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> str:
        """64 hexadecimal digits (blake3 of the canonical JSON)."""
        return blake3(self.canonical_json()).hexdigest()

    @property
    def first_inner_steps(self) -> int:
        """Length of a peer's first round: with "auto" a fifth of the run at most, where the bounds allow that."""
        first, total_steps = self.outer.first_inner_steps, self.schedule_steps
        if not self.outer.is_auto:
            return first
        return min(first, max(self.outer.min_inner_steps, total_steps // 5), total_steps)

    @property
    def run_id(self) -> str:
        """Name and the first eight digits of the digest: short enough for folders and log lines."""
        return f"{self.name}-{self.digest()[:8]}"

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, origin: str) -> Self:
        """Check `values`; SpecError names every wrong dotted field and `origin`.

        Of `Spec` itself it gives a RunSpec or a TrainerSpec; those two refuse values that are of the other kind.
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
            fix = "a ticket is longer: copy all of it" if is_cut else f"`noloco init {path}` writes a run spec"
            raise SpecError(f"{path}: no such file; {fix}") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SpecError(f"{path}: cannot be read as TOML: {error}") from None
        return cls.from_dict(values, origin=str(path))

    @classmethod
    def from_json(cls, data: bytes, *, expected_digest: str, origin: str) -> Self:
        """Read what another peer sent; the digest of the ticket decides whether it is the spec that was meant."""
        if len(data) > MAX_SPEC_BYTES:
            raise SpecError(f"{origin}: a spec of {len(data)} bytes is over the limit of {MAX_SPEC_BYTES}")
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{origin}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise SpecError(f"{origin}: a spec is a table of fields, not {type(values).__name__}")
        spec = cls.from_dict(values, origin=origin)
        if spec.digest() != expected_digest:
            got, asked = spec.digest()[:16], expected_digest[:16]
            raise SpecError(f"{origin}: its spec has the digest {got}.., the ticket asks for {asked}..")
        return spec

    def with_changes(self, changes: dict[str, Any], *, origin: str = "change") -> Self:
        """A new spec with dotted fields replaced, for example `{"outer.alpha": 0.3}`. Raises SpecError."""
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
    """The run of a training script, whose model, data and inner optimizer are its own and stand in no spec."""

    total_steps: Annotated[Positive, about("inner steps of one peer; its progress counts them")] = 60_000

    @property
    def schedule_steps(self) -> int:
        return self.total_steps


class TrainerSpec(Spec):
    """The run of a language model that `noloco join` trains."""

    model: Annotated[ModelSpec, about("A Llama made from sizes, or any causal language model by name.")] = ModelSpec()
    data: Annotated[
        DataSpec, about("What the swarm reads. A spec names data and never holds a path: paths belong to one machine.")
    ] = DataSpec()
    train: Annotated[TrainSpec, about("The inner optimization of each peer.")] = TrainSpec()
    evaluate: Annotated[EvaluateSpec, about("Perplexity on the same held-out sequences for all peers.")] = (
        EvaluateSpec()
    )
    pipeline: Annotated[
        PipelineSpec,
        about("Stages, for a model that is larger than a peer; `noloco init --stages N` writes this section."),
    ] = PipelineSpec()

    @model_validator(mode="after")
    def _stages_fit_the_model(self) -> TrainerSpec:
        cut, num_layers = self.pipeline.cut, self.model.num_layers
        if cut != "auto" and not self.model.pretrained and sum(cut) != num_layers:
            raise ValueError(f"pipeline.cut has {sum(cut)} blocks in all, and model.num_layers is {num_layers}")
        if self.pipeline.stages == 1:
            return self
        if not self.model.parameter_seeds:
            raise ValueError("model.parameter_seeds must be true in a run with stages: a peer draws its own part alone")
        if self.model.lora.rank:
            raise ValueError("model.lora.rank must be 0 in a run with stages: adapters cannot be cut yet")
        if self.outer.sends_inner_momentum:
            raise ValueError("outer.inner_momentum must be 'none' in a run with stages")
        if self.pipeline.microbatch > self.train.batch_size:
            raise ValueError(
                f"pipeline.microbatch {self.pipeline.microbatch} must be at most train.batch_size "
                f"{self.train.batch_size}"
            )
        return self

    @classmethod
    def of(cls, spec: Spec) -> TrainerSpec:
        """The same spec. Raises SpecError when it is that of a script."""
        if not isinstance(spec, TrainerSpec):
            raise SpecError(f"{spec.name}: {OTHER_KIND['RunSpec']}")
        return spec

    @property
    def schedule_steps(self) -> int:
        return self.train.total_steps


def _name(name: str) -> str:
    """A hub name, or one that a machine binds. A path would make each machine look at a place that a stranger chose."""
    if name and not (HUB_NAME.fullmatch(name) or PLAIN_NAME.fullmatch(name)):
        raise ValueError(
            f"{name!r} must be OWNER/NAME of the hub, or a plain name that is bound with --model NAME=FOLDER; "
            "a spec never holds a path"
        )
    return name


def describe(error: ValidationError) -> str:
    """One line per wrong field, with its dotted name: `outer.gamma must be < ...`."""
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
