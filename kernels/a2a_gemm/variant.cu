// One variant of the fused kernel, chosen by macros that build.py sets: see VARIANTS there.
#include <cutlass/numeric_types.h>

#include "launch.cuh"

#if HF_CP_FP8
using Element = cutlass::float_e4m3_t;
#else
using Element = cutlass::bfloat16_t;
#endif
#if HF_CP_ROWS_ARE_K
constexpr auto kMajorB = cute::GMMA::Major::MN;
#else
constexpr auto kMajorB = cute::GMMA::Major::K;
#endif

using Chosen = hf_cp::Variant<Element, HF_CP_TILE_N, kMajorB, HF_CP_CLUSTER, HF_CP_STAGES>;
HF_CP_EXPORT_VARIANT(Chosen)
