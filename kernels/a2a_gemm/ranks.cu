// The meeting of the ranks, a kernel of one warp: no grid that fills the device ever waits for another rank.
//
// Each rank counts its own epoch, writes it into its slot at every rank, and waits until every slot of its own has it.
// What a rank enqueued before its meeting has happened, for every rank, before anything enqueued after it.
#include <cuda_runtime.h>

#include "plan.cuh"
#include "ptx.cuh"

namespace hf_cp {

struct Meeting {
  // slots[r]: rank r's array of one epoch a rank, in memory that this device can write.
  uint64_t slots[kMaxRanks];
  uint64_t epoch, report, timeout_ns;
  int32_t ranks, rank;
};

__global__ void __launch_bounds__(32) meet_kernel(__grid_constant__ Meeting const m) {
  uint64_t* const counter = reinterpret_cast<uint64_t*>(m.epoch);
  uint64_t const epoch = *counter + 1;
  __syncwarp();
  int const lane = threadIdx.x;
  if (lane == 0) store_release_gpu(counter, epoch);
  if (lane >= m.ranks) return;
  __threadfence_system();
  store_release_sys(reinterpret_cast<uint64_t*>(m.slots[lane]) + m.rank, epoch);
  uint64_t const* const slot = reinterpret_cast<uint64_t const*>(m.slots[m.rank]) + lane;
  uint64_t const start = nanoseconds();
  while (true) {
    uint64_t const seen = load_acquire_sys(slot);
    if (seen >= epoch) break;
    if (nanoseconds() - start > m.timeout_ns) {
      Report* const report = reinterpret_cast<Report*>(m.report);
      report->rank = m.rank;
      report->place = lane;
      report->expected = epoch;
      report->seen = seen;
      __threadfence_system();
      report->kind = kRankMissing;
      __threadfence_system();
      break;
    }
    __nanosleep(64);
  }
}

}  // namespace hf_cp

extern "C" int hf_cp_meeting_bytes() { return sizeof(hf_cp::Meeting); }

// Makes the device's context current in this thread. Threads of autograd may have none, and the libraries do not share
// the runtime that torch told about its device.
extern "C" int hf_cp_use_device(int device) { return cudaSetDevice(device); }

// Memory that other processes can open: allocated here, so that a handle stands for exactly this.
extern "C" int hf_cp_ipc_allocate(int device, uint64_t bytes, void** address, cudaIpcMemHandle_t* handle) {
  int code = cudaSetDevice(device);
  if (code == cudaSuccess) code = cudaMalloc(address, bytes);
  if (code == cudaSuccess) code = cudaIpcGetMemHandle(handle, *address);
  return code;
}

// Another process's memory, wherever it lies, for kernels of `device`.
extern "C" int hf_cp_ipc_open(int device, cudaIpcMemHandle_t const* handle, void** address) {
  int code = cudaSetDevice(device);
  if (code == cudaSuccess) code = cudaIpcOpenMemHandle(address, *handle, cudaIpcMemLazyEnablePeerAccess);
  return code;
}

extern "C" int hf_cp_meet(hf_cp::Meeting const* meeting, void* stream) {
  hf_cp::meet_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(*meeting);
  return cudaGetLastError();
}

extern "C" char const* hf_cp_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
