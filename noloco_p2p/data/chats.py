"""Read the messages of a chat from a row, and render them with the tokenizer's own template."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from noloco_p2p.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # `role` and `content`, and whatever else the template uses, such as `tool_calls`

FIELDS = {"chat": ("messages", "conversations"), "prompt": ("prompt", "completion")}  # by data.format
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
HAS_MASK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def check_fields(fields: Collection[str], format: str) -> None:
    """Raise ValueError unless one of the fields of a row or table is one that the format reads."""
    names = FIELDS[format]
    if not set(names).intersection(fields):
        wanted = " nor ".join(map(repr, names))
        raise ValueError(f"the fields ({', '.join(fields)[:200]}) include neither {wanted} (data.format = {format!r})")


def messages_of(row: Mapping[str, Any], format: str) -> list[Message]:
    """Return the messages of a row, which are empty if its fields are. Raises ValueError if it has no such fields."""
    check_fields(row, format)
    first, second = map(row.get, FIELDS[format])
    if format == "prompt":
        turns: Any = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    else:
        turns = first or second or []
    if not isinstance(turns, list):
        raise ValueError("the chat is not a list of messages")
    messages = [_message(number, turn) for number, turn in enumerate(turns, start=1)]
    if messages and not any(message["role"] == "assistant" for message in messages):
        raise ValueError("the chat has no message of the assistant")
    return messages


def _message(number: int, turn: Any) -> Message:
    if isinstance(turn, dict):
        message = {key: value for key, value in turn.items() if value is not None}
        if "from" in message:
            speaker = message.pop("from")
            message |= {"role": SHAREGPT_ROLES.get(speaker, speaker), "content": message.pop("value", None)}
        message.setdefault("content", "" if "tool_calls" in message else None)
        if isinstance(message.get("role"), str) and isinstance(message["content"], str):
            return message
    raise ValueError(f"message {number} has no role or no text")


def make_renderer(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> Callable[[list[Message]], tuple[np.ndarray, np.ndarray]]:
    """Return a function that turns messages into token ids, and whether the assistant said each of them.

    A template may mark what the assistant says itself (`{% generation %}`). Otherwise, what a turn of the assistant
    adds to the rendered text is the assistant's, from the end of the generation prompt on. The function raises
    ValueError if the template refuses the messages, or if it is unclear which tokens are the assistant's. Raises
    DataError if the tokenizer called `name` has no template.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"tokenizer {name!r} (data.tokenizer) has no chat template, which data.format 'chat' and 'prompt' need; "
            "use the tokenizer of a chat model, or bind a folder that also has a chat_template.jinja"
        )
    has_mask = HAS_MASK.search(tokenizer.get_chat_template())

    def render(messages: list[Message]) -> tuple[np.ndarray, np.ndarray]:
        try:
            if has_mask:
                found: Any = tokenizer.apply_chat_template(
                    messages, return_dict=True, return_assistant_tokens_mask=True
                )
                return np.asarray(found["input_ids"], np.int32), np.asarray(found["assistant_masks"], bool)
            text = _text(tokenizer, messages)
            spans = _assistant_spans(tokenizer, messages, text)
            found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        except Exception as error:  # noqa: BLE001 - a template is a program, which can raise anything
            raise ValueError(f"the chat template cannot render it: {str(error) or type(error).__name__}") from None
        starts = np.asarray([start for start, _ in found["offset_mapping"]])
        said = np.zeros(len(starts), bool)
        for begin, end in spans:
            said |= (begin <= starts) & (starts < end)
        return np.asarray(found["input_ids"], np.int32), said

    return render


def _assistant_spans(tokenizer: PreTrainedTokenizerBase, messages: list[Message], text: str) -> list[tuple[int, int]]:
    """Return where the rendered text of a chat holds what the assistant says, by rendering the chat up to each message.

    A template may show a message in another way if more messages follow, for example without its empty thoughts
    (Qwen3). Its content and what ends it are then looked up in the text.
    """
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        history = _text(tokenizer, messages[:index])
        asked = _text(tokenizer, messages[:index], add_generation_prompt=True)
        upto = _text(tokenizer, messages[: index + 1])
        begin = next((at for at, (one, other) in enumerate(zip(asked, text, strict=False)) if one != other), len(asked))
        end = len(upto)
        if not text.startswith(upto):
            content = message["content"].strip()
            said = upto[upto.rindex(content) :] if content in upto else ""
            end = text.index(said, begin) + len(said) if said and said in text[begin:] else -1
        if not len(history) <= begin <= end:
            raise ValueError(
                f"it shows message {index + 1} in another way if more messages follow; mark what the assistant says "
                "with {% generation %} in the template"
            )
        spans.append((begin, end))
    return spans


def _text(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    return str(tokenizer.apply_chat_template(messages, **options)) if messages else ""
