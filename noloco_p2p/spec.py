"""Define the run spec, which holds everything that the peers of a run share.

A spec is frozen. The digest of its canonical JSON names the run: peers with the same digest train the same model on the
same data with the same outer step. Settings that belong to one machine are in `settings.py`.

This module does not import torch, so `noloco init` and `noloco status` start fast.
"""

from __future__ import annotations

import difflib
import errno
import json
import re
import reprlib
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

from blake3 import blake3
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from noloco_p2p.errors import SpecError

SPEC_VERSION = 1
SIMILAR = 0.75  # names of which one may be a slip for the other
MAX_SPEC_BYTES = 64 * 1024  # a larger spec from the network is refused

ActivationCodecName = Literal["fp32", "bf16", "int8"]
StateCodecName = Literal[ActivationCodecName, "modulo"]  # modulo is for vectors in which partners nearly agree
STATE_CODECS, ACTIVATION_CODECS = (", ".join(get_args(names)) for names in (StateCodecName, ActivationCodecName))
FURTHEST = 0.05  # of the schedule that a peer may be behind the swarm
FURTHEST_STEPS = 32  # that it may be behind in a short run
MAX_STAGES = 64
MOST_SHOWN = 32  # characters of a file name that may be a part of a ticket
MAX_LAYERS = 4096  # bounded because counting the parameters of a model iterates over its layers


def field(default: Any, about: str, **bounds: Any) -> Any:
    """Define a field, with a line about it for its comment in a spec file, its row in docs/ and the help of its flag.

    `bounds` are those of pydantic's `Field`.
    """
    return Field(default, description=about, **bounds)


Positive = Annotated[int, Field(gt=0, le=10**12)]  # bounded so that a stranger's spec cannot cause an overflow
Size = Annotated[int, Field(gt=0, le=2**22)]  # the size of a tensor or a batch
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

RUN_SPEC_FIELD = "total_steps"  # at the top level of a RunSpec, but in the `train` section of a TrainerSpec
OTHER_KIND = {
    "RunSpec": "this run is trained by a script; start that script with the same spec or ticket",
    "TrainerSpec": (
        "this run is trained by `noloco join`; a RunSpec cannot have a model, data, train or evaluate section"
    ),
}
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# For a name without an owner, the hub's libraries would look for a packaged builder or for a folder on this machine.
HUB_NAME = re.compile(rf"{PLAIN_NAME.pattern}/{PLAIN_NAME.pattern}")
MIXTURE = "mix"  # the `source` of a DataSpec that mixes several sources


def _name(name: str) -> str:
    """Check that `name` is a name on the hub, or a name that a machine can bind.

    A path would let a stranger choose a file or folder on each machine.
    """
    if name and not (HUB_NAME.fullmatch(name) or PLAIN_NAME.fullmatch(name)):
        raise ValueError(
            f"{name!r} is neither OWNER/NAME on the hub nor a plain name bound with --model NAME=FOLDER; "
            "a spec cannot contain a path"
        )
    return name


def _source(source: str) -> str:
    if source.startswith("hub:"):
        if not HUB_NAME.fullmatch(source[4:]):
            raise ValueError(f"{source!r} must have the form hub:OWNER/NAME, for example hub:allenai/c4")
    elif not source.replace("-", "").replace("_", "").isalnum():
        raise ValueError(
            f"{source!r} must be 'stdlib', 'hub:OWNER/NAME' or a plain name bound with --data NAME=GLOB; "
            "a spec cannot contain a path"
        )
    return source


Name = Annotated[str, AfterValidator(_name)]


class Section(BaseModel):
    """A section of a spec. The first paragraph of its docstring is the comment on it in a spec file and its text in
    docs/.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LoraSpec(Section):
    """Low-rank adapters (arXiv 2106.09685). With a rank above 0, the model is frozen, and only the adapters are trained
    and sent.
    """

    rank: int = field(0, "rank of the adapters; 0 means no adapters, so all weights are trained", ge=0)
    alpha: PositiveFloat = field(16.0, "the output of each adapter is multiplied by alpha / rank")
    dropout: float = field(0.0, "dropout on the input of each adapter", ge=0, lt=1)
    targets: str = field(
        "all-linear", "modules with adapters: 'all-linear', or comma-separated names such as 'q_proj,v_proj'"
    )
    base_dtype: Literal["fp32", "bf16", "nf4"] = field(
        "fp32",
        "dtype of the frozen weights; bf16 halves their memory; nf4 (QLoRA) needs a quarter of that for the weights "
        "of linear layers, and the extra `lowmem`",
    )

    @model_validator(mode="after")
    def _quantized_weights_are_frozen(self) -> LoraSpec:
        if self.base_dtype == "nf4" and not self.rank:
            raise ValueError("base_dtype can be 'nf4' only with a rank above 0: quantized weights cannot be trained")
        return self


class ModelSpec(Section):
    """A Llama of given sizes, or any causal language model by name (`pretrained`, with a `revision`)."""

    pretrained: Name = field(
        "", "OWNER/NAME on the hub, or a name bound with --model NAME=FOLDER; if empty, the sizes below apply"
    )
    revision: str = field("", "commit or tag of `pretrained`; set it so that all peers start with the same weights")
    random_weights: bool = field(
        False, "if true, use only the architecture of `pretrained`, with random weights drawn from `seed`"
    )
    vocab_size: Size = field(384, "vocabulary size; must not be smaller than the tokenizer's (384 for bytes)")
    hidden_size: Size = field(128, "hidden width, a multiple of num_heads")
    num_layers: int = field(4, "number of transformer blocks", gt=0, le=MAX_LAYERS)
    num_heads: Size = field(4, "number of attention heads; the usual width of a head is 32 to 128")
    num_kv_heads: Size | None = field(
        None, "number of key-value heads, by default num_heads; fewer heads use less memory"
    )
    mlp_size: Size = field(344, "inner width of the MLP, usually 8/3 to 4 times hidden_size")
    tied_embeddings: bool = field(
        True, "use one matrix for the input and output embeddings, so that fewer parameters are sent"
    )
    seed: int = field(0, "seed of the initial weights")
    parameter_seeds: bool = field(
        False,
        "if true, each parameter has its own seed, derived from `seed` and the parameter's name; "
        "required in runs with stages",
    )
    start: str = field(
        "", "digest of the initial state of a forked run; set by `noloco fork`", pattern=r"^(blake3:[0-9a-f]{64})?$"
    )
    lora: LoraSpec = LoraSpec()

    @model_validator(mode="after")
    def _sizes_fit(self) -> ModelSpec:
        if self.random_weights and not self.pretrained:
            raise ValueError("random_weights requires model.pretrained to name a model")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be a multiple of num_heads ({self.num_heads})")
        if self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"hidden_size / num_heads ({self.hidden_size} / {self.num_heads}) must be even, because of "
                "rotary position embeddings"
            )
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        return self

    def num_parameters(self) -> int:
        """Return the exact number of parameters of a Llama of these sizes, or 0 if `pretrained` is set.

        Rotary position embeddings have no parameters.
        """
        if self.pretrained:
            return 0
        norms = (2 * self.num_layers + 1) * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_matrix_parameters() + norms + embeddings

    def num_matrix_parameters(self) -> int:
        """Return how many of these parameters belong to the matrices of the blocks, which Muon can train."""
        kv_size = self.hidden_size // self.num_heads * (self.num_kv_heads or self.num_heads)
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * kv_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.mlp_size)


class SourceSpec(Section):
    """A source of text: the built-in corpus, the hub, or a name that `--data NAME=GLOB` binds on each machine."""

    source: Annotated[str, AfterValidator(_source)] = field(
        "stdlib", "'stdlib' (built in), 'hub:OWNER/NAME' (streamed), a name bound with --data NAME=GLOB, or 'mix'"
    )
    subset: str = field("", "subset of a hub data set")
    revision: str = field("", "commit or tag of a hub data set")
    split: str = field("train", "training split of a hub data set")
    validation_split: str = field(
        "validation", "validation split of a hub data set; if empty, documents of `split` are held out"
    )
    format: Literal["text", "chat", "prompt"] = field(
        "text",
        "what a row holds: `text`; a `chat` in `messages` or `conversations`; or a `prompt` and its `completion`; "
        "the last two use the tokenizer's chat template, and only the assistant's tokens count in the loss",
    )
    text_field: str = field(
        "text", "name of the text field in JSON Lines or Parquet files; a field `input_ids` with token ids also works"
    )

    @model_validator(mode="after")
    def _the_built_in_corpus_is_text(self) -> SourceSpec:
        if self.source == "stdlib" and self.format != "text":
            raise ValueError(f"format must be 'text' for the built-in corpus (source 'stdlib'), not {self.format!r}")
        return self


class MixSpec(SourceSpec):
    """One source of a mixture. Its share of the tokens is its `weight` divided by the sum of all weights."""

    weight: PositiveFloat = field(
        1.0, "weight of this source; its share of the tokens is its weight divided by the sum of all weights"
    )

    @field_validator("source")
    @classmethod
    def _no_mixture_within(cls, source: str) -> str:
        if source == MIXTURE:
            raise ValueError("'mix' is not allowed here, because a mixture cannot contain another mixture")
        return source


class DataSpec(SourceSpec):
    """The training data and its tokenizer. A spec refers to data by name and contains no paths, because paths differ
    between machines. There is one source, or several in `mix` if `source` is "mix".
    """

    tokenizer: Name = field(
        "bytes", "'bytes' (no download), OWNER/NAME on the hub, or a name bound with --model NAME=FOLDER"
    )
    tokenizer_revision: str = field("", "commit or tag of the tokenizer; set it so that all peers use the same version")
    sequence_length: Size = field(256, "tokens per sequence")
    holdout: float = field(
        0.02,
        "fraction of the documents that is held out for validation if the source has no validation split",
        gt=0,
        lt=0.5,
    )
    mix: tuple[MixSpec, ...] = field(
        (),
        "sources of a mixture; each [[data.mix]] table has a source, a weight and the other fields of a source",
        max_length=64,
    )

    @model_validator(mode="after")
    def _mixture_is_named(self) -> DataSpec:
        if (self.source == MIXTURE) != bool(self.mix):
            raise ValueError("source must be 'mix' if and only if [[data.mix]] lists sources")
        return self

    def parts(self) -> tuple[tuple[SourceSpec, float], ...]:
        """Return every source with its share of the tokens. The shares sum to 1."""
        if not self.mix:
            return ((self, 1.0),)
        total = sum(part.weight for part in self.mix)
        return tuple((part, part.weight / total) for part in self.mix)

    @property
    def packs_samples(self) -> bool:
        """Return whether a sequence holds whole samples that do not see each other, instead of a cut of the text."""
        return any(part.format != "text" for part, _ in self.parts())


class TrainSpec(Section):
    """The inner optimization: AdamW or Muon with gradient clipping, warm-up and a cosine schedule over the run's
    progress.
    """

    total_steps: Positive = field(60_000, "inner steps of one peer over the whole learning rate schedule")
    batch_size: Size = field(16, "sequences per inner step of one peer")
    learning_rate: PositiveFloat = field(1e-3, "peak learning rate; a higher peak increases the spread of the replicas")
    min_learning_rate: float = field(0.1, "final learning rate, as a fraction of the peak", ge=0, le=1)
    warmup_steps: int = field(100, "inner steps of linear warm-up", ge=0)
    weight_decay: NonNegative = field(0.0, "weight decay of matrices; the paper uses none")
    clip_norm: PositiveFloat = field(1.0, "maximum norm of the gradient; larger gradients are scaled down")
    adam_beta1: float = field(0.9, "decay rate of the first moment", ge=0, lt=1)
    adam_beta2: float = field(0.95, "decay rate of the second moment", ge=0, lt=1)
    inner_optimizer: Literal["adamw", "adamw8bit", "muon"] = field(
        "adamw",
        "adamw, adamw8bit or muon; adamw8bit keeps moments of 1 byte instead of 4, and needs the extra `lowmem`; muon "
        "applies Muon to hidden matrices, and AdamW to embeddings, the head and vectors; with 0.12M parameters, it "
        "ended lower than AdamW alone (docs/results.md)",
    )
    muon_momentum: float = field(0.95, "momentum of Muon", ge=0, lt=1)

    @model_validator(mode="after")
    def _warmup_fits(self) -> TrainSpec:
        if self.warmup_steps >= self.total_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be less than total_steps ({self.total_steps})")
        return self


class OuterSpec(Section):
    """How a peer mixes its weights with those of its partners.

    By default, half-differences are added to the weights as soon as they arrive, and there is no outer step. With
    `wait`, peers use the algorithm of the NoLoCo paper (arXiv 2506.10911).
    """

    min_inner_steps: Positive | Literal["auto"] = field(
        "auto",
        "least number of inner steps from one swap to the next; "
        '"auto" keeps the time that training loses by adding, and on a CPU by coding, at 2 %; with 0.12M '
        "parameters, fewer swaps ended higher (docs/results.md)",
    )
    alpha: float = field(0.0, "fraction of the outer momentum kept in each outer step; the paper uses 0.5", ge=0, lt=1)
    beta: PositiveFloat = field(1.0, "coefficient of the outer gradient in the outer step; the paper uses 0.7")
    gamma: PositiveFloat | None = field(
        None,
        "strength of the pull toward the partner's weights in the outer step; if it is not set, it equals beta, as "
        "in the paper's experiments; another value needs `wait`, and values that make training diverge are rejected",
    )
    inner_steps: Positive = field(
        50, "inner steps between two outer steps, if alpha is above 0, beta is not 1, or `wait` is set"
    )
    wait: bool = field(
        False, "use the paper's algorithm: after every `inner_steps`, training waits until all weights are swapped"
    )
    max_wait_s: NonNegative = field(60.0, "longest wait for a swap, in seconds, if `wait` is set")
    swap_momentum: bool = field(False, "also average the outer momentum, if `wait` is set")
    closing_mixings: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = field(
        "auto",
        "how often each part of the weights is mixed without training at the end of the run; "
        '"auto" means log2 of the number of peers, plus 3',
    )

    @property
    def pull(self) -> float:
        """Return gamma, which equals beta if it is not set."""
        return self.beta if self.gamma is None else self.gamma

    @property
    def keeps_momentum(self) -> bool:
        """Return whether the outer momentum is carried over from one outer step to the next."""
        return self.alpha > 0

    @property
    def has_outer_step(self) -> bool:
        """Return whether a peer keeps its weights after the last outer step in memory, and takes outer steps."""
        return self.wait or self.alpha > 0 or self.beta != 1

    @property
    def sends_slow_weights(self) -> bool:
        """Return whether the weights after the last outer step travel, too. They matter only if gamma is not beta."""
        return self.wait and self.pull != self.beta

    @property
    def sends_momentum(self) -> bool:
        return self.wait and self.swap_momentum and self.keeps_momentum

    @field_validator("min_inner_steps", mode="before")
    @classmethod
    def _a_number_or_auto(cls, value: object) -> object:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        raise ValueError(f"{str(value)!r} must be a positive number of inner steps or 'auto'")

    def gamma_bound(self) -> float:
        """Return the mixing strength at which the spread of randomly paired replicas stops shrinking.

        The bound is exact for the mean square of the spread.
        """
        if self.swap_momentum:
            return 2 * (2 - self.alpha**2) / (2 + self.alpha)
        return 2 * (1 - self.alpha**2)

    @model_validator(mode="after")
    def _stable(self) -> OuterSpec:
        if self.pull != self.beta and not self.wait:
            raise ValueError("gamma can differ from beta only if `wait` is set")
        if self.swap_momentum and not self.wait:
            raise ValueError("swap_momentum needs `wait`")
        bound = self.gamma_bound()
        if self.pull >= bound:
            formula = "2 (2 - alpha^2) / (2 + alpha)" if self.swap_momentum else "2 (1 - alpha^2)"
            raise ValueError(
                f"gamma must be < {formula} = {bound:.4g} for alpha {self.alpha:g} and "
                f"swap_momentum {str(self.swap_momentum).lower()}; with {self.pull:g}, training diverges"
            )
        return self

    def warnings(self) -> list[str]:
        """Return warnings about settings that have no effect or are unwise."""
        defaults, warnings = OuterSpec.model_fields, []
        if not self.has_outer_step and self.inner_steps != defaults["inner_steps"].default:
            warnings.append("outer.inner_steps is ignored: it has an effect only with an outer step")
        if not self.wait and self.max_wait_s != defaults["max_wait_s"].default:
            warnings.append("outer.max_wait_s is ignored: it has an effect only with outer.wait")
        if self.alpha > 0.5:
            warnings.append(f"outer.alpha {self.alpha:g} is above 0.5, so replicas drift further apart between swaps")
        return warnings


class CodecSpec(Section):
    """How weights are encoded for swaps."""

    weights: StateCodecName = field(
        "modulo",
        f"codec of the weights: {STATE_CODECS}; modulo takes half as many bytes as int8 while the partners' weights "
        "are close, and is more accurate",
    )


class EvaluateSpec(Section):
    """The evaluation: perplexity on held-out sequences, which are the same for all peers."""

    every_steps: Positive = field(500, "inner steps of a peer between two evaluations")
    num_sequences: Size = field(64, "held-out sequences per evaluation")


class PipelineSpec(Section):
    """The stages of a model that is too large for one peer. `noloco init --stages N` writes this section.

    The consecutive blocks of the model are divided into `stages` stages, and each peer holds one of them. With one
    stage, each peer holds all blocks.
    """

    stages: int = field(1, "number of stages; with 1, every peer holds the whole model", ge=1, le=MAX_STAGES)
    cut: tuple[int, ...] | Literal["auto"] = field(
        "auto",
        'number of blocks in each stage; stage 0 also holds the vocabulary; "auto" means that the model has not '
        "been cut yet",
    )
    microbatch: Size = field(1, "number of sequences in a microbatch, which passes through the stages as a unit")
    activations: ActivationCodecName = field(
        "int8", f"codec of the activations that a stage sends to the next stage: {ACTIVATION_CODECS}"
    )
    gradients: ActivationCodecName = field(
        "int8", "codec of the gradients of activations that a stage sends to the previous stage"
    )
    routing: Literal["random", "fast"] = field(
        "random", "how the replica for a microbatch is chosen: at random (random) or by measured speed (fast)"
    )

    @field_validator("cut", mode="before")
    @classmethod
    def _numbers_or_auto(cls, value: object) -> object:
        if value == "auto":
            return value
        counts = value if isinstance(value, (list, tuple)) else ()
        if counts and all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in counts):
            return value
        raise ValueError(f"{str(value)!r} must be 'auto' or list a positive number of blocks for each stage")

    @model_validator(mode="after")
    def _cut_is_of_the_stages(self) -> PipelineSpec:
        if self.cut != "auto" and len(self.cut) != self.stages:
            raise ValueError(f"cut lists {len(self.cut)} stages, but pipeline.stages is {self.stages}")
        return self


class Spec(Section):
    """The settings that the peers of any run share.

    `digest()` identifies the run, and `canonical_json()` is the form in which peers send the spec. `load()` and
    `from_json()` check the specs that they read. `RunSpec` is the spec of a training script, and `TrainerSpec` is the
    spec of `noloco join`.
    """

    version: Literal[1] = field(SPEC_VERSION, "version of the spec format")
    name: str = field(
        ...,
        "name of the run: letters, digits, '.', '_' and '-'; a run is identified by its name and its spec's digest",
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    run_key: str = field(
        "",
        "id of the key that signs invitations to a private run, set by `noloco init --private`; "
        "if empty, anybody can join",
        pattern=r"^(12D3KooW[1-9A-HJ-NP-Za-km-z]{44})?$",
    )
    outer: OuterSpec = OuterSpec()
    codec: CodecSpec = CodecSpec()

    @property
    def schedule_steps(self) -> int:
        """Return the number of inner steps of the whole run. `progress` is the fraction of them that is done."""
        raise NotImplementedError

    def warnings(self) -> list[str]:
        """Return warnings about settings that have no effect or are unwise."""
        return self.outer.warnings()

    def canonical_json(self) -> bytes:
        """Return the canonical bytes of a spec: sorted keys, no spaces, and all fields including defaults."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> str:
        """Return the digest of the spec: 64 hexadecimal digits (BLAKE3 of the canonical JSON)."""
        return blake3(self.canonical_json()).hexdigest()

    @property
    def furthest(self) -> float:
        """Return how far behind the swarm a peer may be before it fetches the state of another."""
        return max(FURTHEST, FURTHEST_STEPS / self.schedule_steps)

    @property
    def run_id(self) -> str:
        """Return the run's name and the first eight digits of its digest.

        It is short enough for folder names and log lines.
        """
        return f"{self.name}-{self.digest()[:8]}"

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, origin: str) -> Self:
        """Check `values` and return the spec. Raises SpecError, which gives `origin` and the dotted name of every
        invalid field.

        `Spec.from_dict` returns a RunSpec or a TrainerSpec. Each of the two subclasses refuses the values of the other.
        """
        kind = RunSpec if RUN_SPEC_FIELD in values else TrainerSpec
        if not issubclass(kind, cls):
            raise SpecError(f"{origin}: {OTHER_KIND[kind.__name__]}")
        try:
            return cast("Self", kind.model_validate(values))
        except ValidationError as error:
            raise SpecError(f"{origin}: {describe(error, kind)}") from None

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a spec from a TOML file.

        Raises SpecError if the file is missing, is not TOML, or holds a wrong value.
        """
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except IsADirectoryError:
            raise SpecError(f"{path} is a folder, and neither a spec nor a ticket") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            if getattr(error, "errno", None) in (errno.ENOENT, errno.ENAMETOOLONG):
                raise SpecError(_no_file(path)) from None
            fix = f"; if it contains a ticket, write @{path}" if isinstance(error, tomllib.TOMLDecodeError) else ""
            raise SpecError(f"{path} cannot be read as TOML: {error}{fix}") from None
        return cls.from_dict(values, origin=str(path))

    @classmethod
    def from_json(cls, data: bytes, *, expected_digest: str, origin: str) -> Self:
        """Read a spec that another peer sent. Raises SpecError if the spec is invalid, or if its digest is not the one
        in the ticket. Nothing of a spec with another digest is read or described.
        """
        if len(data) > MAX_SPEC_BYTES:
            raise SpecError(f"{origin}: a spec of {len(data)} bytes exceeds the limit of {MAX_SPEC_BYTES} bytes")
        if (got := blake3(data).hexdigest()) != expected_digest:
            raise SpecError(
                f"{origin}: its spec has the digest {got[:16]}.., but the digest in the ticket is "
                f"{expected_digest[:16]}.."
            )
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{origin} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise SpecError(f"{origin}: a spec must be a table of fields, but this is of type {type(values).__name__}")
        spec = cls.from_dict(values, origin=origin)
        if spec.canonical_json() != data:
            raise SpecError(f"{origin}: its spec is not in the canonical form")
        return spec

    def with_changes(self, changes: dict[str, Any], *, origin: str = "change") -> Self:
        """Return a new spec with some dotted fields replaced, for example `{"outer.alpha": 0.3}`.

        Raises SpecError for an unknown field or a wrong value.
        """
        values = self.model_dump(mode="json")
        for dotted, value in changes.items():
            *sections, key = dotted.split(".")
            target = values
            for section in sections:
                target = target.get(section)
                if not isinstance(target, dict):
                    break
            if not isinstance(target, dict) or key not in target:
                raise SpecError(f"{origin}: {dotted} is not a field of a run spec{_meant(dotted, type(self))}")
            target[key] = value
        return self.from_dict(values, origin=origin)


class RunSpec(Spec):
    """The spec of a training script, which defines its model, data and inner optimizer outside the spec."""

    total_steps: Positive = field(60_000, "inner steps that one peer takes while its progress goes from 0 to 1")

    @property
    def schedule_steps(self) -> int:
        return self.total_steps


class TrainerSpec(Spec):
    """The spec of a language model that `noloco join` trains."""

    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    train: TrainSpec = TrainSpec()
    evaluate: EvaluateSpec = EvaluateSpec()
    pipeline: PipelineSpec = PipelineSpec()

    @model_validator(mode="after")
    def _stages_fit_the_model(self) -> TrainerSpec:
        cut, num_layers = self.pipeline.cut, self.model.num_layers
        if cut != "auto" and not self.model.pretrained and sum(cut) != num_layers:
            raise ValueError(f"pipeline.cut lists {sum(cut)} blocks in total, but model.num_layers is {num_layers}")
        if self.pipeline.stages == 1:
            return self
        if self.outer.wait:
            raise ValueError("outer.wait must be false in a run with stages, because a stage never waits for a swap")
        if not self.model.parameter_seeds:
            raise ValueError(
                "model.parameter_seeds must be true in a run with stages, because a peer initializes only its part"
            )
        if self.data.packs_samples:
            raise ValueError(
                "data.format must be 'text' in a run with stages, because the borders of samples do not travel yet"
            )
        if self.model.lora.rank:
            raise ValueError(
                "model.lora.rank must be 0 in a run with stages, because adapters cannot be cut into stages yet"
            )
        if self.pipeline.microbatch > self.train.batch_size:
            raise ValueError(
                f"pipeline.microbatch ({self.pipeline.microbatch}) must be at most train.batch_size "
                f"({self.train.batch_size})"
            )
        return self

    @classmethod
    def of(cls, spec: Spec) -> TrainerSpec:
        """Return the same spec, typed as a TrainerSpec. Raises SpecError if it is the spec of a script."""
        if not isinstance(spec, TrainerSpec):
            raise SpecError(f"{spec.name}: {OTHER_KIND['RunSpec']}")
        return spec

    @property
    def schedule_steps(self) -> int:
        return self.train.total_steps


def _no_file(path: Path) -> str:
    """Return what is wrong with a path that leads nowhere, which may be a part of a ticket."""
    if path.suffix:
        return f"{path} does not exist; run `noloco init {path}` to create it"
    name = str(path) if len(str(path)) <= MOST_SHOWN else f"{str(path)[:MOST_SHOWN]}.."
    return f"'{name}' is neither a file nor a ticket; tickets begin with noloco1: copy all of it, and put it in quotes"


def _key(part: str | int) -> str:
    """Return a part of a field's dotted name. A name that no field has may be anything."""
    text = str(part)
    return text if text.isidentifier() or text.isdecimal() else reprlib.repr(text)


def _fields(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return the fields of a model and of its sections, by dotted name."""
    found = dict[str, FieldInfo]()
    for name, field in model.model_fields.items():
        found[prefix + name] = field
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found |= _fields(field.annotation, f"{prefix}{name}.")
    return found


def _meant(dotted: str, model: type[BaseModel]) -> str:
    """Return a question about the field that may be meant by an unknown name, or "" if none is similar."""
    names = {name: name.rpartition(".")[2] for name in _fields(model)}
    close = difflib.get_close_matches(dotted, names, n=1, cutoff=SIMILAR)
    if not close:
        ends = difflib.get_close_matches(dotted.rpartition(".")[2], names.values(), n=1, cutoff=SIMILAR)
        close = [name for name, end in names.items() if end in ends]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """Describe each wrong field with its dotted name, for example `outer.gamma must be < ...`."""
    lines = []
    for item in error.errors():
        dotted = ".".join(_key(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        first_word = message.split(" ", 1)[0]
        if item["type"] == "value_error":
            if first_word.isidentifier():  # our own checks already name the field
                dotted, message = f"{dotted}.{first_word}" if dotted else first_word, message.partition(" ")[2]
        elif item["type"] == "extra_forbidden":
            message = f"is not a known field{_meant(dotted, model)}"
        elif item["type"] == "string_pattern_mismatch" and (field := _fields(model).get(dotted)):
            message = f"{reprlib.repr(item['input'])} is not a valid {(field.description or '').partition(';')[0]}"
        elif message.startswith("Input should "):
            given = f"; it is {reprlib.repr(item['input'])}" if isinstance(item["input"], str | int | float) else ""
            message = f"must {message.removeprefix('Input should ')}{given}"
        else:
            dotted += ":"
        lines.append(f"{dotted} {message}".lstrip())
    return "; ".join(lines)
