// The only header with macros: checks, early returns, and what depends on the compiler.
#pragma once

#include <cerrno>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>

namespace epbuf {

// A failed check of ours, of the system, of CUDA or of NCCL. bindings.h turns it into epbuf.errors.NativeError.
class NativeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace epbuf

// Throws unless `condition` holds; what follows is streamed into the message: what was asked, what was found, what to
// do.
#define EPBUF_CHECK(condition, ...)                                             \
  do {                                                                          \
    if (!(condition)) throw ::epbuf::NativeError(::epbuf::concat(__VA_ARGS__)); \
  } while (0)

// The same for a system call that sets errno.
#define EPBUF_CHECK_ERRNO(condition, ...) EPBUF_CHECK(condition, __VA_ARGS__, ": ", std::strerror(errno))

// Returns from the caller, which returns Status, unless `expression` is kOk.
#define EPBUF_TRY(expression)                                                                                         \
  do {                                                                                                                \
    if (const ::epbuf::Status epbuf_status = (expression); epbuf_status != ::epbuf::Status::kOk) return epbuf_status; \
  } while (0)

// Inlined everywhere, and by nvcc compiled for both sides.
#if defined(__CUDACC__)
#define EPBUF_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EPBUF_HOST_DEVICE [[gnu::always_inline]] inline
#endif

#if defined(__SANITIZE_THREAD__)
#define EPBUF_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define EPBUF_THREAD_SANITIZER 1
#endif
#endif
#ifndef EPBUF_THREAD_SANITIZER
#define EPBUF_THREAD_SANITIZER 0
#endif

// Compiles a row kernel twice, for the x86-64 baseline and for AVX2, and picks one when the module is loaded. AVX2
// alone brings no fused multiply-add, so both give the same bits. The sanitizers' runtimes are not up yet when the
// choice runs.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define EPBUF_TARGET_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define EPBUF_TARGET_CLONES
#endif
