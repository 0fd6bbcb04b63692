"""The tokenizer of bytes as other programs want it: a prompt that it codes does not end.

ByT5's own puts the end of the text behind whatever it is given, which nothing could be continued from.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from noloco_p2p.data.feed import BYTE_OFFSET


def for_export(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The ids of ByT5 for the same bytes, without its end; any other tokenizer as it is."""
    if not isinstance(tokenizer, ByT5Tokenizer):
        return tokenizer
    special = [tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token]
    vocabulary = {str(token): number for number, token in enumerate(special)}
    vocabulary |= {letter: BYTE_OFFSET + byte for byte, letter in enumerate(_letters())}
    coder = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=tokenizer.unk_token))
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    coder.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=coder,
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
    )


def _letters() -> list[str]:
    """What `ByteLevel` writes for each byte: itself where it can be seen in Latin-1, else the next from 256 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
