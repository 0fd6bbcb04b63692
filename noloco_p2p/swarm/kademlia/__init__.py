"""Provides the DHT node, which is built on hivemind. Only this package imports hivemind.

A new release of hivemind therefore affects only these files. `load` imports hivemind when a node starts, which takes
several seconds and 290 MB of memory. It also undoes the side effects of that import: hivemind changes torch's sharing
strategy, installs a log handler that writes to the terminal, and renames the log level WARNING. hivemind's averagers,
optimizers and experts are not used here. Importing them would take 52 MB of memory and a third of the import time, so
they are imported only on first use.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Any

from noloco_p2p.errors import DirectoryError
from noloco_p2p.swarm.clock import CLOCK


def load() -> None:
    """Import hivemind. The first call blocks for several seconds, so run it in a thread. Later calls have no effect."""
    import torch.multiprocessing

    _defer_package()
    strategy = torch.multiprocessing.get_sharing_strategy()
    warning_name = logging.getLevelName(logging.WARNING)
    import hivemind.dht.node  # noqa: F401
    from hivemind.utils.logging import use_hivemind_log_handler

    for name, module in list(sys.modules.items()):  # hivemind uses time.time, which jumps when the clock is set
        if name.startswith("hivemind.") and "get_dht_time" in vars(module):
            vars(module)["get_dht_time"] = CLOCK.now
    torch.multiprocessing.set_sharing_strategy(strategy)
    logging.addLevelName(logging.WARNING, warning_name)
    use_hivemind_log_handler("nowhere")
    verbose = logging.getLogger("noloco_p2p").isEnabledFor(logging.DEBUG)
    logging.getLogger("hivemind").setLevel(logging.DEBUG if verbose else logging.CRITICAL)


def _defer_package() -> None:
    """Let `import hivemind.dht` skip the other imports in hivemind/__init__.py until they are first used."""
    if "hivemind" in sys.modules:
        return
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.loader is None:
        raise DirectoryError("hivemind is not installed; reinstall noloco_p2p with its dependencies")
    loader, package = spec.loader, importlib.util.module_from_spec(spec)

    def on_first_use(name: str) -> Any:
        if name.startswith("__"):  # requested by the import system or by introspection, not by a user
            raise AttributeError(name)
        if submodule := sys.modules.get(f"hivemind.{name}"):  # the module is already loaded, or is being loaded
            return submodule
        del package.__dict__["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = on_first_use
    sys.modules["hivemind"] = package
