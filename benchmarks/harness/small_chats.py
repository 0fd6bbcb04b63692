"""Train a small tokenizer with a chat template, for tests and figures that must not download one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, BEGIN = "<|im_end|>", "<|im_start|>"
TURN = "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + ASK  # as in Qwen2 and SmolLM2


def make_tokenizer(
    texts: Iterable[str] = (), *, template: str = CHATML, vocab_size: int = 259
) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer whose merges are learned from `texts`."""
    coder = Tokenizer(models.BPE())
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    coder.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=coder, eos_token=END, pad_token="<|pad|>")
    tokenizer.chat_template = template
    return tokenizer


def write_tokenizer(folder: Path, texts: Iterable[str] = (), *, vocab_size: int = 259) -> None:
    make_tokenizer(texts, vocab_size=vocab_size).save_pretrained(folder)
