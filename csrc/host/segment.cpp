#include "segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <utility>

#include "../check.h"

namespace epbuf {
namespace {

constexpr char kSharedMemoryDir[] = "/dev/shm";
constexpr mode_t kOwnerOnly = 0600;
constexpr int kMaxTries = 100;

// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

void check_prefix(const std::string& prefix) {
  EPBUF_CHECK(!prefix.empty() && prefix.size() <= 200 && prefix.find('/') == std::string::npos,
              "a segment's name or prefix is a file name without '/', found '", prefix, "'");
}

void check_nbytes(std::size_t nbytes) { EPBUF_CHECK(nbytes > 0, "a segment of 0 bytes was asked for"); }

std::string random_name(const std::string& prefix) {
  std::uint64_t random = 0;
  EPBUF_CHECK_ERRNO(::getrandom(&random, sizeof random, 0) == static_cast<ssize_t>(sizeof random), "getrandom");
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(random));
  return prefix + digits;
}

struct stat stat_of(int fd, const std::string& name) {
  struct stat info{};
  EPBUF_CHECK_ERRNO(::fstat(fd, &info) == 0, "fstat of shared memory ", name);
  return info;
}

int open_segment(const std::string& name, int flags) {
  return ::shm_open(("/" + name).c_str(), flags | O_RDWR | O_CLOEXEC | O_NOFOLLOW, kOwnerOnly);
}

bool lock(int fd, int operation) {
  int result;
  do {
    result = ::flock(fd, operation);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

// Between the creation and the lock a sweeper may take the segment for a dead one and remove it; then it has no name
// any more and is of no use, and the answer is an empty descriptor, as for a name that is taken.
Descriptor create_locked(const std::string& name) {
  Descriptor fd(open_segment(name, O_CREAT | O_EXCL));
  if (fd.get() < 0 && errno == EEXIST) return Descriptor(-1);
  EPBUF_CHECK_ERRNO(fd.get() >= 0, "creating shared memory ", name);
  EPBUF_CHECK_ERRNO(lock(fd.get(), LOCK_EX), "locking shared memory ", name);
  return stat_of(fd.get(), name).st_nlink == 0 ? Descriptor(-1) : std::move(fd);
}

// Reserves the memory now: a sparse segment would end in SIGBUS in the middle of a step.
void reserve(int fd, std::size_t nbytes) {
  int error;
  do {
    error = ::posix_fallocate(fd, 0, static_cast<off_t>(nbytes));
  } while (error == EINTR);
  EPBUF_CHECK(error == 0, "a window of ", nbytes, " bytes was asked for; ", kSharedMemoryDir,
              " cannot hold it: ", std::strerror(error), "; enlarge it (containers: --shm-size) or plan less");
}

void* map_shared(int fd, std::size_t nbytes, const std::string& name) {
  void* data = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  EPBUF_CHECK_ERRNO(data != MAP_FAILED, "mapping ", nbytes, " bytes of shared memory ", name);
  return data;
}

// Removes the name as long as the object has not taken it over.
class NameGuard {
 public:
  explicit NameGuard(std::string name) : name_(std::move(name)) {}
  ~NameGuard() {
    if (!name_.empty()) ::shm_unlink(("/" + name_).c_str());
  }
  NameGuard(const NameGuard&) = delete;
  NameGuard& operator=(const NameGuard&) = delete;
  void dismiss() { name_.clear(); }

 private:
  std::string name_;
};

bool starts_with(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

// A segment whose lock can be taken has no living maker. Whoever cannot be opened belongs to another user or is gone.
bool remove_if_dead(const std::string& name) {
  const Descriptor fd(open_segment(name, 0));
  if (fd.get() < 0) return false;
  const struct stat info = stat_of(fd.get(), name);
  if (info.st_uid != ::geteuid() || !lock(fd.get(), LOCK_EX | LOCK_NB)) return false;
  return ::shm_unlink(("/" + name).c_str()) == 0;
}

}  // namespace

HostSegment::HostSegment(std::string name, void* data, std::size_t nbytes, int lock_fd)
    : name_(std::move(name)), data_(data), nbytes_(nbytes), lock_fd_(lock_fd), maker_pid_(::getpid()) {}

HostSegment::HostSegment(HostSegment&& other) noexcept
    : name_(std::exchange(other.name_, {})),
      data_(std::exchange(other.data_, nullptr)),
      nbytes_(other.nbytes_),
      lock_fd_(std::exchange(other.lock_fd_, -1)),
      maker_pid_(other.maker_pid_) {}

HostSegment::~HostSegment() {
  unlink();
  if (data_ != nullptr) ::munmap(data_, nbytes_);
}

HostSegment HostSegment::create(const std::string& prefix, std::size_t nbytes) {
  check_prefix(prefix);
  check_nbytes(nbytes);
  for (int i = 0; i < kMaxTries; ++i) {
    const std::string name = random_name(prefix);
    Descriptor fd = create_locked(name);
    if (fd.get() < 0) continue;
    NameGuard guard(name);
    reserve(fd.get(), nbytes);
    void* data = map_shared(fd.get(), nbytes, name);
    guard.dismiss();
    return HostSegment(name, data, nbytes, fd.release());
  }
  throw NativeError(concat("no segment ", prefix, "* could be created: each of ", kMaxTries, " was removed at once"));
}

HostSegment HostSegment::map(const std::string& name, std::size_t nbytes) {
  check_prefix(name);
  check_nbytes(nbytes);
  const Descriptor fd(open_segment(name, 0));
  EPBUF_CHECK_ERRNO(fd.get() >= 0, "opening shared memory ", name);
  const struct stat info = stat_of(fd.get(), name);
  EPBUF_CHECK(info.st_uid == ::geteuid(), "shared memory ", name, " belongs to user ", info.st_uid);
  EPBUF_CHECK(static_cast<std::size_t>(info.st_size) == nbytes, "shared memory ", name, " has ", info.st_size,
              " bytes, asked for ", nbytes);
  return HostSegment("", map_shared(fd.get(), nbytes, name), nbytes, -1);
}

HostSegment HostSegment::anonymous(std::size_t nbytes) {
  check_nbytes(nbytes);
  void* data = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EPBUF_CHECK_ERRNO(data != MAP_FAILED, "mapping ", nbytes, " bytes of private memory");
  return HostSegment("", data, nbytes, -1);
}

int HostSegment::sweep(const std::string& prefix) {
  check_prefix(prefix);
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(kSharedMemoryDir), ::closedir);
  if (!dir) return 0;
  int num_removed = 0;
  while (const dirent* entry = ::readdir(dir.get())) {
    if (starts_with(entry->d_name, prefix) && remove_if_dead(entry->d_name)) ++num_removed;
  }
  return num_removed;
}

void HostSegment::unlink() noexcept {
  if (lock_fd_ < 0) return;
  if (maker_pid_ == ::getpid()) ::shm_unlink(("/" + name_).c_str());
  ::close(std::exchange(lock_fd_, -1));
  name_.clear();
}

}  // namespace epbuf
