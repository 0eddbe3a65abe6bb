"""Scripts as `python` and `torchrun` start them, but in processes forked from one that has imported torch already."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from hf_cp.testing import _fork_server


def _main(script: str, cwd: str, environment: Mapping[str, str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = [script]
    sys.path.insert(0, os.path.dirname(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_script(script: Path, *, ranks: int = 1, environment: Mapping[str, str], timeout: float = 120.0) -> str:
    """Run a script in its own folder and return what it printed; with several ranks, what rank 0 did.

    Raises:
        AssertionError: a process failed, or did not finish within `timeout` seconds; with its output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes, outputs = [], []
    for rank in range(ranks):
        launched = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        outputs.append(script.with_suffix(f".{rank}.log"))
        arguments = (str(script), str(script.parent), {**environment, **(launched if ranks > 1 else {})})
        processes.append(_fork_server().Process(target=_main, args=(*arguments, str(outputs[-1])), daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0.0))
    finally:
        ended = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
    printed = [path.read_text() if path.exists() else "" for path in outputs]
    for rank, (code, text) in enumerate(zip(ended, printed, strict=True)):
        assert code == 0, f"rank {rank}: exit code {code} (None: not finished within {timeout} s)\n{text[-6000:]}"
    return printed[0]
