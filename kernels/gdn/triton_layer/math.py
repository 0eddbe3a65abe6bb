"""Elementwise functions of the kernels."""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(b_x):
    """1 / (1 + e^-x), the division as a squared inverse root: two instructions instead of six."""
    b_r = tl.rsqrt(1.0 + tl.exp2(b_x * -_LOG2_E))
    return b_r * b_r


@triton.jit
def softplus(b_x):
    """log(1 + e^x), to fp32's relative precision also where e^x is far below 1."""
    b_e = tl.exp(-tl.abs(b_x))
    b_u = 1.0 + b_e
    # What rounding took from b_u is given back as a factor; where nothing of b_e is left in it, log(1 + e) is e.
    b_kept = b_u - 1.0
    b_log = tl.where(b_kept == 0.0, b_e, tl.log(b_u) * (b_e / tl.where(b_kept == 0.0, 1.0, b_kept)))
    return tl.maximum(b_x, 0.0) + b_log
