"""Mixtures keep their weights, a worker thread reads ahead, and both continue exactly after a restart."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.patience import PATIENCE_S
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import ByT5Tokenizer

from noloco_p2p.data.documents import Document, Piece, Unavailable
from noloco_p2p.data.prefetch import Prefetcher
from noloco_p2p.data.reader import MAX_FAILURES, Reader, Source
from noloco_p2p.data.stream import Corpus, TokenStream, validation_batches
from noloco_p2p.errors import DataError, SpecError
from noloco_p2p.spec import DataSpec, MixSpec, TrainerSpec

TOKENIZER = ByT5Tokenizer()
THREE = (MixSpec(source="a", weight=6), MixSpec(source="b", weight=3), MixSpec(source="c", weight=1))
MIX = DataSpec(source="mix", mix=THREE, sequence_length=32, holdout=0.1)


@pytest.fixture
def bindings(tmp_path: Path) -> dict[str, str]:
    """Write three sources of very different sizes, with texts of 'a', 'b' and 'c', and return their bindings."""
    for name, number, length in (("a", 300, 90), ("b", 900, 20), ("c", 80, 50)):
        lines = (json.dumps({"text": name * length + str(n)}) for n in range(number))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return {name: f"{tmp_path}/{name}.jsonl" for name in "abc"}


def make_stream(bindings: dict[str, str], data: DataSpec = MIX, **options: Any) -> TokenStream:
    chosen = {"peer_id": "p", "batch_size": 4, "block_tokens": 3000, **options}
    return TokenStream(Corpus(data, TOKENIZER, bindings), **chosen)


def take(stream: TokenStream | Prefetcher, number: int) -> list[Tensor]:
    return [next(stream) for _ in range(number)]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(one, two) for one, two in zip(left, right, strict=True))


# mixtures


def test_each_source_gets_its_share_of_the_tokens(bindings: dict[str, str]) -> None:
    stream = make_stream(bindings)
    counts = Counter(torch.cat(take(stream, 1200)).flatten().tolist())
    taken = [feed.taken_tokens for feed in stream._feeds]
    for index, part in enumerate(THREE):
        assert taken[index] / sum(taken) == pytest.approx(part.weight / 10, abs=0.02)
        assert 0.7 * taken[index] < counts[ord(part.source) + 3] < taken[index]  # the rest are digits and end tokens


@pytest.mark.parametrize(
    ("weights", "number", "shares"), [((6, 3, 1), 20, [12, 6, 2]), ((1, 1, 1), 10, [3, 4, 3])], ids=["whole", "rounded"]
)
def test_held_out_sequences_come_from_all_sources(
    weights: tuple[int, ...], number: int, shares: list[int], bindings: dict[str, str]
) -> None:
    mix = tuple(MixSpec(source=name, weight=weight) for name, weight in zip("abc", weights, strict=True))
    data = DataSpec(source="mix", mix=mix, sequence_length=32, holdout=0.2)
    batches = validation_batches(Corpus(data, TOKENIZER, bindings), num_sequences=number, batch_size=8)
    assert [int((torch.cat(batches) == ord(name) + 3).any(1).sum()) for name in "abc"] == shares


def test_a_mixture_is_named_as_such_and_has_no_mixture_within() -> None:
    def refused(**data: object) -> str:
        with pytest.raises(SpecError) as raised:
            TrainerSpec.from_dict({"name": "x", "data": data}, origin="run.toml")
        return str(raised.value)

    assert "data.source must be 'mix' if and only if [[data.mix]] lists sources" in refused(mix=[{"source": "a"}])
    assert "data.source must be 'mix'" in refused(source="mix")
    assert "'mix' is not allowed here" in refused(source="mix", mix=[{"source": "mix"}])
    assert "data.mix.0.weight" in refused(source="mix", mix=[{"source": "a", "weight": 0}])


# a network that fails, and a restart


@settings(max_examples=12)
@given(
    failing=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 39)), max_size=MAX_FAILURES),
    after=st.integers(1, 30),
    others=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 39)), max_size=6),
)
def test_a_restart_continues_exactly_though_files_failed(
    failing: set[tuple[int, int]], after: int, others: set[tuple[int, int]]
) -> None:
    """The batches are bit-identical, and so are the blocks after them unless other files fail there."""

    def stream_of(failing: set[tuple[int, int]]) -> TokenStream:
        def piece(index: int) -> Piece:
            def rows(start: int) -> Any:
                for row in range(start, 40):
                    if (index, row) in failing:
                        failing.remove((index, row))
                        raise Unavailable("reset by peer")
                    yield Document(f"{index}/{row} " * 5, origin="")

            return Piece(str(index), rows)

        stop = threading.Event()
        stop.wait = lambda timeout=None: False  # return at once
        data = DataSpec(sequence_length=32)
        stream = make_stream({}, data, stop=stop)
        source = Source([piece(index) for index in range(6)], thin=False)
        stream._feeds[0].reader = Reader(source, order="p", holdout=data.holdout, stop=stop)
        return stream

    to_come = set(failing)
    stream = stream_of(to_come)
    take(stream, after)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed, with_others = stream_of(set(to_come)), stream_of(set(others))
    resumed.load_state_dict(state)
    with_others.load_state_dict(state)
    num_left = len(stream.position.rest) // 4
    expected = take(stream, max(num_left, 60))
    assert equal(take(resumed, len(expected)), expected)
    assert equal(take(with_others, num_left), expected[:num_left])


# the worker


def test_the_worker_gives_the_batches_of_its_stream_and_the_state_of_those_given_out(
    bindings: dict[str, str],
) -> None:
    plain, ahead = make_stream(bindings), Prefetcher(make_stream(bindings))
    try:
        assert ahead.state_dict() == plain.state_dict()
        for _ in range(40):
            assert torch.equal(next(ahead), next(plain))
            assert ahead.state_dict() == plain.state_dict()
    finally:
        ahead.close()
    again = Prefetcher(make_stream(bindings))
    again.load_state_dict(json.loads(json.dumps(ahead.state_dict())))
    assert equal(take(again, 20), take(plain, 20))
    again.close()


def test_an_error_comes_where_its_batch_would_have(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "%s"}\n' % ("x" * 2000))
    data = DataSpec(source="a", sequence_length=32, holdout=1e-9)
    ahead = Prefetcher(make_stream({"a": f"{tmp_path}/a.jsonl"}, data, block_tokens=500))
    next(ahead)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="contains no document to train on"):
        take(ahead, 2000)
    ahead.close()


def test_closing_ends_the_worker_while_it_waits_for_the_network(bindings: dict[str, str]) -> None:
    stream = make_stream(bindings)
    failed = threading.Event()

    def rows(start: int) -> Any:
        failed.set()
        raise Unavailable("no route to host")
        yield

    for feed in stream._feeds:
        feed.reader = Reader(Source([Piece("x", rows)], thin=False), stop=stream.stop)
    ahead = Prefetcher(stream)
    asking = threading.Thread(target=lambda: next(ahead, None))
    asking.start()
    assert failed.wait(PATIENCE_S)
    ahead.close()
    asking.join(PATIENCE_S)
    assert not asking.is_alive()
    assert ahead._thread is not None
    assert not ahead._thread.is_alive()
    assert next(ahead, None) is None
