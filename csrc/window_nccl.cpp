#include "window_nccl.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>

#include "check.h"
#include "cuda/launch.h"
#include "cuda/words.h"

namespace epbuf {
namespace {

using cuda::check_cuda;
using cuda::DeviceGuard;

constexpr int kMinVersion = 23004;
constexpr std::size_t kUniqueIdBytes = 128;
constexpr int kWinCollSymmetric = 1;
constexpr int kSuccess = 0;
constexpr const char* kSoname = "libnccl.so.2";

// Source: nccl.h and nccl_device/core.h of NCCL 2.30.7.
struct UniqueId {
  char bytes[kUniqueIdBytes];
};

struct Team {
  int num_ranks, rank, stride;
};

}  // namespace

struct NcclLibrary {
  std::string path;
  int version = 0;

  const char* (*get_error_string)(int) = nullptr;
  int (*get_version)(int*) = nullptr;
  int (*get_unique_id)(UniqueId*) = nullptr;
  int (*comm_init_rank)(void**, int, UniqueId, int) = nullptr;
  int (*comm_destroy)(void*) = nullptr;
  int (*comm_abort)(void*) = nullptr;
  int (*mem_alloc)(void**, std::size_t) = nullptr;
  int (*mem_free)(void*) = nullptr;
  int (*window_register)(void*, void*, std::size_t, void**, int) = nullptr;
  int (*window_deregister)(void*, void*) = nullptr;
  int (*get_lsa_pointer)(void*, std::size_t, int, void**) = nullptr;
  Team (*team_lsa)(void*) = nullptr;

  void check(int result, const char* call) const {
    EPBUF_CHECK(result == kSuccess, call, " failed: ", get_error_string(result), " (NCCL ", version, " from ", path,
                "; NCCL_DEBUG=WARN says more)");
  }
};

namespace {

// DEEPBIND: torch puts its own NCCL among the global symbols, where a second copy's calls to itself would end up. Never
// closed: NCCL keeps threads that outlive us.
void* open_library(const std::string& path) { return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND); }

template <typename Function>
bool find(void* handle, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(handle, name));
  return *function != nullptr;
}

bool find_version(void* handle, NcclLibrary* nccl) {
  return find(handle, "ncclGetVersion", &nccl->get_version) && nccl->get_version(&nccl->version) == kSuccess;
}

bool find_all(void* handle, NcclLibrary* nccl) {
  return find(handle, "ncclGetErrorString", &nccl->get_error_string) &&
         find(handle, "ncclGetUniqueId", &nccl->get_unique_id) &&
         find(handle, "ncclCommInitRank", &nccl->comm_init_rank) &&
         find(handle, "ncclCommDestroy", &nccl->comm_destroy) && find(handle, "ncclCommAbort", &nccl->comm_abort) &&
         find(handle, "ncclMemAlloc", &nccl->mem_alloc) && find(handle, "ncclMemFree", &nccl->mem_free) &&
         find(handle, "ncclCommWindowRegister", &nccl->window_register) &&
         find(handle, "ncclCommWindowDeregister", &nccl->window_deregister) &&
         find(handle, "ncclGetLsaDevicePointer", &nccl->get_lsa_pointer) &&
         find(handle, "ncclTeamLsa", &nccl->team_lsa);
}

std::string dl_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "no reason given";
}

std::shared_ptr<const NcclLibrary> open_nccl(const std::string& path) {
  auto nccl = std::make_shared<NcclLibrary>();
  nccl->path = path;
  void* handle = open_library(path);
  EPBUF_CHECK(handle != nullptr, "NCCL cannot be opened: ", dl_error());
  EPBUF_CHECK(find_version(handle, nccl.get()), path, " is no NCCL: ncclGetVersion is missing or failed");
  EPBUF_CHECK(nccl->version >= kMinVersion, path, " is NCCL ", nccl->version, "; need at least ", kMinVersion,
              ": install the extra cu12 or cu13 of epbuf, or name a newer one in EPBUF_NCCL_LIBRARY");
  EPBUF_CHECK(find_all(handle, nccl.get()), path, " (NCCL ", nccl->version, ") lacks a function: ", dl_error());
  return nccl;
}

}  // namespace

int nccl_version(const std::string& path) {
  NcclLibrary nccl;
  void* handle = open_library(path);
  return handle != nullptr && find_version(handle, &nccl) ? nccl.version : 0;
}

std::string nccl_in_process() {
  void* handle = dlopen(kSoname, RTLD_LAZY | RTLD_NOLOAD);
  void* symbol = handle != nullptr ? dlsym(handle, "ncclGetVersion") : nullptr;
  Dl_info info{};
  return symbol != nullptr && dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

std::string NcclWindow::make_unique_id(const std::string& library) {
  const auto nccl = open_nccl(library);
  UniqueId id;
  nccl->check(nccl->get_unique_id(&id), "ncclGetUniqueId");
  return std::string(id.bytes, sizeof id.bytes);
}

NcclWindow::NcclWindow(const std::string& library, const std::string& unique_id, int rank, int num_ranks,
                       std::size_t num_bytes)
    : nccl_(open_nccl(library)), num_bytes_(num_bytes) {
  EPBUF_CHECK(unique_id.size() == kUniqueIdBytes, "unique_id has ", unique_id.size(), " bytes, need ", kUniqueIdBytes);
  EPBUF_CHECK(num_bytes > 0, "a window of 0 bytes was asked for");
  check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
  try {
    open(unique_id, rank, num_ranks);
    register_memory(rank, num_ranks);
    find_peers(num_ranks);
  } catch (...) {
    // The other ranks may not have come this far, so nothing collective: abort instead of destroy.
    if (comm_ != nullptr) nccl_->comm_abort(comm_);
    if (memory_ != nullptr) nccl_->mem_free(memory_);
    throw;
  }
}

NcclWindow::~NcclWindow() {
  if (comm_ == nullptr && memory_ != nullptr) nccl_->mem_free(memory_);
}

void NcclWindow::open(const std::string& unique_id, int rank, int num_ranks) {
  UniqueId id;
  std::memcpy(id.bytes, unique_id.data(), sizeof id.bytes);
  nccl_->check(nccl_->comm_init_rank(&comm_, num_ranks, id, rank), "ncclCommInitRank");
  nccl_->check(nccl_->mem_alloc(&memory_, num_bytes_), "ncclMemAlloc");
}

void NcclWindow::register_memory(int rank, int num_ranks) {
  nccl_->check(nccl_->window_register(comm_, memory_, num_bytes_, &window_, kWinCollSymmetric),
               "ncclCommWindowRegister");
  const Team team = nccl_->team_lsa(comm_);
  EPBUF_CHECK(team.num_ranks == num_ranks && team.rank == rank, "only ", team.num_ranks, " of ", num_ranks,
              " ranks reach each other's memory by load and store; a window needs all of them in one NVLink domain");
  EPBUF_CHECK(window_ != nullptr,
              "ncclCommWindowRegister answered success and no window: the communicator has no symmetric memory. Check "
              "peer access between all GPUs (nvidia-smi topo -p2p r), and that neither NCCL_WIN_ENABLE nor "
              "NCCL_CUMEM_ENABLE is 0");
}

void NcclWindow::find_peers(int num_ranks) {
  for (int peer = 0; peer < num_ranks; ++peer) {
    void* pointer = nullptr;
    nccl_->check(nccl_->get_lsa_pointer(window_, 0, peer, &pointer), "ncclGetLsaDevicePointer");
    EPBUF_CHECK(pointer != nullptr, "ncclGetLsaDevicePointer gave no address of rank ", peer);
    peers_.push_back(reinterpret_cast<std::uint64_t>(pointer));
  }
}

void NcclWindow::deregister() {
  if (comm_ == nullptr) return;
  const DeviceGuard guard(device_);
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  nccl_->check(nccl_->window_deregister(comm_, window_), "ncclCommWindowDeregister");
  nccl_->check(nccl_->comm_destroy(comm_), "ncclCommDestroy");
  comm_ = nullptr;
}

}  // namespace epbuf
