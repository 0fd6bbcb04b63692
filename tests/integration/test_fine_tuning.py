"""Two people fine-tune a chat model together, with chats that stay at home. One machine dies and returns.

The colour of a thing follows from the first letter of its name. The base model knows it for some letters, and each
person has chats about half of the others; the second person has two machines. Held-out chats are about other things
with the letters of both. Alone, the first person would forget the other half so fast that a machine which returns would
not take that state at once.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import string
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness.patience import SLOW_TEST_S
from harness.processes import PeerProcess, noloco
from harness.small_chats import make_tokenizer
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, pipeline

from noloco_p2p.control import ask
from noloco_p2p.data.stream import Corpus, TokenStream, validation_batches
from noloco_p2p.spec import DataSpec, ModelSpec, TrainerSpec, TrainSpec
from noloco_p2p.trainer.evaluate import evaluate_loss
from noloco_p2p.trainer.export import export_model
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import build_model, build_tokenizer, samples_loss

STEPS = 1800  # so many that nobody is far ahead after a moment
TRAINING_S = SLOW_TEST_S / 2  # on a busy machine, all steps take longer than a single event does
BASE_STEPS = 800
DEATH_STEP = 100  # of the peer that dies
OF_BASE, OF_ONE, OF_OTHER = "abcdefghijklmn", "opqrst", "uvwxyz"  # first letters
NUM_THINGS = 10  # with each letter
COLOURS = ("red", "blue", "green", "black", "white", "brown", "pink", "grey")
ASKED = ("What colour is {}?", "Which colour has {}?", "Tell me the colour of {}.")
SMALL = {
    "data.sequence_length": 96,
    "train.batch_size": 8,
    "train.total_steps": STEPS,
    "train.learning_rate": 1e-3,
    "outer.min_inner_steps": 1,
    "model.lora.base_dtype": "fp32",
    "evaluate.every_steps": 100_000,
    "evaluate.num_sequences": 16,
}

log = logging.getLogger(__name__)

pytestmark = pytest.mark.slow


def write_chats(path: Path, letters: str, *, seed: int) -> None:
    rng = random.Random(seed)
    things = [
        letter + "".join(rng.choices(string.ascii_lowercase, k=4)) for letter in letters for _ in range(NUM_THINGS)
    ]
    chats = [
        [{"role": "user", "content": question.format(thing)}, {"role": "assistant", "content": colour_of(thing)}]
        for thing in things
        for question in ASKED
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def colour_of(thing: str) -> str:
    return COLOURS[string.ascii_lowercase.index(thing[0]) * 5 % len(COLOURS)]


def write_base(folder: Path) -> None:
    """Train a small model from scratch, as a stand-in for a chat model."""
    tokenizer = make_tokenizer()
    model = build_model(
        ModelSpec(vocab_size=len(tokenizer), hidden_size=64, num_layers=2, mlp_size=128), sequence_length=96
    )
    data = DataSpec(source="chats", format="chat", tokenizer="base", sequence_length=96)
    train = TrainSpec(total_steps=BASE_STEPS, batch_size=8, learning_rate=3e-3, warmup_steps=20)
    inner = InnerStep(model, train, loss=samples_loss)
    corpus = Corpus(data, tokenizer, {"chats": str(folder / "base.jsonl")})
    batches = TokenStream(corpus, peer_id="base", batch_size=train.batch_size)
    for step in range(BASE_STEPS):
        inner(next(batches), progress=step / BASE_STEPS)
    export_model(model, tokenizer, folder / "base")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a chat model, the chats of each person, and held-out chats about the things of both."""
    folder = tmp_path_factory.mktemp("home")
    files = {"base": OF_BASE, "one": OF_ONE, "other": OF_OTHER, "held_out": OF_ONE + OF_OTHER}
    for seed, (name, letters) in enumerate(files.items()):
        write_chats(folder / f"{name}.jsonl", letters, seed=seed)
    write_base(folder)
    return folder


def bindings(home: Path, person: str) -> list[str]:
    held_out = ["--data", f"chats.validation={home}/held_out.jsonl", "--model", f"base={home}/base"]
    return ["--data", f"chats={home}/{person}.jsonl", *held_out]


def write_spec(home: Path, name: str) -> Path:
    file = home / f"{name}.toml"
    sets = [word for field, value in SMALL.items() for word in ("--set", f"{field}={value}")]
    found = noloco("init", file, "--preset", "finetune", "--pretrained", "base", "--name", name, *sets)
    assert found.returncode == 0, found.stderr
    return file


def evaluated(home: Path, *peers: PeerProcess) -> dict[str, Any]:
    folders = [next(peer.folder.glob("runs/*")) for peer in peers]
    found = noloco("evaluate", *folders, "--json", *bindings(home, "one"))
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def loss_of(model: nn.Module, home: Path) -> float:
    data = TrainerSpec.load(home / "together.toml").data
    tokenizer = build_tokenizer(data, folders={"base": str(home / "base")})
    held_out = {"chats": str(home / "one.jsonl"), "chats.validation": str(home / "held_out.jsonl")}
    batches = validation_batches(Corpus(data, tokenizer, held_out), num_sequences=16, batch_size=8)
    return evaluate_loss(model, batches)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft makes transformers raise it
def test_people_with_different_chats_make_an_adapter_that_nobody_makes_alone(home: Path, tmp_path: Path) -> None:
    often = ("--save-every-s", "2")
    spec, other = write_spec(home, "together"), [*often, *bindings(home, "other")]
    with ExitStack() as peers:
        a = peers.enter_context(PeerProcess(spec, tmp_path / "a", *often, *bindings(home, "one")))
        ticket = a.ticket
        # It would know its own chats by heart before the others, who have different ones, have started.
        assert noloco("pause", "--state-dir", a.folder).returncode == 0
        b = peers.enter_context(PeerProcess(ticket, tmp_path / "b", *other))
        with PeerProcess(ticket, tmp_path / "c", *other) as c:
            for peer in (b, c):
                peer.event("started")
            assert noloco("resume", "--state-dir", a.folder).returncode == 0
            c.swap_with(a)
            c.report_where(lambda event: event["step"] > DEATH_STEP)
            c.send(signal.SIGKILL)
            c.wait()
        for peer in (a, b):  # they would be done before it has started again
            assert (ask(peer.folder, "pause") or {})["refusal"] == ""
        with PeerProcess(ticket, tmp_path / "c", *other) as c:
            assert c.event("started")["resumed_at"] > 0
            assert all(ask(peer.folder, "resume") for peer in (a, b))
            c.swap_with(a)
            for peer in (a, b, c):
                peer.event("finished", timeout_s=TRAINING_S)
            model = bindings(home, "one")[-2:]
            found = noloco("export", "--merge", ticket, tmp_path / "merged", "--adapters", *model)
            assert found.returncode == 0, found.stderr
            assert "the mean of 3 peers" in found.stdout
            whole = noloco("export", "--merge", ticket, tmp_path / "whole", *model)
            assert whole.returncode == 0, whole.stderr
    together = evaluated(home, a, b, c)
    with (
        PeerProcess(write_spec(home, "alone-a"), tmp_path / "alone-a", *often, *bindings(home, "one")) as alone_a,
        PeerProcess(write_spec(home, "alone-b"), tmp_path / "alone-b", *often, *bindings(home, "other")) as alone_b,
    ):
        ends = [peer.event("finished", timeout_s=TRAINING_S) for peer in (alone_a, alone_b)]
        assert [end["step"] for end in ends] == [STEPS, STEPS]
    alone = [evaluated(home, peer)["merged"]["validation_loss"] for peer in (alone_a, alone_b)]
    base = AutoModelForCausalLM.from_pretrained(home / "base")
    untrained = loss_of(base, home)
    tuned = loss_of(PeftModel.from_pretrained(base, str(tmp_path / "merged")), home)
    log.info("base %s, alone %s, together %s, exported %s", untrained, alone, together, tuned)
    assert tuned < min(untrained, *alone)
    assert loss_of(AutoModelForCausalLM.from_pretrained(tmp_path / "whole"), home) == pytest.approx(tuned, rel=1e-3)
    chat = pipeline("text-generation", str(tmp_path / "whole"))
    asked = [json.loads(line)["messages"] for line in (home / "held_out.jsonl").read_text().splitlines()]
    said = [chat(turns[:1], max_new_tokens=8)[0]["generated_text"][-1]["content"] for turns in asked[::5]]
    log.info("said %s, of %s", said, [turns[1]["content"] for turns in asked[::5]])
    assert all(said)
