"""The door of a sharded forward: what all ranks must agree on before the first message whose size depends on data."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from .collectives import exchange_objects, exchange_vector
from .mesh import CpMesh

_logger = logging.getLogger("hf_cp")

# What ranks must agree on, in the order of the report: two sizes, tensors and options by their hash, one plain number.
_SIZES = ("batch size", "sequence length")
_HASHED = (
    "inputs",
    "position ids",
    "cu_seq_lens_q",
    "attention mask",
    "labels",
    "images and videos",
    "num_items_in_batch",
    "logits_to_keep",
    "output_hidden_states",
)
_KIND = "kind of call (head or decoder, labels, training or evaluation, gradients)"
# Of these, how many entries no row of a table stands for: only the rank that holds one would stop at it.
_OUTSIDE = ("input_ids", "labels")
_NONE = torch.zeros((), dtype=torch.int64)
_REMEDY = (
    "every rank of a context-parallel group must get the same batch: set dispatch_batches=False, use the same seed on "
    "all ranks and do not shard the data over the context-parallel group"
)


def fingerprint(x: torch.Tensor | None) -> torch.Tensor:
    """Order-sensitive 64-bit hash of a tensor, as an int64 scalar on its device; absent tensors hash to zero."""
    if x is None:
        return torch.zeros((), dtype=torch.int64)
    x = x.detach()
    if x.is_floating_point():
        x = x.double().contiguous().view(torch.int64)
    x = x.reshape(-1).to(torch.int64)
    index = torch.arange(x.numel(), device=x.device, dtype=torch.int64)
    mixed = (x + 0x1F3D5B79) * (index * 0x5851F42D4C957F2D + 0x14057B7EF767814F)
    return (mixed ^ (mixed >> 29)).sum()


def _hash(value: Any) -> torch.Tensor:
    """`fingerprint` of what is, makes or holds tensors; an option left out and one switched off hash alike."""
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return torch.stack([fingerprint(x) * (2 * i + 1) for i, x in enumerate(value)]).sum()
    given = isinstance(value, torch.Tensor) or bool(value)
    return fingerprint(torch.as_tensor(value) if given else None)


# Seconds after which a rank that waits says so.
_PATIENCE = 60.0

_ABSENT = (
    "every rank of the group must make the same calls of the model: does one of them generate alone, go on with a KV "
    "cache, skip a batch, or end early?"
)


class _Watch:
    """Writes a line, once a wait, where this process waits for long: a thread that looks at a clock once a second."""

    def __init__(self) -> None:
        self._wait: tuple[float, str] | None = None
        self._thread: threading.Thread | None = None

    def start(self, begin: float, place: str) -> None:
        self._wait = begin, place
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hf_cp_waiting", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._wait = None

    def _run(self) -> None:
        told = None
        while True:
            time.sleep(min(_PATIENCE, 1.0))
            wait = self._wait
            if wait is not None and wait is not told and time.monotonic() - wait[0] > _PATIENCE:
                told = wait
                _logger.warning(f"{wait[1]} has waited {_PATIENCE:.0f} s at a forward, and still does; {_ABSENT}")


_watch = _Watch()


@contextlib.contextmanager
def _waiting_for_others(mesh: CpMesh) -> Iterator[None]:
    """Within the context, this rank waits for the others of its group; after a minute it says so.

    Raises:
        RuntimeError: over gloo, in one line: a rank has ended, or did not come within the timeout of the process group.
            Under NCCL its watchdog ends the process then.
    """
    place = f"context-parallel rank {mesh.cp_rank} of {mesh.cp_size}"
    begin = time.monotonic()
    _watch.start(begin, place)
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise RuntimeError(
            f"{place} waited {time.monotonic() - begin:.0f} s at a forward; {_ABSENT} ({reason})"
        ) from error
    finally:
        _watch.stop()


# What a rank's first number says: that it joins in a sharded call, refuses it, or keeps a KV cache instead. No other
# message begins like this, so that one which a rank sends instead of coming to a forward is seen.
_SHARDS, _REFUSES, _CACHES = (0x68665F6370 * 1000 + kind for kind in range(3))


def agree(
    mesh: CpMesh,
    *,
    refusal: str | None,
    inputs: Any = None,
    kind: int = 0,
    outside: tuple[torch.Tensor, torch.Tensor] | None = None,
    cached: bool = False,
    **hashed: Any,
) -> None:
    """Raise the same error on every rank of the group if a rank refuses its call or the ranks' batches differ.

    One small all-gather and one host read a forward; nothing else of a forward needs the host to wait.

    Args:
        refusal: this rank's reason not to run the call, or ``None``. With a reason, nothing else is looked at.
        inputs: token ids ``[B, T]`` or embeddings ``[B, T, D]`` of the whole sequence.
        kind: a small integer for what is asked; ranks must ask for the same.
        outside: how many ids and how many labels are outside the vocabulary, int64 scalars; ``None`` for none.
        cached: the call has a KV cache. It is not sharded, and nothing but this is looked at.
        hashed: tensors, numbers or ``None``, by the names of `_HASHED` with underscores.

    Raises:
        ValueError: naming what differs, the values of all ranks and the remedy; or what is outside the vocabulary.
        RuntimeError: a rank has ended, or did not come within the timeout of the process group; on the ranks that wait.
    """
    if mesh.cp_size == 1:
        if refusal is not None:
            raise ValueError(refusal)
        return
    fields = (*_SIZES, *_HASHED, _KIND, *_OUTSIDE)
    row: Any = [_CACHES if refusal is None else _REFUSES] + [0] * len(fields)
    if refusal is None and not cached:
        hashed["inputs"] = inputs
        numbers = [_hash(hashed.get(name.replace(" ", "_"))) for name in _HASHED]
        numbers += [torch.tensor(kind), *(outside or (_NONE, _NONE))]
        # Few are of tensors on a GPU; the others need no operation there: a copy for all, and one for each of the few.
        known = [0 if x.device.type == "cuda" else int(x) for x in numbers]
        row = torch.tensor([_SHARDS, *inputs.shape[:2], *known], dtype=torch.int64).to(inputs.device)
        for index, x in enumerate(numbers, start=1 + len(_SIZES)):
            if x.device.type == "cuda":
                row[index] = x
    with _waiting_for_others(mesh):
        rows = exchange_vector(row, mesh)
    elsewhere = [rank for rank, row in enumerate(rows) if row[0] not in (_SHARDS, _REFUSES, _CACHES)]
    if elsewhere:
        ranks = f"{', '.join(map(str, elsewhere))} of 0 to {mesh.cp_size - 1}"
        raise ValueError(f"context-parallel ranks {ranks} sent something else than a forward; {_ABSENT}")
    if any(row[0] == _REFUSES for row in rows):
        reasons = exchange_objects(refusal, mesh)
        rank, reason = next((r, text) for r, text in enumerate(reasons) if text is not None)
        everywhere = all(text == reason for text in reasons)
        raise ValueError(reason if everywhere else f"{reason} (refused by context-parallel rank {rank})")
    caching = [rank for rank, row in enumerate(rows) if row[0] == _CACHES]
    if 0 < len(caching) < mesh.cp_size:
        ranks = f"{', '.join(map(str, caching))} of 0 to {mesh.cp_size - 1}"
        raise ValueError(
            f"use_cache=True on context-parallel ranks {ranks} alone: "
            "a call with a KV cache is not sharded; let every rank of the group make it, or none"
        )
    for index, name in enumerate(fields, start=1):
        values = [row[index] for row in rows]
        if len(set(values)) > 1:
            shown = f" ({', '.join(map(str, values))} on ranks 0 to {mesh.cp_size - 1})" if name in _SIZES else ""
            raise ValueError(f"{name} differs between context-parallel ranks{shown}: {_REMEDY}")
    for name, count in zip(_OUTSIDE, rows[0][-2:], strict=True):
        if count:
            raise ValueError(f"{name}: {count} outside the vocabulary: resize the model's embeddings, or mend the data")
