"""Streams lose no token, hold out documents, have an order for each peer, and continue exactly after a restart."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from noloco_p2p.data.documents import Document, Faults, Piece, is_held_out
from noloco_p2p.data.hub import shard_source
from noloco_p2p.data.reader import Reader, Source
from noloco_p2p.data.sources import builtin_corpus, open_source
from noloco_p2p.data.stream import BLOCK_TOKENS, Corpus, TokenStream, cut, make_encoder, validation_batches
from noloco_p2p.errors import DataError, SpecError
from noloco_p2p.spec import DataSpec, MixSpec

TOKENIZER = ByT5Tokenizer()
STDLIB = DataSpec(sequence_length=64)
MINE = DataSpec(source="mine", sequence_length=16, holdout=0.2)
MIXED = DataSpec(source="mix", mix=(MixSpec(source="mine", weight=2), MixSpec(source="other")), sequence_length=16)
END = 1


def make_stream(
    data: DataSpec = STDLIB,
    *,
    bindings: Mapping[str, str] | None = None,
    peer_id: str = "a",
    batch_size: int = 4,
    block_tokens: int = BLOCK_TOKENS,
) -> TokenStream:
    corpus = Corpus(data, TOKENIZER, bindings or {})
    return TokenStream(corpus, peer_id=peer_id, batch_size=batch_size, block_tokens=block_tokens)


def take(stream: TokenStream, number: int) -> list[Tensor]:
    return [next(stream) for _ in range(number)]


def texts_in(batches: list[Tensor]) -> str:
    return bytes(int(token) - 3 for token in torch.cat(batches).flatten() if token != END).decode("utf-8", "replace")


def write_json_lines(path: Path, texts: list[str]) -> None:
    lines = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write 200 short documents, each of which contains its number, to three files of two kinds."""
    write_json_lines(tmp_path / "one.jsonl", [f"<{number:03}>" for number in range(80)])
    write_json_lines(tmp_path / "two.jsonl.gz", [f"<{number:03}>" for number in range(80, 150)])
    table = pa.table({"text": [f"<{number:03}>" for number in range(150, 200)]})
    pq.write_table(table, tmp_path / "three.parquet", row_group_size=7)
    return tmp_path


def held_out_texts(data: DataSpec) -> set[str]:
    texts = (f"<{number:03}>" for number in range(200))
    return {text for text in texts if is_held_out(Document(text, origin=""), data.holdout)}


def one_epoch(stream: TokenStream) -> list[str]:
    """Return the whole documents of the first epoch, before they are cut into sequences."""
    (feed,) = stream._feeds
    return [str(document.content) for document in feed.reader.epoch()]


def ids_of(document: Document) -> list[int]:
    (ids,) = make_encoder(STDLIB, TOKENIZER, Faults())([document])
    return ids.tolist()


# encoding


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_bytes_are_encoded_as_the_tokenizer_encodes_them(text: str) -> None:
    expected = TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ids_of(Document(text, origin="")) == [*expected, END]


def test_control_tokens_in_a_text_stay_text() -> None:
    letters = {letter: number for number, letter in enumerate("abc<>/s", start=1)}
    coder = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=coder, eos_token="</s>")
    encode = make_encoder(DataSpec(tokenizer="own"), tokenizer, Faults())
    [ids] = encode([Document("a</s>b", origin="")])
    assert ids.tolist() == [*(letters[letter] for letter in "a</s>b"), tokenizer.eos_token_id]


def test_token_ids_of_another_tokenizer_are_a_fault() -> None:
    faults = Faults()
    assert not make_encoder(STDLIB, TOKENIZER, faults)([Document(np.array([5, 4000]), origin="file.parquet", line=7)])
    assert str(faults.last).startswith("file.parquet, line 7: token ids range from 5 to 4000, but tokenizer 'bytes'")


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        ("</s>", [63, 50, 118, 65, END]),  # a special token in a text stays text
        (np.array([5, 6, END]), [5, 6, END]),
        (np.array([5, 6]), [5, 6, END]),
    ],
)
def test_a_document_has_one_end(content: Any, ids: list[int]) -> None:
    assert ids_of(Document(content, origin="")) == ids


# the built-in corpus


def test_the_built_in_corpus_is_large_and_has_no_tests() -> None:
    documents = list(Reader(builtin_corpus()).epoch())
    assert sum(len(document.content) for document in documents) > 5_000_000
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]


def test_peers_read_in_orders_of_their_own() -> None:
    one, two, again = (take(make_stream(peer_id=peer), 5) for peer in ("a", "b", "a"))
    assert (one[0].shape, one[0].dtype) == ((4, 64), torch.long)
    assert "import" in texts_in(take(make_stream(), 50))
    assert not any(torch.equal(left, right) for left, right in zip(one, two, strict=True))
    assert all(torch.equal(left, right) for left, right in zip(one, again, strict=True))


def test_the_built_in_corpus_needs_no_datasets_library_and_no_network() -> None:
    code = """
import sys
sys.addaudithook(lambda event, args: (_ for _ in ()).throw(RuntimeError(event)) if event == "socket.connect" else None)
from transformers import ByT5Tokenizer
from noloco_p2p.spec import DataSpec, MixSpec
from noloco_p2p.data.stream import Corpus, TokenStream
next(TokenStream(Corpus(DataSpec(), ByT5Tokenizer(), {}), peer_id="a", batch_size=2))
sys.exit("datasets" in sys.modules or "pyarrow" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# restart


@pytest.mark.parametrize(
    ("data", "block_tokens"),
    [(STDLIB, 20_000), (MINE, 100), (MINE, 333), (MINE, BLOCK_TOKENS), (MIXED, 100)],
)
def test_a_stream_that_is_restarted_again_and_again_continues_exactly(
    corpus: Path, data: DataSpec, block_tokens: int
) -> None:
    bindings = {"mine": f"{corpus}/*", "other": f"{corpus}/two*"}
    stream = whole = make_stream(data, bindings=bindings, block_tokens=block_tokens)
    restarted = make_stream(data, bindings=bindings, block_tokens=block_tokens)
    for number in (0, 1, 2, 7, 40, 3, 1):  # across blocks and epochs
        state = json.loads(json.dumps(restarted.state_dict()))
        assert state == restarted.state_dict(), "it consists of JSON values"
        restarted = make_stream(data, bindings=bindings, block_tokens=block_tokens)
        restarted.load_state_dict(state)
        assert all(map(torch.equal, take(restarted, number), take(whole, number)))
    assert stream.epoch > 0 or data is STDLIB


def test_no_token_is_lost_between_blocks(corpus: Path) -> None:
    def tokens(block_tokens: int) -> Counter[int]:
        stream = make_stream(MINE, bindings={"mine": f"{corpus}/*"}, batch_size=1, block_tokens=block_tokens)
        num_documents = 200 - len(held_out_texts(MINE))
        return Counter(torch.cat(take(stream, num_documents * 6 // 16)).flatten().tolist())

    lost = tokens(100) - tokens(BLOCK_TOKENS)
    assert lost.total() < 2 * 16, "except the start of the next epoch"


def test_other_files_than_before_start_a_new_epoch_with_a_warning(
    corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = make_stream(MINE, bindings={"mine": f"{corpus}/*"})
    take(stream, 2)
    other = make_stream(MINE, bindings={"mine": f"{corpus}/*.jsonl*"})
    other.load_state_dict(stream.state_dict())
    assert "data epoch 1 begins" in caplog.text
    assert torch.equal(next(other), next(stream))  # the rest of the block is not lost


def test_the_order_of_a_peer_is_always_the_same(corpus: Path) -> None:
    batches = take(make_stream(MINE, bindings={"mine": f"{corpus}/*"}, block_tokens=100), 40)
    assert sha256(torch.cat(batches).numpy().tobytes()).hexdigest().startswith("f5065abb981ec6a7")


FEED: dict[str, Any] = {"place": [0, 3, 1, [[0, 62]]], "taken_tokens": 384, "source": "d9a6"}


def state_of_the_corpus(**changes: Any) -> dict[str, Any]:
    """Return a state of the corpus after one block of 100 tokens."""
    rest = b64encode(zlib.compress(b"")).decode()
    return {"feeds": [FEED], "carry": [], "block": 1, "rest": rest, "version": 4, **changes}


@pytest.mark.parametrize(
    "state",
    [
        {"epoch": 1},
        state_of_the_corpus(version=3),
        state_of_the_corpus(feeds=[]),
        state_of_the_corpus(rest="AAAA"),
        state_of_the_corpus(rest=b64encode(zlib.compress(bytes(12))).decode()),
        state_of_the_corpus(carry=["x"]),
        *(state_of_the_corpus(feeds=[{**FEED, "place": place}]) for place in ([], ["x"] * 4, [0, 0, 0, [1]], 5, None)),
    ],
)
def test_a_state_of_something_else_is_refused(state: dict[str, Any], corpus: Path) -> None:
    with pytest.raises(DataError, match="data position"):
        make_stream(MINE, bindings={"mine": f"{corpus}/*"}).load_state_dict(state)


# epochs and held-out documents


def test_an_epoch_holds_every_document_once_but_the_held_out_ones(corpus: Path) -> None:
    found = one_epoch(make_stream(MINE, bindings={"mine": f"{corpus}/*"}))
    everything = {f"<{number:03}>" for number in range(200)}
    assert Counter(found) == Counter(everything - held_out_texts(MINE))
    assert found != sorted(found)


def test_what_is_cut_off_a_block_is_handed_on() -> None:
    sequences, rest = cut([np.arange(10), np.arange(10, 37)], 16)
    assert sequences.shape == (2, 16)
    assert [*sequences.flatten(), *rest] == list(range(37))


def test_training_never_sees_a_held_out_document_and_validation_sees_no_other(corpus: Path) -> None:
    held_out = held_out_texts(MINE)
    assert 20 < len(held_out) < 60
    bindings = {"mine": f"{corpus}/*"}
    trained = set(one_epoch(make_stream(MINE, bindings=bindings)))
    assert not trained & held_out
    batches = validation_batches(Corpus(MINE, TOKENIZER, bindings), num_sequences=10, batch_size=4)
    numbers = {part[:3] for part in texts_in(batches).split("<")[1:] if len(part) >= 4}
    assert numbers
    assert numbers <= {text[1:4] for text in held_out}


def test_validation_is_the_same_for_every_peer_and_folder(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in corpus.iterdir():
        (elsewhere / path.name).write_bytes(path.read_bytes())
    one, two = (
        validation_batches(Corpus(MINE, TOKENIZER, {"mine": f"{folder}/*"}), num_sequences=6, batch_size=4)
        for folder in (corpus, elsewhere)
    )
    assert [tuple(batch.shape) for batch in one] == [(4, 16), (2, 16)]
    assert all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


def test_validation_files_of_their_own_are_used_and_not_trained_on(corpus: Path) -> None:
    (corpus / "extra.jsonl").write_text("".join(json.dumps({"text": f"[{n:04}]"}) + "\n" for n in range(50)))
    bindings = {"mine": f"{corpus}/*", "mine.validation": f"{corpus}/extra.jsonl"}
    batches = validation_batches(Corpus(MINE, TOKENIZER, bindings), num_sequences=4, batch_size=4)
    assert "[00" in texts_in(batches)
    assert "<" not in texts_in(batches)
    trained = one_epoch(make_stream(MINE, bindings=bindings))
    assert not [text for text in trained if "[" in text]
    assert not set(trained) & held_out_texts(MINE)  # other peers may validate on these


def test_too_few_held_out_documents_are_an_error_in_words(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", ["only one"])
    spec = MINE.model_copy(update={"holdout": 1e-9})
    with pytest.raises(DataError, match=r"held-out tokens.*data\.holdout.*--data mine\.validation=GLOB"):
        validation_batches(Corpus(spec, TOKENIZER, {"mine": f"{tmp_path}/*"}), num_sequences=4, batch_size=4)


# kinds of files


def contents(data: DataSpec, pattern: str) -> list[Any]:
    return [document.content for document in Reader(open_source(data, {"mine": pattern})).epoch()]


def test_text_files_are_cut_at_blank_lines_and_lose_nothing(tmp_path: Path) -> None:
    text = "".join(f"paragraph {number}\r\n{'word ' * 200}\n\n" for number in range(200))
    (tmp_path / "book.txt").write_text(text, newline="")
    (tmp_path / "note.text").write_text("short")
    *parts, note = contents(MINE, f"{tmp_path}/*")
    assert note == "short"
    assert "".join(map(str, parts)) == text
    assert len(parts) > 3
    assert all(str(part).startswith("paragraph") for part in parts)


def test_token_ids_are_read_from_parquet_without_their_padding(tmp_path: Path) -> None:
    table = pa.table({"input_ids": [[5, 6, 7, 0], [8, 9, 10, 11], []], "attention_mask": [[1, 1, 1, 0], [1] * 4, []]})
    pq.write_table(table, tmp_path / "ids.parquet")
    read = contents(MINE, f"{tmp_path}/ids.parquet")
    assert [np.asarray(ids).tolist() for ids in read] == [[5, 6, 7], [8, 9, 10, 11]]


def test_a_json_array_null_texts_and_an_empty_file_are_fine(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([{"text": "a"}, {"text": None}, {"text": "b"}, {"text": ""}]))
    (tmp_path / "empty.jsonl").touch()
    assert contents(MINE, f"{tmp_path}/*") == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", "one"), ("a.jsonl", '{"text": "one"}'), ("a.json", '[\n{"text": "one"}\n]')]
)
def test_the_mark_of_utf8_is_no_text(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert contents(MINE, str(tmp_path / name)) == ["one"]


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "part[1].jsonl", ["x"])
    assert contents(MINE, f"{tmp_path}/part[1].jsonl") == ["x"]


# shards of a hub data set, here without a hub


def test_shards_are_read_once_each_in_the_order_of_the_peer_and_from_any_row(corpus: Path) -> None:
    import datasets

    files = [str(corpus / "one.jsonl"), str(corpus / "two.jsonl.gz")]
    stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    source = shard_source(stream, name="name", part=DataSpec())
    everything = [document.content for document in Reader(source, order="a").epoch()]
    assert sorted(map(str, everything)) == [f"<{number:03}>" for number in range(150)]
    reader, resumed = Reader(source, order="a"), Reader(source, order="a")
    for _ in range(100):
        next(reader)
    resumed.place = reader.place
    assert [document.content for document in resumed.epoch()] == everything[100:]


# errors in words


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        ({}, r"data named 'mine'.*--data mine=GLOB"),
        ({"mine": "{folder}/nothing*"}, r"--data mine=.*nothing\* matches no file"),
        ({"mine": "{folder}"}, "is a folder; specify its files"),
        ({"mine": "{folder}/x.csv"}, r"x\.csv: unsupported file type; use"),
        ({"mine": "{folder}/*.jsonl", "mine.validation": "{folder}/*.jsonl"}, "every file in --data mine is also"),
    ],
)
def test_a_wrong_binding_is_an_error_in_words(tmp_path: Path, bindings: dict[str, str], message: str) -> None:
    (tmp_path / "x.csv").write_text("a,b\n")
    write_json_lines(tmp_path / "x.jsonl", ["a"])
    with pytest.raises(DataError, match=message):
        make_stream(MINE, bindings={name: glob.format(folder=tmp_path) for name, glob in bindings.items()})


def test_a_source_without_documents_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="contains no document to train on"):
        next(make_stream(MINE, bindings={"mine": f"{tmp_path}/*"}))


@pytest.mark.parametrize("name", ["text", "json", "/etc", "../up", "~/x", "a/b/c", "lab/..", "-x/y", ""])
def test_a_hub_name_is_owner_and_name(name: str) -> None:
    """A name without an owner denotes a built-in builder of `datasets`, which reads the current folder."""
    with pytest.raises(ValidationError, match="must have the form hub:OWNER/NAME"):
        DataSpec(source=f"hub:{name}")


def test_a_hub_name_that_is_a_folder_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab" / "secrets").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"contains the folder 'lab/secrets', which would be read instead"):
        open_source(DataSpec(source="hub:lab/secrets"), {})


# orders


@given(
    num_files=st.integers(1, 20),
    rows=st.integers(0, 12),
    order=st.text("abc", max_size=3),
    stop=st.integers(0, 60),
)
def test_every_order_yields_each_document_once_and_continues_from_any_place(
    num_files: int, rows: int, order: str, stop: int
) -> None:
    source = Source([_counted(str(number), rows) for number in range(num_files)])
    everything = [document.content for document in Reader(source, order=order).epoch()]
    assert len(everything) == len(set(map(str, everything))) == num_files * rows
    reader, resumed = Reader(source, order=order), Reader(source, order=order)
    head = [document.content for _, document in zip(range(min(stop, len(everything))), reader.epoch(), strict=False)]
    assert head == everything[:stop]
    resumed.place = reader.place
    assert [document.content for document in resumed.epoch()] == everything[stop:]


def _counted(name: str, num_rows: int) -> Piece:
    return Piece(name, lambda start: (Document(f"{name}/{row}", origin=name) for row in range(start, num_rows)))
