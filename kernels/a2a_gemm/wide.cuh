// Tensor instructions of 160 columns, both operands in shared memory with contiguous K: a tile of 320 columns is two of
// them. CuTe has them too, but only together with every other width, which makes compiling take minutes.
#pragma once

#include <cutlass/numeric_types.h>

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_atom.hpp>

namespace hf_cp {

#define HF_CP_TEN(each, t) each(t##0), each(t##1), each(t##2), each(t##3), each(t##4), \
                           each(t##5), each(t##6), each(t##7), each(t##8), each(t##9)
#define HF_CP_ALL(each)                                                                               \
  HF_CP_TEN(each, 0), HF_CP_TEN(each, 1), HF_CP_TEN(each, 2), HF_CP_TEN(each, 3), HF_CP_TEN(each, 4), \
      HF_CP_TEN(each, 5), HF_CP_TEN(each, 6), HF_CP_TEN(each, 7)
#define HF_CP_PARAMETER(i) float& d##i
#define HF_CP_OPERAND(i) "+f"(d##i)
#define HF_CP_EIGHTY                                                                                          \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "     \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, " \
  "%43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}"
// `scales` are the instruction's last immediates: plus signs and, for 16-bit operands, contiguous K.
#define HF_CP_FMA(name, scales)                                                                                   \
  CUTE_HOST_DEVICE static void fma(                                                                               \
      uint64_t const& a, uint64_t const& b, HF_CP_ALL(HF_CP_PARAMETER), cute::GMMA::ScaleOut const accumulate) {  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned." name " " HF_CP_EIGHTY ", %80, %81, p, " scales ";\n}\n"          \
                 : HF_CP_ALL(HF_CP_OPERAND)                                                                       \
                 : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));                                        \
  }

struct Wgmma160Bf16 {
  using DRegisters = void;
  using ARegisters = uint64_t[1];
  using BRegisters = uint64_t[1];
  using CRegisters = float[80];
  HF_CP_FMA("m64n160k16.f32.bf16.bf16", "1, 1, 0, 0")
};

struct Wgmma160E4m3 {
  using DRegisters = void;
  using ARegisters = uint64_t[1];
  using BRegisters = uint64_t[1];
  using CRegisters = float[80];
  HF_CP_FMA("m64n160k32.f32.e4m3.e4m3", "1, 1")
};

#undef HF_CP_TEN
#undef HF_CP_ALL
#undef HF_CP_PARAMETER
#undef HF_CP_OPERAND
#undef HF_CP_EIGHTY
#undef HF_CP_FMA

template <class Element, int kK>
struct Wgmma160Traits {
  using ValTypeD = float;
  using ValTypeA = Element;
  using ValTypeB = Element;
  using ValTypeC = float;
  using FrgTypeA = cute::GMMA::smem_desc<cute::GMMA::Major::K>;
  using FrgTypeB = cute::GMMA::smem_desc<cute::GMMA::Major::K>;
  using Shape_MNK = cute::Shape<cute::_64, cute::Int<160>, cute::Int<kK>>;
  using ThrID = cute::Layout<cute::_128>;
  using ALayout = cute::GMMA::ABLayout<64, kK>;
  using BLayout = cute::GMMA::ABLayout<160, kK>;
  using CLayout = cute::GMMA::CLayout_64xN<160>;
  cute::GMMA::ScaleOut accumulate_ = cute::GMMA::ScaleOut::One;
};

}  // namespace hf_cp

namespace cute {

template <>
struct MMA_Traits<hf_cp::Wgmma160Bf16> : hf_cp::Wgmma160Traits<cutlass::bfloat16_t, 16> {};
template <>
struct MMA_Traits<hf_cp::Wgmma160E4m3> : hf_cp::Wgmma160Traits<cutlass::float_e4m3_t, 32> {};

}  // namespace cute
