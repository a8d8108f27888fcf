// Memory of one window on the host: POSIX shared memory among processes, or private to one process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace epbuf {

// Owns a mapping, and the name of the segment as long as it has one. A named segment is locked by the process that
// made it: a segment that nobody locks belongs to a process that died, and sweep() removes it.
class HostSegment {
 public:
  // Makes /dev/shm/<prefix><random>, mode 0600, zeroed, all of its memory reserved.
  static HostSegment create(const std::string& prefix, std::size_t nbytes);

  // Maps the segment that another process made with create().
  static HostSegment map(const std::string& name, std::size_t nbytes);

  // Zeroed memory of this process, page-aligned, without a name.
  static HostSegment anonymous(std::size_t nbytes);

  // Removes the segments of this user under `prefix` whose maker is gone. Returns how many.
  static int sweep(const std::string& prefix);

  HostSegment(HostSegment&& other) noexcept;
  HostSegment& operator=(HostSegment&&) = delete;
  HostSegment(const HostSegment&) = delete;
  HostSegment& operator=(const HostSegment&) = delete;
  ~HostSegment();

  const std::string& name() const { return name_; }  // "" when there is none (any more)
  std::size_t nbytes() const { return nbytes_; }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(data_); }

  // Removes the name; the memory stays until the last mapping goes. Nothing to do for who did not make it.
  void unlink() noexcept;

 private:
  HostSegment(std::string name, void* data, std::size_t nbytes, int lock_fd);

  std::string name_;
  void* data_;
  std::size_t nbytes_;
  int lock_fd_;    // -1: not the maker, or unlinked
  int maker_pid_;  // a forked child holds a copy of this object and must not remove the name
};

}  // namespace epbuf
