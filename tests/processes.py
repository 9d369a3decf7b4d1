"""Programs of several processes, for the tests that start them: how they are told, and when they hang."""

from __future__ import annotations

import os
import socket
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
LONG_S = 600  # a program that takes so long hangs, however loaded the machine is
STANDALONE = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]  # takes a free port


def free_port() -> int:
    """A port that nobody holds now; for starters that take none by themselves."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
