// Accesses to cells on the device, each named by its order and scope, as csrc/sync.h names them on the host.
//
// A publishing thread: everything before it, then fence_release_system, then store_fenced_system for each peer.
// A waiting thread: load_fenced_system until the epoch is the awaited one, then fence_acquire_system.
//
// Rows are written by many blocks of an earlier kernel of the same stream, and published by one thread of a later one.
// That needs no fence in the blocks that write: the end of a kernel happens before what the next kernel of its stream
// does after await_previous (chain.cuh), so the rows come before the publisher's fence in causality order, and a
// system-scope fence is cumulative: it orders what its thread observed and not only what it wrote (PTX ISA, "Memory
// Consistency Model", causality order).
#pragma once

#include <cstdint>

#include "../layout.h"

namespace epbuf::cuda {

template <typename T>
__device__ __forceinline__ T* at(std::uint64_t base, std::int64_t offset = 0) {
  return reinterpret_cast<T*>(base + static_cast<std::uint64_t>(offset));
}

#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
// Orders reads as well as writes before it: ACK, COUNT and GO say that a region may be overwritten. Costs as much as a
// load that misses every cache.
__device__ __forceinline__ void fence_release_system() { asm volatile("fence.release.sys;" ::: "memory"); }

// Costs next to nothing.
__device__ __forceinline__ void fence_acquire_system() { asm volatile("fence.acquire.sys;" ::: "memory"); }
#else  // nvcc does not know fences of one direction
__device__ __forceinline__ void fence_release_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ void fence_acquire_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
#endif

__device__ __forceinline__ void store_relaxed_system(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ std::uint64_t load_relaxed_system(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// One 8-byte access: epoch in the lower half, as the host's little-endian Cell has it.
__device__ __forceinline__ void store_fenced_system(Cell* cell, Cell value) {
  const std::uint64_t bits = static_cast<std::uint64_t>(value.value) << 32 | value.epoch;
  store_relaxed_system(reinterpret_cast<std::uint64_t*>(cell), bits);
}

__device__ __forceinline__ Cell load_fenced_system(const Cell* cell) {
  const std::uint64_t bits = load_relaxed_system(reinterpret_cast<const std::uint64_t*>(cell));
  return {static_cast<std::uint32_t>(bits), static_cast<std::uint32_t>(bits >> 32)};
}

// No order at all: PROGRESS, and cells that an acquire fence already covers.
__device__ __forceinline__ void store_relaxed_system(Cell* cell, Cell value) { store_fenced_system(cell, value); }

__device__ __forceinline__ Cell load_relaxed_system(const Cell* cell) { return load_fenced_system(cell); }

// Words that only kernels of this rank write, possibly on several streams.
__device__ __forceinline__ std::uint32_t load_relaxed_device(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ std::int64_t load_relaxed_device(const std::int64_t* word) {
  std::int64_t value;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_device(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Nanoseconds of the device's clock; ticks coarsely.
__device__ __forceinline__ std::uint64_t device_time_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace epbuf::cuda
