"""Stage functions of the chunked gated delta rule as Triton kernels for Hopper GPUs.

They compute what the functions of the same names in `eager` compute; README.md says in which steps, and how fast.
"""

import types
from typing import cast

from .chunks import Spans
from .compose import ComposedStages, Kernels
from .gradients import gradients
from .prepare import prepare
from .state import outputs, reverse, transitions

_STAGES = ComposedStages(
    "triton",
    cast(
        "Kernels",
        types.SimpleNamespace(
            prepare=prepare, outputs=outputs, transitions=transitions, reverse=reverse, gradients=gradients
        ),
    ),
    Spans(forward=8, backward=8, chunks=16),
)
forward, summary = _STAGES.forward, _STAGES.summary
backward_state, backward = _STAGES.backward_state, _STAGES.backward
