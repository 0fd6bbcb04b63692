"""Read data sets of the Hugging Face hub. `datasets` finds them and streams their shards without caching them.

Each shard is a separate stream, so that an error in the library affects only one shard. If the network may be the
cause, the shard is set aside for a while. Otherwise, the rest of the shard is skipped, and a fault reports the row.
"""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import DatasetCard, HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from noloco_p2p.data.documents import Fault, Piece, Row, Unavailable
from noloco_p2p.data.files import ROWS_A_READ, first_line, row_of, table_items
from noloco_p2p.data.reader import Source
from noloco_p2p.errors import DataError, SpecError
from noloco_p2p.spec import SourceSpec

if TYPE_CHECKING:
    from datasets import IterableDataset

OPEN_TRIES = 5
LIBRARY_RETRIES = 2  # retries by the library, 1 s apart; after them, another shard is read
# Errors in the content are permanent. All others (timeouts, resets, 5xx) may be due to the network.
LASTING = (ValueError, TypeError, KeyError, EOFError, zlib.error, gzip.BadGzipFile, FileNotFoundError, PermissionError)
DESCRIPTIONS = ("README.md", ".huggingface.yaml")  # where a data set names its files
FORMATS = ("arrow", "csv", "json", "parquet", "text")  # their files hold their rows, and name no other files
BUSY = (408, 429)  # HTTP: too slow, too many requests

Pause = Callable[[float], object]


def hub_source(part: SourceSpec, split: str, *, pause: Pause = time.sleep) -> Source:
    """Open a data set, and retry a few times if the network may have caused a failure.

    Raises DataError if the data set cannot be opened, and SpecError if it refers to files on this machine or at a third
    party.
    """
    name = part.source.removeprefix("hub:")
    if Path(name).exists():  # `datasets` would read that folder
        raise SpecError(
            f"the working directory contains the folder {name!r}, which would be read instead of data.source "
            f"'hub:{name}'; start this peer in another directory"
        )
    datasets = import_datasets()
    for number in range(1, OPEN_TRIES + 1):
        try:
            commit = _checked_commit(name, part.revision)
            builder = datasets.load_dataset_builder(name, part.subset or None, revision=commit)
            _check_format(type(builder), name)
            _check_files(builder.config.data_files or {}, name)
            stream = builder.as_streaming_dataset(split=split)
        except SpecError:
            raise
        except Exception as error:  # noqa: BLE001 - network, hub and parser errors have no common base
            if is_lasting(error) or number == OPEN_TRIES:
                raise DataError(
                    f"hub data set {name!r} (subset {part.subset!r}, split {split!r}, revision {part.revision!r}) "
                    f"cannot be opened: {first_line(error)}. Check the name and the network; if the data set has no "
                    'validation split, set data.validation_split = ""'
                ) from None
            pause(2.0 ** (number - 1))
        else:
            return shard_source(stream, name=name, part=part)
    raise AssertionError("unreachable")


def _checked_commit(name: str, revision: str) -> str:
    """Return the commit at `revision` of a data set, or at its newest revision if that is "".

    Raises SpecError if its description names files that may not be its own. Libraries ask the servers that a pattern
    names as soon as they read it, so this check comes first, and they are then given the same commit.
    """
    commit = HfApi().dataset_info(name, revision=revision or None).sha
    assert commit
    for file in DESCRIPTIONS:
        try:
            path = hf_hub_download(name, file, repo_type="dataset", revision=commit)
        except EntryNotFoundError:
            continue
        is_card = file.endswith(".md")
        said = DatasetCard.load(path).data.to_dict() if is_card else yaml.safe_load(Path(path).read_text("utf-8"))
        configs = said.get("configs") if isinstance(said, dict) else None
        for config in configs if isinstance(configs, list) else ():
            places = [config.get("data_files"), config.get("data_dir")] if isinstance(config, dict) else [config]
            for pattern in _strings(places):
                if ":" in pattern or pattern.startswith("/") or ".." in pattern.split("/"):
                    raise SpecError(
                        f"data.source 'hub:{name}' lists the file {pattern!r}, which is not part of that data set"
                    )
    return commit


def _strings(value: object) -> Iterator[str]:
    """Yield all strings in nested lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _check_format(builder: type, name: str) -> None:
    """Raise SpecError if the library would read a format whose files may refer to other files, such as Iceberg's."""
    kinds = [each.__module__.rpartition(".")[2] for each in builder.__mro__ if ".packaged_modules." in each.__module__]
    if not kinds or kinds[0] not in FORMATS:
        raise SpecError(
            f"data.source 'hub:{name}' has the format {''.join(kinds[:1])!r}; a run can use {', '.join(FORMATS)}"
        )


def _check_files(files: Mapping[str, Sequence[str]], name: str) -> None:
    """Raise SpecError if the library has found files that are not those of the data set."""
    for file in (file for split in files.values() for file in split):
        if not file.startswith(f"hf://datasets/{name}@"):
            raise SpecError(f"data.source 'hub:{name}' lists the file {file!r}, which is not part of that data set")


def shard_source(stream: IterableDataset, *, name: str, part: SourceSpec) -> Source:
    """Return a source whose pieces are the shards of a streamed data set. Each peer reads them in its own order."""
    pieces: list[Piece] = []
    for index in range(stream.num_shards):
        shard = stream.shard(num_shards=stream.num_shards, index=index)
        pieces.append(Piece(f"{name}#{index}", partial(_shard_rows, shard, f"{name}#{index}", part)))
    return Source(pieces, thin=False)


def _shard_rows(shard: IterableDataset, name: str, part: SourceSpec, start: int) -> Iterator[Row]:
    number = start
    try:
        for table in shard.skip(start).with_format("arrow").iter(batch_size=ROWS_A_READ):
            for item in table_items(table, part):
                number += 1
                yield row_of(item, name, number, part)
    except Exception as error:  # noqa: BLE001 - pyarrow, zlib, json, fsspec, httpx: a stream raises whatever they raise
        if not is_lasting(error):
            raise Unavailable(f"{name}, row {number + 1}: {first_line(error)}") from None
        yield Fault(name, number + 1, f"cannot be read: {first_line(error)}", rest=True)


def is_lasting(error: BaseException) -> bool:
    """Return whether a retry would be useless. The library wraps errors, so their causes are also examined."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if any(isinstance(cause, ConnectionError | TimeoutError) for cause in causes):
        return False
    statuses = [getattr(getattr(cause, "response", None), "status_code", 0) for cause in causes]
    is_refused = any(400 <= status < 500 and status not in BUSY for status in statuses)  # such as for a missing file
    is_damage = any(type(cause) is OSError and not cause.errno for cause in causes)  # such as pyarrow's
    return is_refused or is_damage or any(isinstance(cause, LASTING) for cause in causes)


def import_datasets() -> Any:
    import datasets
    import datasets.config

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # our messages repeat what it would log
    for what in ("OPEN", "READ"):
        setattr(datasets.config, f"STREAMING_{what}_MAX_RETRIES", LIBRARY_RETRIES)
    for name in ("OPEN_RETRY", "READ_RETRY", "READ_RATE_LIMIT_RETRY", "READ_SERVER_UNAVAILABLE_RETRY"):
        setattr(datasets.config, f"STREAMING_{name}_INTERVAL", 1)
    return datasets
