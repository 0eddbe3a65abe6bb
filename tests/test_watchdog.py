"""A case that hangs ends in the stacks and the last messages of every rank."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from hf_cp.testing import RankFailure, World


def hangs(rank: int, size: int) -> None:
    """Rank 1 waits for a message that rank 0 never sends, and rank 0 for one that was to be a sum."""
    dist.all_reduce(torch.ones(7))
    if rank == 0:
        dist.send(torch.ones(3, 2), 1)
        dist.all_reduce(torch.ones(5))
    elif rank == 1:
        dist.recv(torch.ones(3, 2), 0)
        dist.recv(torch.ones(11), 0)


def answers(rank: int, size: int) -> int:
    return rank


def test_messages_of_a_hanging_case() -> None:
    with World(3) as world:
        assert world.run(answers) == [0, 1, 2]
        begin = time.monotonic()
        with pytest.raises(RankFailure) as raised:
            world.run(hangs, timeout=2.0)
        assert time.monotonic() - begin < 40
        reports = raised.value.reports
        assert set(reports) == {0, 1, 2}
        assert "did not finish within 2.0 s" in reports[0]
        assert "in hangs" in reports[0]
        assert "in hangs" in reports[1]
        assert reports[2].startswith("finished")
        unfinished = {
            rank: [line.split("ago  ")[1] for line in text.splitlines() if line.endswith("not finished")]
            for rank, text in reports.items()
        }
        assert unfinished == {
            0: ["all_reduce [[5]] in default_pg  <- not finished"],
            1: ["recv [11] from rank 0 of 3  <- not finished"],
            2: [],
        }
        assert "all_reduce [[7]] in default_pg" in reports[2]
        assert "send [3, 2] to rank 1 of 3" in reports[0]
        assert "recv [3, 2] from rank 0 of 3" in reports[1]
        assert world.run(answers) == [0, 1, 2]
