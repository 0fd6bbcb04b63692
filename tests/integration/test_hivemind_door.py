"""Only the DHT of hivemind is loaded, and a program that needs the rest of hivemind can still import it."""

from __future__ import annotations

import subprocess
import sys

from harness.patience import PATIENCE_S

PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
from noloco_p2p.swarm import kademlia
kademlia.load()
assert "hivemind.dht.node" in sys.modules
assert "hivemind.averaging" not in sys.modules and "scipy" not in sys.modules
import hivemind
assert "hivemind.averaging" not in sys.modules
assert hivemind.DHT.__module__ == "hivemind.dht.dht" and hivemind.__version__
from hivemind import DecentralizedAverager
assert sys.modules["hivemind.dht.node"] is hivemind.dht.node
"""


def test_the_rest_of_hivemind_waits_for_its_first_use() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=PATIENCE_S)
