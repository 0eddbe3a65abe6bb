"""``linear_mode="p2p"``: one fp32 state a hop.

Communication, forward: every rank but the last sends ``B * HV * K * V`` fp32 to the next; backward the same, the other
way. The size does not depend on the sequence length, and any number of heads and ranks works.
"""

from __future__ import annotations

import torch

from ..collectives import start_state_chain
from ..context import CpContext
from . import state_passing


def start(inputs: state_passing.SpanInputs, cp: CpContext) -> state_passing.Finish:
    """Start the state chain; call the result for the output ``[B, L, HV, V]``."""

    def exchange(M: torch.Tensor | None, h: torch.Tensor, *, reverse: bool, accept: bool) -> state_passing.Pending:
        return start_state_chain(M, h, cp.mesh, reverse=reverse, accept=accept)

    return state_passing.start(inputs, cp, exchange)
