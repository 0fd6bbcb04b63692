"""Every example runs as it stands, as the first peer of a swarm with a real directory and a real server."""

from __future__ import annotations

import json
import logging
import re
import runpy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Command, noloco, until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parents[2] / "examples"
MAX_LINES = 64
SWAPS = re.compile(r"noloco/swaps'?: '?[1-9]|[1-9]\d* swaps")  # in the log of a trainer, or in the lines of a loop
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"

# The Trainer and its dependencies raise these warnings, which the examples cannot prevent.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(name: str, *arguments: str) -> str:
        main = runpy.run_path(str(FOLDER / name))["main"]
        main([*arguments, "--state-dir", str(tmp_path / "peer"), "--listen", "127.0.0.1:0"])
        out = capsys.readouterr().out
        assert "noloco1" in out
        return out

    return run


def small_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    )


def losses(out: str) -> list[float]:
    return [float(line.split("loss ")[1].split(",")[0]) for line in out.splitlines() if line.startswith("step ")]


def test_every_example_fits_on_a_page_and_has_a_test() -> None:
    names = [path.name for path in FOLDER.glob("*.py")]
    assert sorted(names) == [
        "accelerate_loop.py",
        "hf_trainer.py",
        "lightning_trainer.py",
        "lora.py",
        "plain_pytorch.py",
        "trl_sft.py",
    ]
    for name in names:
        assert len((FOLDER / name).read_text().splitlines()) < MAX_LINES, name


def run_shown(page: str, *, num_batches: int) -> dict[str, Any]:
    """Run the script that a page shows with a model, data and an optimizer; return its variables."""
    [script] = re.findall(r"```python\n(.*?)```", (FOLDER.parent / page).read_text(), re.DOTALL)
    model = small_llama()
    batch = {name: torch.randint(0, 256, (2, 8)) for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW(model.parameters())
    yours: dict[str, Any] = {"ticket": None, "model": model, "data": [batch] * num_batches, "optimizer": optimizer}
    yours["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    exec(script, yours)
    return yours


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOLOCO_LISTEN", "127.0.0.1:0")
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("own_folder")
def test_the_script_in_the_readme() -> None:
    script = run_shown("README.md", num_batches=100)
    assert Path("my-peer", "identity.key").exists()
    script["optimizer"].step()  # the peer is closed, and so the step does not count
    assert script["outer"].num_steps == 100


@pytest.mark.usefixtures("own_folder")
def test_the_script_for_researchers_resumes() -> None:
    first = run_shown("docs/researchers.md", num_batches=50)
    assert first["outer"].num_steps == 50
    again = run_shown("docs/researchers.md", num_batches=80)
    assert again["outer"].num_steps == 80
    moments = again["optimizer"].state[next(again["model"].parameters())]
    assert moments["step"] == 80
    assert again["optimizer"].param_groups[0]["lr"] == pytest.approx(1e-3 * 0.9**80)


def test_a_plain_script(run: Callable[..., str]) -> None:
    told = losses(run("plain_pytorch.py", "--steps", "1500"))
    assert len(told) == 15
    assert told[-1] < told[0]


def test_a_hugging_face_trainer(run: Callable[..., str]) -> None:
    out = run("hf_trainer.py", "--steps", "40")
    assert "'noloco/swaps': 0" in out


# Lightning takes SIGCHLD away from uvloop, which therefore never closes the transport of p2pd.
@pytest.mark.filterwarnings("ignore:unclosed resource <UVProcessTransport:ResourceWarning")
@pytest.mark.usefixtures("own_folder")
def test_a_lightning_trainer(run: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="noloco_p2p"):
        run("lightning_trainer.py", "--steps", "120")
    assert "did not stop" not in caplog.text


def test_a_lora_fine_tune(run: Callable[..., str], tmp_path: Path) -> None:
    torch.manual_seed(1)
    small_llama().save_pretrained(tmp_path / "model")
    out = run("lora.py", str(tmp_path / "model"), "--steps", "200", "--save", str(tmp_path / "adapters"))
    told = losses(out)
    assert len(told) == 2
    assert told[-1] < told[0]
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


def chat_model(folder: Path) -> Path:
    """Write a small model with a tokenizer that is trained on the spot."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<end>", "<pad>"], initial_alphabet=letters))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    model = small_llama()
    model.resize_token_embeddings(len(fast))
    model.save_pretrained(folder)
    return folder


def chats(path: Path, answer: str) -> Path:
    turns = [{"role": "user", "content": "What do you say?"}, {"role": "assistant", "content": answer}]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(64)))
    return path


def swap(one: list[str | Path], two: Callable[[str], list[str | Path]], folder: Path) -> None:
    """Run an example in two processes until both have swapped, and ask them to leave."""

    def started(name: str, *arguments: str | Path) -> Command:
        own = ("--state-dir", folder / name, "--listen", "127.0.0.1:0", "--steps", "1000000")
        return Command(FOLDER / arguments[0], *arguments[1:], *own, log=folder / f"{name}.txt")

    with started("one", *one) as first:
        ticket = first.wait_for("others join with").split()[-1]
        with started("two", *two(ticket)) as second:
            for peer in (first, second):
                until(lambda peer=peer: SWAPS.search(peer.text), what=lambda peer=peer: f"a swap in\n{peer.text}")
            for name in ("one", "two"):
                assert noloco("leave", "--state-dir", folder / name).returncode == 0
            assert [peer.wait() for peer in (first, second)] == [0, 0]


def test_two_processes_of_trl_swap(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "model")
    hers, his = chats(tmp_path / "hers.jsonl", "hello"), chats(tmp_path / "his.jsonl", "good day")
    swap(["trl_sft.py", model, hers], lambda ticket: ["trl_sft.py", model, his, "--ticket", ticket], tmp_path)


def test_two_processes_of_accelerate_swap(tmp_path: Path) -> None:
    swap(["accelerate_loop.py"], lambda ticket: ["accelerate_loop.py", ticket], tmp_path)
