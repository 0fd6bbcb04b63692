"""A stranger's spec cannot read the text, models or tokenizers of this machine, whatever names it uses.

Each test starts in a folder with a private text and a private model; the stranger owns the hub, which runs on loopback.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from harness.processes import noloco
from harness.small_hub import SmallHub
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from noloco_p2p.data.hub import hub_source
from noloco_p2p.data.sources import open_source
from noloco_p2p.errors import DataError, ModelError, SpecError
from noloco_p2p.spec import DataSpec, ModelSpec
from noloco_p2p.trainer.model import build_model, build_tokenizer

SECRET = "a private sentence"


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a text and models that nobody has bound."""
    (tmp_path / "diary.txt").write_text(SECRET)
    model = small_llama(1)
    for name in ("private", "lab/private"):
        model.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=384, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data.source", "hub:text"),
        ("data.source", "hub:json"),
        ("data.source", "hub:../lab/texts"),
        ("model.pretrained", "./private"),
        ("model.pretrained", "lab/private/."),
        ("data.tokenizer", "/etc"),
    ],
)
def test_a_name_of_this_machine_is_a_wrong_spec(field: str, value: str, private: Path) -> None:
    section, key = field.split(".")
    (private / "run.toml").write_text(f'name = "r"\n[{section}]\n{key} = "{value}"\n')
    done = noloco("join", private / "run.toml", "--listen", "127.0.0.1:0", "--state-dir", private / "peer")
    assert done.returncode == 3, done.stderr
    assert field in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_plain_name_must_be_bound(private: Path) -> None:
    with pytest.raises(SpecError, match=r"model\.pretrained 'private' is neither OWNER/NAME .* --model private=FOLDER"):
        build_model(ModelSpec(pretrained="private"), sequence_length=16)
    with pytest.raises(SpecError, match=r"data\.tokenizer 'private' is neither OWNER/NAME"):
        build_tokenizer(DataSpec(tokenizer="private"))


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> SmallHub:
    """Serve a hub and point `huggingface_hub` to it, which reads its addresses when it is imported."""
    hub, home = SmallHub({}), tmp_path_factory.mktemp("home")
    endpoint = hub.environment(home)["HF_ENDPOINT"]
    for name, value in {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    return hub


def test_a_hub_name_is_never_a_folder_here(private: Path, hub: SmallHub, tmp_path: Path) -> None:
    theirs = small_llama(2)
    theirs.save_pretrained(tmp_path / "theirs")
    with hub:
        hub.files = {"lab/private": files_of(tmp_path / "theirs")}
        model = build_model(ModelSpec(pretrained="lab/private"), sequence_length=16)
    for name, param in model.named_parameters():
        assert torch.equal(param, theirs.get_parameter(name)), name


def test_an_adapter_does_not_lead_to_a_model_here(private: Path, hub: SmallHub) -> None:
    pytest.importorskip("peft")
    config = {"base_model_name_or_path": str(private / "private"), "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    files = {"adapter_config.json": json.dumps(config).encode()}
    with hub:
        hub.files = {"lab/adapter": files, "lab/both": {**files, **files_of(private / "lab" / "private")}}
        with pytest.raises(ModelError, match="lab/adapter"):
            build_model(ModelSpec(pretrained="lab/adapter"), sequence_length=16)
        build_model(ModelSpec(pretrained="lab/both"), sequence_length=16)
    assert not hub.asked["adapter_config.json"]


def test_a_bound_adapter_whose_model_is_elsewhere_is_refused(private: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(private / "private")}))
    with pytest.raises(ModelError, match="is an adapter without its base model"):
        build_model(ModelSpec(pretrained="mine"), sequence_length=16, folders={"mine": str(folder)})


class Inside:
    """A server behind the firewall of a peer, which answers every request and records it."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline()
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                requests.append(f"{self.command} {self.path}")
                self.send_response(200)
                self.send_header("Content-Length", "7")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(b"private")

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Inside:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


CONFIG = "configs:\n- config_name: default\n"
PLACES = {
    "file": CONFIG + "  data_files: {url}\n",
    "list": CONFIG + "  data_files:\n  - a.txt\n  - {url}\n",
    "split": CONFIG + "  data_files:\n  - split: train\n    path: {url}\n",
    "paths": CONFIG + "  data_files:\n  - split: train\n    path:\n    - a.txt\n    - {url}\n",
    "archive": CONFIG + "  data_files: 'zip://*.txt::{url}'\n",
    "folder": CONFIG + "  data_dir: {url}\n",
    "other": CONFIG + "  data_files: a.txt\n- config_name: other\n  data_files: {url}\n",
    "local": CONFIG + "  data_files: {private}/diary.txt\n",
    "above": CONFIG + "  data_files: ../../../../../../..{private}/diary.txt\n",
}


def described(file: str, place: str, private: Path, inside: Inside) -> dict[str, bytes]:
    """Return a data set whose description in `file` names a place elsewhere."""
    said = PLACES[place].format(url=f"{inside.address}/reboot.txt?now=1", private=private)
    return {file: (f"---\n{said}---\n" if file == "README.md" else said).encode(), "a.txt": b"public"}


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("place", PLACES)
def test_a_description_is_refused_before_a_library_reads_it(
    place: str, file: str, private: Path, hub: SmallHub
) -> None:
    with hub, Inside() as inside:
        hub.files = {"lab/texts": described(file, place, private, inside)}
        with pytest.raises(SpecError, match="which is not part of that data set"):
            hub_source(DataSpec(source="hub:lab/texts"), "train", pause=lambda seconds: None)
    assert not inside.requests


@pytest.mark.slow
def test_the_command_that_reads_a_data_set_reads_nothing_else(private: Path, tmp_path: Path) -> None:
    """Three data sets: one lists a file elsewhere, one has a format whose files name others, and one has images."""
    datasets = pytest.importorskip("datasets")
    with SmallHub() as hub, Inside() as inside:
        rows = {"text": ["a public sentence " * 20] * 50, "image": [f"{inside.address}/reboot.png"] * 50}
        table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image(decode=True))
        pq.write_table(table.data.table, tmp_path / "rows")
        content = (tmp_path / "rows").read_bytes()
        hub.files = {
            "lab/elsewhere": described("README.md", "file", private, inside),
            "lab/format": {"train.h5": b"\x89HDF\r\n\x1a\n", "validation.h5": b""},
            "lab/images": {"train.parquet": content, "validation.parquet": content},
        }
        done = {}
        for name in hub.files:
            (tmp_path / "run.toml").write_text(f'name = "r"\n[data]\nsource = "hub:{name}"\n')
            done[name] = noloco("data", "check", tmp_path / "run.toml", **hub.environment(tmp_path / "home"))
    assert not inside.requests
    for name, said in (("lab/elsewhere", "which is not part of that data set"), ("lab/format", "the format 'hdf5'")):
        assert done[name].returncode == 3, done[name].stdout
        assert said in done[name].stderr
        assert SECRET not in done[name].stdout + done[name].stderr
    assert done["lab/images"].returncode == 0, done["lab/images"].stderr


def test_an_index_of_weights_does_not_lead_to_weights_here(private: Path, hub: SmallHub) -> None:
    own, listed = private / "private", files_of(private / "private")
    tensors = load_file(own / "model.safetensors")
    with hub:
        for number, file in enumerate((str(own / "model.safetensors"), "../../private/model.safetensors")):
            index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file)}
            files = {"config.json": listed["config.json"], "model.safetensors.index.json": json.dumps(index).encode()}
            name = f"lab/model{number}"
            hub.files = {name: files}
            for seeds in (False, True):
                with pytest.raises(ModelError, match="which is not beside it"):
                    build_model(ModelSpec(pretrained=name, parameter_seeds=seeds), sequence_length=16)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_config_does_not_choose_a_kernel(key: str, private: Path, hub: SmallHub, tmp_path: Path) -> None:
    files = files_of(private / "private")
    config = json.loads(files["config.json"]) | {key: "lab/kernel"}
    with hub:
        hub.files = {"lab/model": {**files, "config.json": json.dumps(config).encode()}}
        for random in (False, True):
            model = build_model(ModelSpec(pretrained="lab/model", random_weights=random), sequence_length=16)
            assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("key", ["vocab_file", "merges_file", "tokenizer_file", "spm_file"])
@pytest.mark.parametrize("kind", ["BertTokenizer", "GPT2Tokenizer", "T5Tokenizer", "PreTrainedTokenizerFast"])
def test_a_tokenizer_does_not_read_a_file_here(key: str, kind: str, private: Path, hub: SmallHub) -> None:
    (private / "words.txt").write_text("\n".join(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "secretword"]))
    config = {"tokenizer_class": kind, key: str(private / "words.txt")}
    with hub:
        hub.files = {"lab/words": {"tokenizer_config.json": json.dumps(config).encode()}}
        try:
            tokenizer = build_tokenizer(DataSpec(tokenizer="lab/words"))
        except ModelError:
            return
        assert "secretword" not in tokenizer.get_vocab()


def test_files_elsewhere_are_found_before_they_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    from noloco_p2p.data.hub import _check_files

    _check_files({"train": ["hf://datasets/lab/texts@0123/a.txt"]}, "lab/texts")
    for file in ("/etc/passwd", "https://example.invalid/x", "hf://datasets/lab/other@0123/a.txt", "diary.txt"):
        with pytest.raises(SpecError, match="which is not part of that data set"):
            _check_files({"train": [file]}, "lab/texts")


def test_files_that_nobody_bound_are_refused() -> None:
    with pytest.raises(DataError, match="--data diary=GLOB"):
        open_source(DataSpec(source="diary"), {})
