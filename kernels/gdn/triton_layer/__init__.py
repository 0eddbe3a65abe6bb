"""What surrounds the delta rule in a Gated DeltaNet layer, as Triton kernels: convolution, gates, norm, decoding.

`layer` makes operators of them and says what they compute; README.md says how fast.
"""

from . import conv, gates, norm, step

__all__ = ["conv", "gates", "norm", "step"]
