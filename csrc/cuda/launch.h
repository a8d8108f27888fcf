// Launches of kernels that take one struct, and checks of the CUDA runtime's answers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../check.h"

namespace epbuf::cuda {

constexpr std::uint32_t kWarpSize = 32;
constexpr std::uint32_t kAllLanes = 0xFFFFFFFF;

inline void check_cuda(cudaError_t error, const char* what) {
  EPBUF_CHECK(error == cudaSuccess, what, " failed: ", cudaGetErrorString(error));
}

struct Grid {
  std::uint32_t num_blocks;
  std::uint32_t num_threads;
  std::size_t shared_bytes = 0;
  bool is_cluster = false;  // all blocks run at the same time and read each other's shared memory; 8 at most
};

// Blocks per SM of kernels that have a block for every few pieces of work: as one ends, the next takes its place, on
// whatever SM is ahead.
constexpr std::uint32_t kUnlimited = 1u << 20;

// Where a launch goes and how much of the GPU it may fill.
struct Target {
  cudaStream_t stream;
  std::uint32_t num_sms;      // of the device
  std::uint32_t max_num_sms;  // of the config; 0: no limit

  // Blocks for `num_blocks` pieces of work: at most `blocks_per_sm` for every SM, or one for each of max_num_sms.
  std::uint32_t fit(std::int64_t num_blocks, std::uint32_t blocks_per_sm) const {
    const std::int64_t limit = max_num_sms != 0 ? max_num_sms : static_cast<std::int64_t>(num_sms) * blocks_per_sm;
    return static_cast<std::uint32_t>(num_blocks < 1 ? 1 : num_blocks < limit ? num_blocks : limit);
  }
};

// Enqueues; never synchronises and leaves the runtime's last error alone. The kernel may be put on the GPU before the
// one ahead of it in the stream has ended: it begins with await_previous (chain.cuh).
template <typename Arguments>
void launch(const char* name, void (*kernel)(Arguments), const Grid& grid, const Arguments& arguments,
            cudaStream_t stream) {
  void* pointers[] = {const_cast<Arguments*>(&arguments)};
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {grid.num_blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.num_blocks);
  config.blockDim = dim3(grid.num_threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = grid.is_cluster ? 2 : 1;
  const cudaError_t error = cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers);
  EPBUF_CHECK(error == cudaSuccess, "launch of ", name, " (", grid.num_blocks, " blocks of ", grid.num_threads,
              " threads, ", grid.shared_bytes, " bytes of shared memory) failed: ", cudaGetErrorString(error));
}

// Loads a kernel's code now. A first launch would load it, and loading waits for running kernels: for ever, if one of
// them waits for a rank of this process.
template <typename Arguments>
void load(const char* name, void (*kernel)(Arguments)) {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), name);
}

// Lets a kernel's blocks ask for as much shared memory as the device has.
template <typename Arguments>
void allow_all_shared(const char* name, void (*kernel)(Arguments)) {
  const void* function = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, function), name);
  int device = 0, available = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  const int dynamic = available - static_cast<int>(attributes.sharedSizeBytes);
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic), name);
}

}  // namespace epbuf::cuda
