"""``linear_mode="ulysses"``: every rank computes all tokens of some heads.

Communication, forward: each rank sends ``(W - 1) / W`` of its q, k, v, beta and g, and of its output on the way back;
backward the same again. Needs H and HV divisible by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..collectives import start_exchange_heads_to_sequence, start_exchange_sequence_to_heads
from ..context import CpContext
from .state_passing import Finish, SpanInputs, whole_rule


def start(inputs: SpanInputs, cp: CpContext) -> Finish:
    """Start the exchange of sequence for heads; call the result for the output ``[B, L, HV, V]``."""
    pending = start_exchange_sequence_to_heads(inputs, cp.mesh)

    def finish(between: Callable[[], None]) -> torch.Tensor:
        output = whole_rule(SpanInputs(*pending.wait()), cp)
        sent = start_exchange_heads_to_sequence(output, cp.mesh)
        between()
        return sent.wait()

    return finish
