"""``linear_mode="ulysses"``: every rank computes all tokens of some heads.

Communication, forward: each rank sends ``(W - 1) / W`` of its q, k, v, beta and g, and of its output on the way back;
backward the same again. Needs H and HV divisible by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..collectives import exchange_heads_to_sequence, exchange_sequence_to_heads
from ..context import CpContext
from ..kernels.gdn import chunk_gated_delta_rule
from .state_passing import SpanInputs


def start(inputs: SpanInputs, cp: CpContext) -> Callable[[], torch.Tensor]:
    """Exchange sequence for heads; call the result for the output ``[B, L, HV, V]``."""
    q, k, v, g, beta = inputs
    if cp.mesh.cp_size > 1:
        q, k, v, g, beta = exchange_sequence_to_heads([q, k, v, g, beta], cp.mesh)

    def finish() -> torch.Tensor:
        output, _ = chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cp.cu_seqlens,
            backend=cp.config.gdn_backend,
        )
        if cp.mesh.cp_size > 1:
            output = exchange_heads_to_sequence(output, cp.mesh)
        return output

    return finish
