"""Stage functions of the chunked gated delta rule in Gluon, for heads of 128 in 16-bit types on Hopper GPUs.

They compute what the functions of the same names in `eager` compute; README.md says in which steps, and how fast.
"""

import types
from typing import cast

from ..triton_stages.chunks import Spans
from ..triton_stages.compose import ComposedStages, Kernels
from .gradients import gradients
from .prepare import prepare
from .state import outputs, reverse, transitions

_STAGES = ComposedStages(
    "gluon",
    cast(
        "Kernels",
        types.SimpleNamespace(
            prepare=prepare, outputs=outputs, transitions=transitions, reverse=reverse, gradients=gradients
        ),
    ),
    Spans(forward=8, backward=12, chunks=32),
)
forward, summary = _STAGES.forward, _STAGES.summary
backward_state, backward = _STAGES.backward_state, _STAGES.backward
