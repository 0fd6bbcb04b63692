"""Chats are rendered with the tokenizer's template, only the assistant's tokens count, and samples stay apart."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from harness.small_chats import ASK, CHATML, TURN, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from noloco_p2p.data.chats import make_renderer, messages_of
from noloco_p2p.data.documents import Document, Fault, Faults, is_held_out
from noloco_p2p.data.reader import Reader
from noloco_p2p.data.samples import FIRST, IDS, IGNORED, UNLEARNED, mark, num_targets, pack, read_marks, runs
from noloco_p2p.data.sources import open_source
from noloco_p2p.data.stream import Corpus, TokenStream, make_encoder, validation_batches
from noloco_p2p.errors import DataError, SpecError
from noloco_p2p.spec import DataSpec, MixSpec, TrainerSpec

TOKENIZER = make_tokenizer()
CHATS = DataSpec(source="mine", format="chat", sequence_length=64, holdout=0.2)
HELLO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "wörld 🙂"}]
TWO = [{"role": "system", "content": "be kind"}, *HELLO, {"role": "user", "content": "a?"}]
TWO += [{"role": "assistant", "content": " b"}]

IS_ASSISTANT = "{% if m['role'] == 'assistant' %}"
MARKED = (
    "{% for m in messages %}"
    + IS_ASSISTANT
    + "<|im_start|>assistant\n{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}" + TURN + "{% endif %}{% endfor %}"
)
# Qwen3 shows an empty thought in the last turn only.
THINKS_LAST = (
    "{% for m in messages %}" + IS_ASSISTANT + "{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.last %}{{ '<think></think>' }}{% endif %}{{ m['content'] + '<|im_end|>\\n' }}"
    "{% else %}" + TURN + "{% endif %}{% endfor %}" + ASK
)
# QwQ begins the thought in the generation prompt, but shows no thoughts.
ASKS_TO_THINK = CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>' }}{% endif %}")
ENDS_OTHERWISE = CHATML.replace("{% endfor %}", "{% if loop.last %}<|im_end|>{% endif %}{% endfor %}", 1)
REWRITES = "{% for m in messages %}{{ m['content'] + (messages | length) | string }}{% endfor %}"


def write_chats(path: Path, number: int = 40) -> None:
    asks = [{"role": "user", "content": f"<{index}>" * (index % 5)} for index in range(number)]
    rows = [{"messages": [ask, {"role": "assistant", "content": str(index)}]} for index, ask in enumerate(asks)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def learned(messages: list[dict[str, Any]], template: str) -> list[str]:
    """Return the texts that count in the loss."""
    ids, said = make_renderer(make_tokenizer(template=template), "own")(messages)
    return [str(TOKENIZER.decode(run)) for counts, run in runs(mark(ids, said)) if counts]


def faults_of(path: Path, data: DataSpec = CHATS, *, encode: bool = True) -> list[str]:
    found: list[Fault] = []
    faults = Faults(found.append)
    documents = list(Reader(open_source(data, {"mine": str(path)}), faults=faults).epoch())
    if encode:
        make_encoder(data, TOKENIZER, faults)(documents)
    return [str(fault).partition(": ")[2] for fault in found]


# rows


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"messages": HELLO}, "chat"),
        ({"messages": [{**turn, "name": None} for turn in HELLO]}, "chat"),
        ({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "wörld 🙂"}]}, "chat"),
        ({"prompt": "hello", "completion": "wörld 🙂", "id": 5}, "prompt"),
    ],
    ids=["messages", "parquet", "ShareGPT", "prompt"],
)
def test_rows_of_each_kind_are_the_same_chat(row: dict[str, Any], format: str) -> None:
    assert messages_of(row, format) == HELLO


@pytest.mark.parametrize(
    ("row", "format", "reason"),
    [
        (
            {"text": "a"},
            "chat",
            "the fields (text) include neither 'messages' nor 'conversations' (data.format = 'chat')",
        ),
        ({"messages": "a"}, "chat", "the chat is not a list of messages"),
        ({"messages": [HELLO[0], {"role": "assistant"}]}, "chat", "message 2 has no role or no text"),
        ({"messages": [{"content": "a"}]}, "chat", "message 1 has no role or no text"),
        ({"messages": ["a"]}, "chat", "message 1 has no role or no text"),
        ({"messages": HELLO[:1]}, "chat", "the chat has no message of the assistant"),
        ({"messages": HELLO}, "prompt", "the fields (messages) include neither 'prompt' nor 'completion'"),
        ({"prompt": "a"}, "prompt", "message 2 has no role or no text"),
    ],
)
def test_a_row_without_a_chat_is_a_fault_with_its_line(
    tmp_path: Path, row: dict[str, Any], format: str, reason: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n' * (format == "chat") + json.dumps(row) + "\n")
    data = CHATS.model_copy(update={"format": format})
    [fault] = faults_of(tmp_path / "a.jsonl", data)
    assert fault.startswith(reason)


def test_a_chat_in_parquet_is_the_one_in_json_lines(tmp_path: Path) -> None:
    write_chats(tmp_path / "a.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist([{**row, "other": 1} for row in rows]), tmp_path / "b.parquet")
    one, other = (
        [document.content for document in Reader(open_source(CHATS, {"mine": f"{tmp_path}/{name}"})).epoch()]
        for name in ("a.jsonl", "b.parquet")
    )
    assert one == other
    held_out = [is_held_out(Document(content, origin=""), 0.5) for content in one]
    assert 5 < sum(held_out) < 35


def test_a_table_or_a_text_file_without_chats_is_told(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    [fault] = faults_of(tmp_path / "a.parquet")
    assert "the fields (text) include neither 'messages' nor 'conversations'" in fault
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"a text file has no chats; data.format = 'chat' needs \.json"):
        open_source(CHATS, {"mine": str(tmp_path / "a.txt")})


# the assistant's tokens


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["wörld 🙂<|im_end|>\n", " b<|im_end|>\n"]),
        (MARKED, ["wörld 🙂<|im_end|>", " b<|im_end|>"]),
        (THINKS_LAST, ["wörld 🙂<|im_end|>\n", "<think></think> b<|im_end|>\n"]),
        (ASKS_TO_THINK, ["wörld 🙂<|im_end|>\n", " b<|im_end|>\n"]),
    ],
    ids=["prefixes", "mask", "thought in the last turn", "thought in the prompt"],
)
def test_only_what_the_assistant_says_counts(template: str, expected: list[str]) -> None:
    assert learned(TWO, template) == expected


def test_an_end_of_a_turn_is_found_where_its_text_also_stands_before() -> None:
    again = [HELLO[0], {"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}, HELLO[1]]
    assert learned(again, THINKS_LAST) == ["a<|im_end|>\n", "<think></think>wörld 🙂<|im_end|>\n"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (REWRITES, "it shows message 3 in another way if more messages follow; mark what the"),
        (ENDS_OTHERWISE, "it shows message 3 in another way if more messages follow; mark what the"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{% include '/etc/passwd' %}", "no loader for this environment specified"),
        ("{{ messages.nothing.at_all }}", "'list object' has no attribute 'nothing'"),
    ],
)
def test_a_chat_that_the_template_refuses_is_a_fault(template: str, reason: str) -> None:
    found: list[Fault] = []
    encode = make_encoder(CHATS, make_tokenizer(template=template), Faults(found.append))
    assert encode([Document(list(TWO), origin="a.jsonl", line=3)]) == []
    assert str(found[0]).startswith(f"a.jsonl, line 3: the chat template cannot render it: {reason}")


def test_a_tokenizer_without_a_template_is_told() -> None:
    with pytest.raises(DataError, match=r"tokenizer 'bytes' \(data.tokenizer\) has no chat template"):
        make_encoder(CHATS, ByT5Tokenizer(), Faults())


def test_long_chats_are_truncated_and_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    faults, found = Faults(lambda fault: found.append(fault)), list[Fault]()
    encode = make_encoder(CHATS, TOKENIZER, faults)
    answers_late = [{"role": "user", "content": "x" * 100}, HELLO[1]]
    long = [HELLO[0], {"role": "assistant", "content": "x" * 100}]
    documents = [Document(long, origin="a", line=1), Document(answers_late, origin="a", line=2)]
    [sample], [again] = encode(documents), encode(documents)  # two epochs
    assert np.array_equal(sample, again)
    assert len(sample) == CHATS.sequence_length
    assert faults.num_truncated == 1
    assert "truncated: 1 samples so far; most recent: a, line 1: 126 tokens, but data.sequence_length" in caplog.text
    assert [str(fault) for fault in found] == [
        "a, line 2: its first 64 tokens (data.sequence_length) contain none of the assistant's"
    ]


# sequences of samples


@given(st.lists(st.integers(1, 16), max_size=40))
def test_every_sample_is_packed_whole_and_once(lengths: list[int]) -> None:
    samples = [mark(np.full(length, index + 10, np.int32)) for index, length in enumerate(lengths)]
    rows = pack(samples, 16, padding=0)
    found = [part & IDS for row in rows for part in np.split(row, np.flatnonzero(row & FIRST)) if len(part)]
    assert sorted(int(part[0]) for part in found) == [index + 10 for index in range(len(lengths))]
    for part in found:
        assert np.count_nonzero(part == part[0]) == lengths[int(part[0]) - 10]
    used = sorted(int((row != UNLEARNED).sum()) for row in rows)
    assert sum(used[:2]) > 16 or len(used) < 2, "no two sequences fit into one"


def test_the_marks_of_a_batch_give_targets_and_positions() -> None:
    said = np.array([False, False, True])
    rows = pack([mark(np.array([7, 8, 9], np.int32), said), mark(np.array([5, 6], np.int32))], 6, padding=1)
    ids, targets, positions = read_marks(torch.from_numpy(rows.astype(np.int64)))
    assert ids.tolist() == [[7, 8, 9, 5, 6, 1]]
    assert targets.tolist() == [[IGNORED, IGNORED, 9, IGNORED, 6, IGNORED]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert num_targets(torch.from_numpy(rows.astype(np.int64))) == 2
    assert num_targets(torch.arange(12).view(2, 6)) == 10, "in text, all but the first token of a sequence"


def test_a_stream_of_chats_goes_on_exactly_and_holds_out_the_same_chats(tmp_path: Path) -> None:
    write_chats(tmp_path / "a.jsonl")
    corpus = Corpus(CHATS, TOKENIZER, {"mine": str(tmp_path / "a.jsonl")})
    stream = TokenStream(corpus, peer_id="a", batch_size=2, block_tokens=256)
    for _ in range(3):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    again = TokenStream(corpus, peer_id="a", batch_size=2, block_tokens=256)
    again.load_state_dict(state)
    for _ in range(10):
        batch = next(stream)
        assert torch.equal(batch, next(again))
        assert bool(((batch & UNLEARNED) == 0).any(dim=1).all()), "every sequence has something to learn"
    assert stream.epoch > 0
    held_out = validation_batches(corpus, num_sequences=64, batch_size=4)
    begins = sum(int((batch & FIRST != 0).sum()) for batch in held_out)
    documents = Reader(open_source(CHATS, corpus.bindings)).epoch()
    assert begins == sum(is_held_out(document, 0.2) for document in documents) > 0


def test_text_in_a_mixture_with_chats_becomes_samples(tmp_path: Path) -> None:
    write_chats(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x" * 200}) + "\n")
    parts = (MixSpec(source="a", format="chat"), MixSpec(source="b"))
    data = DataSpec(source="mix", mix=parts, sequence_length=64)
    samples = make_encoder(data, TOKENIZER, Faults())([Document("x" * 129, origin=""), Document(HELLO, origin="")])
    assert [len(sample) for sample in samples] == [64, 64, 2, 37]
    assert [int((sample & UNLEARNED == 0).sum()) for sample in samples[:3]] == [63, 63, 1]
    bindings = {name: str(tmp_path / f"{name}.jsonl") for name in "ab"}
    batch = next(TokenStream(Corpus(data, TOKENIZER, bindings), peer_id="a", batch_size=8))
    assert int((batch & FIRST != 0).sum()) > 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.format": "chat"}, "data.format must be 'text' for the built-in corpus"),
        (
            {"data.source": "a", "data.format": "chat", "pipeline.stages": 2, "model.parameter_seeds": True},
            "data.format must be 'text' in a run with stages",
        ),
        ({"data.source": "a", "data.format": "dialogue"}, "data.format must be 'text', 'chat' or 'prompt'"),
    ],
)
def test_a_spec_whose_chats_cannot_be_trained_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TrainerSpec(name="t").with_changes(changes)
