"""Scripts as `python` and `torchrun` start them, but in processes forked from one that has imported torch already."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_cp.testing import _fork_server, free_port


def _main(script: str, arguments: Sequence[str], cwd: str, environment: Mapping[str, str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_script(
    script: Path,
    *arguments: str,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> str:
    """Run a script in a new folder and return what it printed, or of several ranks the first.

    Args:
        arguments: of its command line.
        ranks: 1 for a plain process; more see what `torchrun` sets.
        environment: variables beside the inherited ones.

    Raises:
        AssertionError: a process failed, or did not finish within `timeout` seconds; with its output.
    """
    port = free_port()
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"output{rank}" for rank in range(ranks)]
        for rank, output in enumerate(outputs):
            launched = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            variables = {**(environment or {}), **(launched if ranks > 1 else {})}
            call = (str(script), arguments, folder, variables, str(output))
            # Not as a daemon: a script may start processes of its own.
            processes.append(_fork_server().Process(target=_main, args=call))
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
