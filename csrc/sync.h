// Accesses to cells, each named by its order and scope. Every signal of csrc/PROTOCOL.md is made of these.
//
// A publishing thread: ordinary writes, fence_release_system, then store_fenced_system for each peer.
// A waiting thread: load_fenced_system until the epoch is the awaited one, fence_acquire_system, then ordinary reads.
// System scope is what C++ atomics give on the host: threads and processes that map the same memory.
#pragma once

#include "check.h"
#include "layout.h"

namespace epbuf {

static_assert(sizeof(Cell) == 8 && alignof(Cell) == 8, "a cell is read and written by one 8-byte access");

// ThreadSanitizer does not model fences. In its build the accesses beside a fence carry the fence's order themselves:
// the same edges between threads, in a form that it understands.
constexpr bool kFencesInAccesses = EPBUF_THREAD_SANITIZER != 0;
constexpr int kStoreFencedOrder = kFencesInAccesses ? __ATOMIC_RELEASE : __ATOMIC_RELAXED;
constexpr int kLoadFencedOrder = kFencesInAccesses ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED;

// Everything this thread read or wrote before is done before any store_fenced_system after it. Reads count: ACK,
// COUNT and GO say that a region may be overwritten.
inline void fence_release_system() {
  if constexpr (!kFencesInAccesses) __atomic_thread_fence(__ATOMIC_RELEASE);
}

// What was published before the cells loaded by load_fenced_system is visible after it.
inline void fence_acquire_system() {
  if constexpr (!kFencesInAccesses) __atomic_thread_fence(__ATOMIC_ACQUIRE);
}

// Relaxed; ordered by the fence_release_system before it.
inline void store_fenced_system(Cell* cell, Cell value) { __atomic_store(cell, &value, kStoreFencedOrder); }

// Relaxed; ordered by the fence_acquire_system after it.
inline Cell load_fenced_system(const Cell* cell) {
  Cell value;
  __atomic_load(cell, &value, kLoadFencedOrder);
  return value;
}

// No order at all: PROGRESS, and cells that an acquire fence already covers.
inline void store_relaxed_system(Cell* cell, Cell value) { __atomic_store(cell, &value, __ATOMIC_RELAXED); }

inline Cell load_relaxed_system(const Cell* cell) {
  Cell value;
  __atomic_load(cell, &value, __ATOMIC_RELAXED);
  return value;
}

}  // namespace epbuf
