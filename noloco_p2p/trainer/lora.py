"""Train LoRA adapters (arXiv 2106.09685) with peft (extra `lora`). The model is frozen, so only adapters are sent.

With `base_dtype = "nf4"`, the frozen weights are quantized by bitsandbytes (extra `lowmem`; QLoRA, arXiv 2305.14314).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from noloco_p2p.errors import ModelError
from noloco_p2p.optim.inner import bitsandbytes
from noloco_p2p.spec import LoraSpec
from noloco_p2p.trainer.needs import NF4_BYTES

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ADAPTER = "default"
ALL_LINEAR = "all-linear"
NF4_BLOCK = 64  # weights that share a scale


def add_adapters(model: PreTrainedModel, lora: LoraSpec) -> None:
    """Freeze the model and add fp32 adapters to it, in place.

    The adapters are drawn from torch's generator, and do not change the output at first. Raises ModelError if peft is
    missing, or if no module matches `lora.targets`.
    """
    with suppress(ModelError):
        bitsandbytes("peft")  # which imports it, too, but would let it fetch code from the hub
    try:
        from peft import inject_adapter_in_model
    except ImportError:
        raise ModelError("model.lora requires the package peft: pip install peft") from None
    try:
        inject_adapter_in_model(_config(lora), model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ModelError(f"model.lora.targets {lora.targets!r}: {error}") from None
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.float()


def quantize(model: PreTrainedModel) -> None:
    """Store the weights of all linear layers except the head as NF4, in place, one after the other.

    A layer whose inputs do not fill whole blocks stays as it is, because bitsandbytes 0.50.2 gave back wrong weights on
    a CPU for one with 32 inputs. This runs on the CPU, whose elementwise arithmetic is exact, so that all peers get the
    same bytes. On the meta device, the weights only get the size that they would have. Raises ModelError if
    bitsandbytes is missing.
    """
    head = model.get_output_embeddings()
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, linear in found:
        if linear is head or linear.in_features % NF4_BLOCK:
            continue
        if linear.weight.is_meta:
            packed = torch.empty(int(NF4_BYTES * linear.weight.numel()), dtype=torch.uint8, device="meta")
            linear.weight = nn.Parameter(packed, requires_grad=False)
            continue
        library = bitsandbytes("model.lora.base_dtype 'nf4'").nn
        quantized = library.Linear4bit(linear.in_features, linear.out_features, bias=False, device="meta")
        weight = library.Params4bit(linear.weight.data, quant_type="nf4", module=quantized)
        quantized.weight, quantized.bias = weight.to("cpu"), linear.bias
        quantized.support_avx512bf16_for_cpu = False  # an evaluation would round the scales, and change the layout
        model.set_submodule(name, quantized)
    vars(model)["is_loaded_in_4bit"] = True  # peft reads it


def has_adapters(model: nn.Module) -> bool:
    return any(_is_adapted(module) for module in model.modules())


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the model with the adapters merged into its weights. Quantized weights become bf16.

    The model itself is not changed.
    """
    weights: dict[str, Tensor] = {}
    adapted = {name: module for name, module in model.named_modules() if _is_adapted(module)}
    packed = {name: param for name, param in model.named_parameters() if hasattr(param, "quant_state")}
    for name, tensor in model.state_dict().items():
        if any(name.startswith(f"{path}.") for path in packed):  # scales
            continue
        if name in packed:
            library = bitsandbytes("model.lora.base_dtype 'nf4'").functional
            tensor = library.dequantize_4bit(tensor, packed[name].quant_state)  # pyright: ignore[reportAttributeAccessIssue]
        owner = next((path for path in adapted if name.startswith(f"{path}.")), None)
        if owner is None:
            weights[name] = tensor
        elif name.startswith(f"{owner}.base_layer."):
            kept = name.removeprefix(f"{owner}.base_layer.")
            if kept == "weight":
                delta: Any = adapted[owner].get_delta_weight(ADAPTER)  # pyright: ignore[reportCallIssue]
                tensor = (tensor.float() + delta.float()).to(tensor.dtype)
            weights[f"{owner}.{kept}"] = tensor.contiguous()
    return weights


def save_adapters(model: nn.Module, lora: LoraSpec, folder: Path, *, base: str) -> None:
    """Write only the adapters, in the format that `PeftModel.from_pretrained(model, folder)` and vLLM read.

    `base` is the name that is recorded for the base model. Modules are listed by name, as by peft, because other
    programs do not know 'all-linear'.
    """
    config = _config(lora)
    adapted = {name.rpartition(".")[2] for name, module in model.named_modules() if _is_adapted(module)}
    config.target_modules = sorted(adapted)
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(folder))
    tensors = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": param.detach().cpu().contiguous()
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def base_dtype(lora: LoraSpec) -> torch.dtype:
    """Return the dtype of the model's own weights.

    It is fp32 unless the weights are frozen and the spec asks for less. Weights that NF4 does not apply to are bf16.
    """
    return torch.bfloat16 if lora.rank and lora.base_dtype != "fp32" else torch.float32


def _config(lora: LoraSpec) -> LoraConfig:
    from peft import LoraConfig

    names = lora.targets if lora.targets == ALL_LINEAR else [name.strip() for name in lora.targets.split(",")]
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType] - peft divides it by the rank
        lora_dropout=lora.dropout,
        target_modules=names,
        task_type="CAUSAL_LM",
    )


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")
