// Kernels of a chain without gaps: each is put on the GPU while the one ahead of it still runs, and waits there.
//
// Every kernel calls await_previous before it touches memory, two things excepted (below). It returns when the kernel
// ahead has ended, with all that this one wrote visible; that one did the same, so all earlier ones have ended too, and
// stream order holds as if the kernels had been launched one after the other. A kernel that nobody told to release_next
// does so by ending: kernels of others, before and after ours, see plain stream order. Two things may be read before:
// the windows' addresses, which never change, and what only kernels before the one ahead may have written, after whose
// end that one began its work.
//
// A kernel that waits for peers releases the next one only after that wait. Else blocks that move rows would sit on
// multiprocessors that a rank of the same GPU needs for what is waited for.
#pragma once

namespace epbuf::cuda {

// The same pointer, as something that the compiler cannot know before this place, nor load from.
template <typename T>
__device__ __forceinline__ const T* from_here(const T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// By any thread, for its block; the next kernel is put on the GPU when all blocks have done it or ended.
__device__ __forceinline__ void release_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace epbuf::cuda
