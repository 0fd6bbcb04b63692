"""A model in stages computes what the whole model does, bit for bit, and a stage takes memory for its own part only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CONFIG_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from noloco_p2p.errors import ModelError
from noloco_p2p.spec import ModelSpec
from noloco_p2p.trainer import weights
from noloco_p2p.trainer.compute import Compute, blocks
from noloco_p2p.trainer.model import build_model, build_on_meta, causal_lm_loss, hidden_matrices
from noloco_p2p.trainer.stage import Stage, build_stage, dropout_seed, measure
from noloco_p2p.trainer.weights import seed_of

TOKENS = 17  # 16 are predicted: dividing by a power of two changes only the exponent
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": None,
}
SLIDING = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen2 tied": {
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": SLIDING,
    },
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "layer_types": SLIDING},
    "qwen3 tied": {"tie_word_embeddings": True},
    "gemma tied": {"tie_word_embeddings": True},
    "gemma": {"tie_word_embeddings": False},
    "gemma2 tied": {"tie_word_embeddings": True, "sliding_window": 4, "layer_types": SLIDING},
    "gemma2": {"tie_word_embeddings": False, "sliding_window": 4, "final_logit_softcapping": 0.5},
    "gemma3_text tied": {"tie_word_embeddings": True, "sliding_window": 4, "layer_types": SLIDING},
}
CUTS = [(4,), (3, 1), (1, 2, 1), (1, 1, 1, 1)]
LLAMA = ModelSpec(hidden_size=32, num_layers=4, num_heads=4, mlp_size=48, parameter_seeds=True)


def config_of(kind: str, **changes: object) -> PreTrainedConfig:
    name = kind.partition(" ")[0]
    return CONFIG_MAPPING[name](**{"tie_word_embeddings": False, **SIZES, **KINDS[kind], **changes})


def named(config: PreTrainedConfig, folder: Path, **changes: object) -> tuple[ModelSpec, dict[str, str]]:
    """Return a spec that draws weights for a config, and the folder that binds its name."""
    config.save_pretrained(folder)
    values = {"pretrained": "mine", "random_weights": True, "parameter_seeds": True, "seed": 3, **changes}
    return ModelSpec.model_validate(values), {"mine": str(folder)}


def in_stages(spec: ModelSpec, cut: Sequence[int], **options: Any) -> list[Stage]:
    return [build_stage(spec, cut, index=index, sequence_length=TOKENS, **options) for index in range(len(cut))]


def some_tokens(rows: int = 2) -> Tensor:
    return torch.randint(0, 64, (rows, TOKENS), generator=torch.Generator().manual_seed(5))


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """Move the weights away from their start, so that no norm is 1 everywhere and no logit is near 0."""
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed_of(name)))
        param.data += 0.2 * noise
    return model


def ring(stages: Sequence[Stage], tokens: Tensor) -> Tensor:
    """Send one microbatch forward and back; return the sum of losses."""
    head, inputs = stages[0], [tokens]
    for stage in stages:
        inputs.append(stage.forward(inputs[-1]))
    result = head.loss_backward(inputs[-1], tokens)
    assert result.num_tokens == tokens[:, 1:].numel()
    assert torch.equal(head.loss(inputs[-1], tokens), result.loss)
    gradient = result.gradient
    for stage, received in reversed(list(zip(stages[1:], inputs[1:-1], strict=True))):
        passed = stage.backward(received, gradient)
        assert passed is not None
        gradient = passed
    assert head.backward(tokens, gradient) is None
    return result.loss


def parameters(stages: Sequence[Stage]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for stage in stages:
        own = dict(stage.model.named_parameters())
        assert not found.keys() & own.keys()
        found |= own
    return found


def assert_same_gradients(whole: PreTrainedModel, stages: Sequence[Stage], *, share: float = 1.0) -> None:
    parts = parameters(stages)
    for name, param in whole.named_parameters():
        gradient = parts[name].grad
        assert param.grad is not None
        assert gradient is not None
        assert param.grad.any(), name
        assert torch.equal(param.grad, gradient * share), name


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_of_stages_is_the_whole_model_bit_for_bit(kind: str, cut: tuple[int, ...], tmp_path: Path) -> None:
    spec, folders = named(config_of(kind), tmp_path)
    whole = build_model(spec, sequence_length=TOKENS, folders=folders)
    stages = in_stages(spec, cut, folders=folders)
    parts = parameters(stages)
    assert list(parts) == [name for name in dict.fromkeys(parts) if name in dict(whole.named_parameters())]
    assert len(parts) == len(list(whole.parameters()))
    for name, param in whole.named_parameters():
        assert torch.equal(param, parts[name]), name

    shaken(whole)
    for stage in stages:
        shaken(stage.model)
    tokens = some_tokens()
    loss = causal_lm_loss(whole, tokens)
    loss.backward()
    summed = ring(stages, tokens)
    num_tokens = tokens[:, 1:].numel()
    assert float(summed) / num_tokens == float(loss.detach())
    assert_same_gradients(whole, stages, share=1 / num_tokens)


def test_a_ring_in_bf16_is_the_whole_model_in_bf16() -> None:
    whole, stages = build_model(LLAMA, sequence_length=TOKENS), in_stages(LLAMA, (2, 2), compute=Compute("bf16"))
    tokens = some_tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = whole(input_ids=tokens, labels=tokens, num_items_in_batch=1).loss
    loss.backward()
    assert torch.equal(ring(stages, tokens), loss.detach())
    assert_same_gradients(whole, stages)


def test_logits_in_chunks_sum_the_same_terms_in_another_order() -> None:
    (head,) = in_stages(LLAMA, (4,))
    tokens = some_tokens()
    hidden = head.forward(tokens)
    at_once = head.loss_backward(hidden, tokens)
    whole = head.model.get_parameter("model.embed_tokens.weight").grad
    assert whole is not None
    head.model.zero_grad()
    chunked = head.loss_backward(hidden, tokens, chunk_tokens=5)
    assert chunked.num_tokens == at_once.num_tokens
    torch.testing.assert_close(chunked.loss, at_once.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(chunked.gradient, at_once.gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.model.get_parameter("model.embed_tokens.weight").grad, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.loss(hidden, tokens, chunk_tokens=5), at_once.loss, rtol=1e-6, atol=0)


def test_both_forward_passes_of_a_microbatch_drop_the_same(tmp_path: Path) -> None:
    spec, folders = named(config_of("llama", attention_dropout=0.5), tmp_path)
    inner = in_stages(spec, (2, 2), folders=folders)[1]
    received, back = torch.randn(1, TOKENS, 16), torch.randn(1, TOKENS, 16)
    seed = dropout_seed("head/7", 1)
    sent = inner.forward(received, seed=seed)
    assert not torch.equal(sent, inner.forward(received, seed=dropout_seed("head/7", 2)))
    leaf = received.clone().requires_grad_()
    torch.manual_seed(seed)
    again = inner.model.base_model(inputs_embeds=leaf).last_hidden_state
    assert torch.equal(again, sent)
    again.backward(back)
    torch.manual_seed(0)
    gradient = inner.backward(received, back, seed=seed)
    assert gradient is not None
    assert torch.equal(gradient, leaf.grad)  # pyright: ignore[reportArgumentType]


def test_activation_checkpointing_changes_no_bit_and_compilation_is_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, saving = in_stages(LLAMA, (2, 2)), in_stages(LLAMA, (2, 2), compute=Compute(activation_checkpointing=True))
    tokens = some_tokens()
    assert torch.equal(ring(plain, tokens), ring(saving, tokens))
    for name, param in parameters(plain).items():
        assert torch.equal(parameters(saving)[name].grad, param.grad), name  # pyright: ignore[reportArgumentType]
    compiled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    head, inner = in_stages(LLAMA, (1, 3), compute=Compute(compile=True))
    assert compiled == [*blocks(head.model), *blocks(inner.model)]


# the interface to the rest of the trainer


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_from_the_meta_device_are_those_of_the_stages(kind: str, tmp_path: Path) -> None:
    spec, folders = named(config_of(kind), tmp_path)
    cut = (1, 2, 1)
    sizes = measure(build_on_meta(spec, sequence_length=TOKENS, folders=folders), sequence_length=TOKENS)
    assert (sizes.num_blocks, sizes.hidden_size) == (4, 16)
    for stage in in_stages(spec, cut, folders=folders):
        part = sizes.stage(cut, stage.index)
        assert part.num_parameters == sum(param.numel() for param in stage.model.parameters())
        assert part.num_matrix_parameters == sum(matrix.numel() for matrix in hidden_matrices(stage.model))
        assert stage.hidden_size == 16


# initial weights


@pytest.mark.parametrize("kind", ["llama tied", "qwen2", "gemma2", "gemma3_text tied"])
def test_seeds_of_parameters_draw_what_the_model_draws_by_itself(kind: str, tmp_path: Path) -> None:
    config = config_of(kind, hidden_size=96, intermediate_size=96, head_dim=96, pad_token_id=0)
    spec, folders = named(config, tmp_path)
    own = build_model(spec, sequence_length=TOKENS, folders=folders)
    usual = build_model(spec.model_copy(update={"parameter_seeds": False}), sequence_length=TOKENS, folders=folders)
    drawn = dict(own.named_parameters())
    for name, param in usual.named_parameters():
        if param.std() == 0:
            assert torch.equal(drawn[name], param), name
        else:
            assert not torch.equal(drawn[name], param), name
            assert abs(drawn[name].std() / param.std() - 1) < 0.1, name
            assert abs(drawn[name].mean()) < 0.1 * param.std(), name
    assert not own.get_parameter("model.embed_tokens.weight")[0].any(), "the embedding of the padding"
    buffers = dict(own.named_buffers())
    assert buffers.keys() == dict(usual.named_buffers()).keys()
    for name, buffer in usual.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    assert own.config.to_dict() == usual.config.to_dict()
    assert not any(hasattr(param, weights.KEPT) for param in own.parameters())


def test_another_seed_gives_other_weights_and_the_callers_random_state_stays() -> None:
    before = torch.get_rng_state()
    one, two = in_stages(LLAMA, (2, 2))[1], in_stages(LLAMA.model_copy(update={"seed": 1}), (2, 2))[1]
    assert torch.equal(torch.get_rng_state(), before)
    name = "model.layers.2.mlp.up_proj.weight"
    assert not torch.equal(one.model.get_parameter(name), two.model.get_parameter(name))
    assert not torch.equal(one.model.get_parameter(name), one.model.get_parameter(name.replace("up", "gate")))


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that are created on the CPU, including freed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        makes = isinstance(out, Tensor) and out.device.type == "cpu" and all(out is not each for each in args)
        if makes and "view" not in str(func) and "detach" not in str(func):
            self.num_bytes += out.nbytes
        return out


def test_a_stage_takes_memory_for_its_own_parameters_alone() -> None:
    spec = LLAMA.model_copy(update={"num_layers": 20, "vocab_size": 20_000})
    with Allocations() as made:
        inner = build_stage(spec, (5, 5, 10), index=1, sequence_length=TOKENS)
    own = sum(param.nbytes for param in inner.model.parameters())
    assert own == 5 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) * 4
    assert own <= made.num_bytes < own + 4096
    assert not any(tensor.is_meta for tensor in [*inner.model.parameters(), *inner.model.buffers()])
    assert spec.num_parameters() * 4 > 6 * own


# pretrained weights


@pytest.fixture
def saved(tmp_path: Path) -> tuple[ModelSpec, dict[str, str], PreTrainedModel]:
    """Save a model in bf16 in many files; return its spec, its folders, and the model that the trainer loads."""
    model = shaken(build_model(LLAMA.model_copy(update={"tied_embeddings": False}), sequence_length=TOKENS))
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")  # pyright: ignore[reportArgumentType]
    spec, folders = ModelSpec(pretrained="mine", parameter_seeds=True), {"mine": str(tmp_path)}
    whole = spec.model_copy(update={"parameter_seeds": False})
    return spec, folders, build_model(whole, sequence_length=TOKENS, folders=folders)


def test_a_stage_reads_its_own_tensors_from_the_files_that_hold_them(
    saved: tuple[ModelSpec, dict[str, str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, folders, whole = saved
    opened, read = set[str](), list[str]()
    really_open = weights.safe_open

    class Recorder:
        def __init__(self, path: str, framework: str) -> None:
            opened.add(Path(path).name)
            self.file = really_open(path, framework=framework)

        def __enter__(self) -> Recorder:
            self.file = self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(weights, "safe_open", Recorder)
    inner = build_stage(spec, (1, 2, 1), index=1, sequence_length=TOKENS, folders=folders)
    own = dict(inner.model.named_parameters())
    assert sorted(read) == sorted(own)
    index = json.loads((Path(folders["mine"]) / "model.safetensors.index.json").read_text())["weight_map"]
    assert opened == {index[name] for name in own}
    assert opened < set(index.values())
    stages = in_stages(spec, (1, 2, 1), folders=folders)
    for name, param in whole.named_parameters():
        assert torch.equal(parameters(stages)[name], param), name
        assert param.dtype == torch.float32
    tokens = some_tokens()
    loss = causal_lm_loss(whole, tokens)
    loss.backward()
    ring(stages, tokens)
    assert_same_gradients(whole, stages, share=1 / 32)
    again = build_model(spec, sequence_length=TOKENS, folders=folders)
    assert torch.equal(again.get_parameter("lm_head.weight"), whole.get_parameter("lm_head.weight"))


def test_a_model_in_one_file_with_tied_embeddings_is_read_too(tmp_path: Path) -> None:
    model = shaken(build_model(LLAMA, sequence_length=TOKENS))
    model.save_pretrained(tmp_path)
    spec, folders = ModelSpec(pretrained="mine", parameter_seeds=True), {"mine": str(tmp_path)}
    stages = in_stages(spec, (1, 3), folders=folders)
    head = stages[0].model
    assert head.get_parameter("lm_head.weight") is head.get_parameter("model.embed_tokens.weight")
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))  # the mapped file changes, but no weight does
    for name, param in model.named_parameters():
        assert torch.equal(parameters(stages)[name], param), name


def test_weights_that_are_missing_or_of_another_shape_are_named(
    saved: tuple[ModelSpec, dict[str, str], PreTrainedModel],
) -> None:
    spec, folders, _ = saved
    index = Path(folders["mine"]) / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    shape_of = json.loads((Path(folders["mine"]) / "config.json").read_text())
    (Path(folders["mine"]) / "config.json").write_text(json.dumps({**shape_of, "intermediate_size": 50}))
    with pytest.raises(ModelError, match=r"has no tensor model\.layers\.2\.mlp\.\w+\.weight of shape \[\d+, \d+\]"):
        build_stage(spec, (2, 2), index=1, sequence_length=TOKENS, folders=folders)
    del values["weight_map"]["model.layers.2.mlp.up_proj.weight"]
    index.write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"lists no file for the tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        build_stage(spec, (2, 2), index=1, sequence_length=TOKENS, folders=folders)
    index.unlink()
    with pytest.raises(ModelError, match=r"model 'mine' cannot be loaded: .*model\.safetensors"):
        build_stage(spec, (2, 2), index=1, sequence_length=TOKENS, folders=folders)


# models that are refused


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_mixture_of_experts_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    spec, folders = named(CONFIG_MAPPING[kind](), tmp_path)
    with pytest.raises(ModelError, match=rf"'mine' is a mixture of experts \({kind}\), which cannot be cut"):
        build_stage(spec, (16, 16), index=0, sequence_length=TOKENS, folders=folders)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "gpt_neox", "phi3", "granite", "gemma3", "bert"])
def test_what_is_not_known_to_be_divisible_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    spec, folders = named(CONFIG_MAPPING[kind](), tmp_path)
    with pytest.raises(
        ModelError, match=rf"'mine' is a {kind} model, which cannot be cut into stages; use one of gemma,"
    ):
        build_stage(spec, (6, 6), index=0, sequence_length=TOKENS, folders=folders)
    with pytest.raises(ModelError, match="cannot be cut"):
        build_model(spec, sequence_length=TOKENS, folders=folders)


def test_a_cut_of_another_model_and_sequences_too_long_are_refused(tmp_path: Path) -> None:
    spec, folders = named(config_of("llama"), tmp_path)
    with pytest.raises(ModelError, match=r"pipeline\.cut lists 5 blocks in total, but the model has 4"):
        build_stage(spec, (2, 3), index=0, sequence_length=TOKENS, folders=folders)
    with pytest.raises(ModelError, match=r"is 33, .* only 32 positions"):
        build_stage(spec, (2, 2), index=0, sequence_length=33, folders=folders)


def test_a_seed_on_the_cpu_leaves_accelerators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed queues a call with a stack trace for each accelerator that has not been used yet."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("it seeds all devices"))
    in_stages(LLAMA, (2, 2))[0].forward(some_tokens(), seed=3)
