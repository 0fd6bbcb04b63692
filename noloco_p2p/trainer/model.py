"""Build the model and the tokenizer that a run spec names. The same spec gives the same model on every peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from noloco_p2p.data.samples import read_marks
from noloco_p2p.errors import ModelError
from noloco_p2p.spec import DataSpec, ModelSpec
from noloco_p2p.trainer.chunked_loss import ChunkedLoss
from noloco_p2p.trainer.lora import add_adapters, base_dtype, quantize
from noloco_p2p.trainer.model_source import CONFIG, TOKENIZER, WEIGHTS, ModelSource, find_source
from noloco_p2p.trainer.needs import Counts
from noloco_p2p.trainer.weights import draw, load

ATTENTION = "sdpa"
# The tests cut each of these and compare it with the whole model, bit for bit.
DIVISIBLE = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
PIPELINE_PARTS = {"embed_tokens", "layers", "norm"}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
HUB_ADVICE = (
    "Check the name, the revision and the network connection, and log in with `hf auth login` if access is "
    "restricted. Alternatively, bind a folder on this machine with --model NAME=FOLDER"
)


def build_model(spec: ModelSpec, *, sequence_length: int, folders: Mapping[str, str] | None = None) -> PreTrainedModel:
    """Build the model at the start of the run, in fp32, on the CPU, in training mode.

    `folders` maps the names that are bound on this machine to their folders. With `lora.rank`, the weights are frozen
    and stored in `lora.base_dtype`, and the adapters are fp32.

    Weights that are drawn from `spec.seed` are bitwise identical on machines with the same version of torch and the
    same kind of CPU. On other machines, the last bit may differ, but the first swaps even out such differences. The
    caller's random state is not changed. No code from the hub is run, and only safetensors files are read. Raises
    ModelError if the model cannot be loaded.
    """
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.seed)  # torch.manual_seed would also change the accelerators' state
        if spec.parameter_seeds:
            model = build_on_meta(spec, sequence_length=sequence_length, folders=folders)
            give_weights(model, spec, folders=folders)
        else:
            model = _named(spec, _source(spec, folders)) if spec.pretrained else _llama(spec, sequence_length)
        if spec.lora.rank:
            torch.nn.Module.to(model, base_dtype(spec.lora))
            if spec.lora.base_dtype == "nf4":
                quantize(model)
            add_adapters(model, spec.lora)
    if model.config.model_type in DIVISIBLE:
        model.forward = ChunkedLoss(model)
    return _for_training(model, spec, sequence_length)


def build_on_meta(
    spec: ModelSpec, *, sequence_length: int, folders: Mapping[str, str] | None = None
) -> PreTrainedModel:
    """Build the model without memory for its weights, so that a caller can cut it into stages or draw its parameters.

    Raises ModelError if the model cannot be cut. Until then, only its config is read.
    """
    with quiet(), torch.device("meta"):
        if not spec.pretrained:
            return _for_training(_llama(spec, sequence_length), spec, sequence_length)
        source = _source(spec, folders)
        with _loading("model", spec.pretrained, spec.revision):
            config = _config(source.folder(CONFIG))
        _check_divisible(config, spec.pretrained)
        architecture = spec.model_copy(update={"random_weights": True})
        return _for_training(_named(architecture, source), spec, sequence_length)


def give_weights(model: PreTrainedModel, spec: ModelSpec, *, folders: Mapping[str, str] | None = None) -> None:
    """Draw or read the start weights of a model (or part of a model) that `build_on_meta` built, in place.

    Raises ModelError if the weights cannot be read.
    """
    if spec.random_weights or not spec.pretrained:
        return draw(model, seed=spec.seed)
    source = _source(spec, folders)
    with _loading("model", spec.pretrained, spec.revision):
        load(model, source)


def _check_divisible(config: PreTrainedConfig, name: str) -> None:
    """Raise ModelError unless the model is known to give the same numbers when it is cut into parts."""
    kind = config.model_type
    if any(getattr(config.get_text_config(), key, None) for key in EXPERTS):
        raise ModelError(
            f"{name!r} is a mixture of experts ({kind}), which cannot be cut into stages: its auxiliary loss "
            "spans all stages"
        )
    parts = getattr(config, "base_model_pp_plan", None) or {}
    if kind not in DIVISIBLE or set(parts) != PIPELINE_PARTS:
        raise ModelError(
            f"{name!r} is a {kind} model, which cannot be cut into stages; use one of {', '.join(DIVISIBLE)}"
        )
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"{name!r} is quantized, so its parts cannot be loaded separately; specify the unquantized model"
        )


def _for_training(model: PreTrainedModel, spec: ModelSpec, sequence_length: int) -> PreTrainedModel:
    """Set the model up for training. Raises ModelError if the sequences are longer than the model allows."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and limit < sequence_length:
        raise ModelError(
            f"data.sequence_length is {sequence_length}, but {spec.pretrained!r} has only {limit} positions"
        )
    model.config.use_cache = False  # training does not use a key-value cache; export switches it on again
    return model.train()


def build_outline(
    spec: ModelSpec, *, sequence_length: int, folders: Mapping[str, str] | None = None
) -> PreTrainedModel:
    """Build the model as `build_model` does, but without memory for its weights.

    If the spec gives the model by name, only its config is read. Raises ModelError if the config cannot be read.
    """
    with torch.device("meta"):
        return build_model(
            spec.model_copy(update={"random_weights": bool(spec.pretrained), "parameter_seeds": False}),
            sequence_length=sequence_length,
            folders=folders,
        )


def count_parameters(spec: ModelSpec, *, sequence_length: int, folders: Mapping[str, str] | None = None) -> Counts:
    """Count the parameters in the outline of a model."""
    model = build_outline(spec, sequence_length=sequence_length, folders=folders)
    trainable = {id(param): param.numel() for param in model.parameters() if param.requires_grad}
    in_matrices = sum(trainable.get(id(matrix), 0) for matrix in hidden_matrices(model))
    frozen_bytes = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    return Counts(sum(trainable.values()), in_matrices, frozen_bytes)


def _source(spec: ModelSpec, folders: Mapping[str, str] | None) -> ModelSource:
    return find_source("model.pretrained", spec.pretrained, revision=spec.revision, folders=folders)


def build_tokenizer(data: DataSpec, *, folders: Mapping[str, str] | None = None) -> PreTrainedTokenizerBase:
    """Build the tokenizer of a run.

    The tokenizer `bytes` needs neither files nor a network. Other names are looked up in `folders`, then on the hub.
    Raises ModelError if the tokenizer cannot be loaded.
    """
    if data.tokenizer == "bytes":
        return ByT5Tokenizer()
    source = find_source("data.tokenizer", data.tokenizer, revision=data.tokenizer_revision, folders=folders)
    with _loading("tokenizer", data.tokenizer, data.tokenizer_revision):
        return AutoTokenizer.from_pretrained(source.folder(TOKENIZER), trust_remote_code=False)


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if the tokenizer has an id for which the model has no embedding."""
    vocab_size = model.config.get_text_config().vocab_size
    if len(tokenizer) > vocab_size:
        raise ModelError(
            f"model.vocab_size is {vocab_size}, but the tokenizer has {len(tokenizer)} tokens; "
            f"set model.vocab_size to {len(tokenizer)} or more, or choose another data.tokenizer"
        )


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Return the weights that Muon optimizes. They are the weights of all linear layers except the output head.

    Embeddings are not linear layers.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head and id(module.weight) not in embeddings
    ]


def causal_lm_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token in nats, with its autograd graph.

    `tokens` has the shape (sequences, tokens).
    """
    return model(input_ids=tokens, labels=tokens).loss


def samples_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of the learned tokens of a marked batch (`data/samples.py`)."""
    ids, targets, positions = read_marks(batch)
    # With a key-value cache, transformers ignores that the positions begin again, and samples would see each other.
    return model(input_ids=ids, labels=targets, position_ids=positions, use_cache=False).loss


def loss_for(data: DataSpec) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return the loss for the batches of a run, whose data decide whether they are marked."""
    return samples_loss if data.packs_samples else causal_lm_loss


def causal_lm_logits(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return logits of shape (sequences, tokens, vocabulary) for `tokens` and `positions` (sequences, tokens)."""
    return model(input_ids=tokens, position_ids=positions, use_cache=False).logits


def configure_for_export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Configure the model for other programs, with the key-value cache that training disables.

    A model that was fine-tuned keeps its own end tokens, of which there can be several, if that of the tokenizer is
    among them.
    """
    model.config.use_cache = True
    for config in (model.config, model.generation_config):
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
            config.eos_token_id = tokenizer.eos_token_id
        if tokenizer.pad_token_id is not None:
            config.pad_token_id = tokenizer.pad_token_id


def save_config(model: PreTrainedModel, folder: Path) -> None:
    """Write what `save_pretrained` writes, except for the weights, which are written elsewhere, in fp32."""
    model.config.dtype = "float32"
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and messages of transformers, and restore its settings afterwards."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _llama(spec: ModelSpec, sequence_length: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.mlp_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads or spec.num_heads,
        max_position_embeddings=sequence_length,
        tie_word_embeddings=spec.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,  # the tokenizer sets it on export
    )
    config._attn_implementation = ATTENTION
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # whatever the default dtype of a script


def _named(spec: ModelSpec, source: ModelSource) -> PreTrainedModel:
    """Load a model by name. It uses sdpa attention, or eager attention if the model lacks sdpa (Gemma2)."""
    with _loading("model", spec.pretrained, spec.revision):
        if spec.random_weights:
            config = _config(source.folder(CONFIG))
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        folder, dtype = source.folder(WEIGHTS), base_dtype(spec.lora)
        return AutoModelForCausalLM.from_pretrained(
            folder, config=_config(folder), use_safetensors=True, dtype=dtype, trust_remote_code=False
        )


def _config(folder: Path) -> PreTrainedConfig:
    """Read the config of a model. Its choice of attention is dropped, because it can name a kernel on the hub."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config._attn_implementation = None
    return config


@contextmanager
def _loading(what: str, name: str, revision: str) -> Iterator[None]:
    """Load something by name without output. Raises ModelError with the reason and advice if that fails."""
    try:
        with quiet():
            yield
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001 - hub, network, parser and version errors share no base
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        at = f" at revision {revision!r}" if revision else ""
        raise ModelError(f"{what} {name!r}{at} cannot be loaded: {reason}. {HUB_ADVICE}") from None
