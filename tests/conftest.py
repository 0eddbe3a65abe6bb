"""Fixtures of the suite: long-lived worlds of ranks, NaN in uninitialised memory, and the gpu marker."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hf_cp.testing import World


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[..., World]]:
    """`world(size)` or `world(size, backend="nccl")`: the session's world of that size, started when first used.

    Ranks share the memory of what the fork server imported, so worlds of several sizes stay up side by side.
    """
    worlds: dict[tuple[int, str], World] = {}

    def get(size: int, backend: str = "gloo") -> World:
        return worlds.setdefault((size, backend), World(size, backend))

    yield get
    for opened in worlds.values():
        opened.close()


@pytest.fixture
def poison_empty() -> Iterator[None]:
    """Fill `torch.empty` and friends with NaN (the largest value for integers) for the length of a test.

    Reads of memory that nobody wrote then show. It works through torch's deterministic mode, so operators without a
    deterministic version warn. A rank of a world is another process: call `hf_cp.testing.fill_uninitialized` there.
    """
    from hf_cp.testing import fill_uninitialized

    with fill_uninitialized():
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is not None:
        needed = marker.args[0] if marker.args else 1
        found = torch.cuda.device_count()
        if found < needed:
            pytest.skip(f"needs {needed} CUDA devices, found {found}")
