"""The loss in chunks of tokens is the model's own loss, and no logits of more than a chunk ever exist."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedModel

from noloco_p2p.spec import LoraSpec, ModelSpec, TrainSpec
from noloco_p2p.trainer import chunked_loss
from noloco_p2p.trainer.chunked_loss import IGNORED, ChunkedLoss
from noloco_p2p.trainer.compute import Compute, switch_on
from noloco_p2p.trainer.evaluate import evaluate_loss
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import build_model, causal_lm_loss

TIED = ModelSpec(vocab_size=400, hidden_size=32, num_layers=2, num_heads=2, mlp_size=48)
UNTIED = TIED.model_copy(update={"tied_embeddings": False})
LORA = TIED.model_copy(update={"lora": LoraSpec(rank=4)})
TOKENS = torch.arange(3 * 40).view(3, 40) * 7 % 400
CHUNK = 17  # tokens; the last one of a batch is smaller
TRAIN = TrainSpec(learning_rate=1e-2, warmup_steps=0, total_steps=50)


def build(spec: ModelSpec = TIED) -> PreTrainedModel:
    return build_model(spec, sequence_length=40)


def capped() -> PreTrainedModel:
    """A model that changes its logits before the loss."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Gemma2Config(vocab_size=400, **sizes, num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.1)
    model = AutoModelForCausalLM.from_config(config)
    model.forward = ChunkedLoss(model)
    return model.train()


def head_sees(model: PreTrainedModel) -> list[int]:
    """Return a list that gets the number of tokens of each call of the head."""
    seen, head = list[int](), model.get_output_embeddings()
    assert head is not None
    head.register_forward_hook(lambda *given: seen.append(given[2].shape[:-1].numel()))
    return seen


def own(model: PreTrainedModel) -> Any:
    """Return what the forward function of the model itself gives."""
    assert isinstance(model.forward, ChunkedLoss)
    return model.forward.__wrapped__(input_ids=TOKENS, labels=TOKENS)


def backward(model: PreTrainedModel, labels: Tensor, **kwargs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(input_ids=TOKENS, labels=labels, **kwargs).loss
    (3 * loss).backward()  # as in a batch of several passes
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return loss.detach(), gradients


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 4 * 400 * CHUNK)


def both(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, labels: Tensor = TOKENS, **kwargs: Tensor) -> None:
    """Compare the loss and the gradients in chunks with those of the model itself."""
    loss, gradients = backward(model, labels, **kwargs)
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 4 * 400 * CHUNK)
    seen = head_sees(model)
    chunked, of_chunks = backward(model, labels, **kwargs)
    assert seen == [17, 17, 17, 17, 17, 17, 17, 1]
    torch.testing.assert_close(chunked, loss, rtol=1e-5, atol=0)
    assert of_chunks.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_chunks[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", [TIED, UNTIED, LORA], ids=["tied", "untied", "lora"])
def test_gradients_are_those_of_the_plain_loss(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    both(build(spec), monkeypatch)


def test_what_the_model_does_to_its_logits_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    both(capped(), monkeypatch)


def test_ignored_labels_do_not_count_and_positions_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.where(TOKENS % 3 == 0, TOKENS, IGNORED)
    both(build(), monkeypatch, labels, position_ids=torch.arange(40).remainder(20).expand(3, 40))


def test_gradients_in_bf16_are_those_of_the_plain_loss_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, gradients = backward(model, TOKENS)
        monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 4 * 400 * CHUNK)
        chunked, of_chunks = backward(model, TOKENS)
    torch.testing.assert_close(chunked, loss, rtol=1e-3, atol=0)
    for name, gradient in gradients.items():
        assert (of_chunks[name] - gradient).norm() < 0.02 * gradient.norm(), name


def test_a_single_chunk_is_the_models_own_loss() -> None:
    model = build()
    assert torch.equal(model(input_ids=TOKENS, labels=TOKENS).logits, own(model).logits)


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("spec", [TIED, LORA], ids=["all weights", "lora"])
@pytest.mark.parametrize(
    "compute",
    [Compute(micro_batch=1), Compute(micro_batch=2), Compute(activation_checkpointing=True), Compute(compile=True)],
    ids=str,
)
def test_steps_accumulate_checkpoint_and_compile(spec: ModelSpec, compute: Compute) -> None:
    one, two = build(spec), build(spec)
    one.forward = one.forward.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    switch_on(two, compute)
    plain, chunked = InnerStep(one, TRAIN), InnerStep(two, TRAIN, compute)
    for _ in range(3):
        torch.testing.assert_close(chunked(TOKENS, progress=0.1), plain(TOKENS, progress=0.1), rtol=1e-3, atol=0)


@pytest.mark.usefixtures("in_chunks")
@torch.no_grad()
def test_an_evaluation_and_a_copy_of_the_model_are_in_chunks_too() -> None:
    model = build()
    again = copy.deepcopy(model)
    again.get_parameter("lm_head.weight").zero_()
    expected, seen = float(own(model).loss), head_sees(model)
    assert evaluate_loss(model, [TOKENS]) == pytest.approx(expected, rel=1e-6)
    assert max(seen) == CHUNK
    assert float(causal_lm_loss(again, TOKENS)) == pytest.approx(math.log(400))
