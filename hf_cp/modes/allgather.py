"""``linear_mode="allgather"``: all summaries in one collective, folded locally.

Communication, forward: every rank contributes ``B * HV * K * (K + V)`` fp32 to one all-gather; backward the same. No
rank waits for another's fold, at the price of ``cp_size`` times the bytes of one hop.
"""

from __future__ import annotations

import torch

from ..collectives import start_gather_states
from ..context import CpContext
from . import state_passing


def start(inputs: state_passing.SpanInputs, cp: CpContext) -> state_passing.Finish:
    """Start the all-gather of the summaries; call the result for the output ``[B, L, HV, V]``."""

    def exchange(M: torch.Tensor | None, h: torch.Tensor, *, reverse: bool, accept: bool) -> state_passing.Pending:
        return start_gather_states(M, h, cp.mesh, reverse=reverse, accept=accept)

    return state_passing.start(inputs, cp, exchange)
