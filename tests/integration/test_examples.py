"""Every example runs as it stands, as the first peer of a swarm with a real directory and a real server."""

from __future__ import annotations

import logging
import re
import runpy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).resolve().parents[2] / "examples"
MAX_LINES = 80

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
    assert sorted(names) == ["hf_trainer.py", "lightning_trainer.py", "lora.py", "plain_pytorch.py"]
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
