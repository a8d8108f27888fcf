// The one table of the process: handle -> object. Ops can carry only tensors and numbers, so an arena crosses as one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace epbuf {

constexpr std::uint32_t kHandleIndexBits = 16;
constexpr std::uint32_t kHandleIndexMask = 0xFFFF;

// A handle is a slot's index and the generation of its content, so that one kept too long is told from its successor's.
// Generations start at 1: no handle is 0. Not thread safe: the bindings hold the GIL.
template <typename Object>
class HandleTable {
 public:
  // 0 when all 65536 slots are taken.
  std::uint32_t put(Object object) {
    const std::size_t index = free_index();
    if (index > kHandleIndexMask) return 0;
    slots_[index].object = std::move(object);
    slots_[index].taken = true;
    return static_cast<std::uint32_t>(slots_[index].generation) << kHandleIndexBits | static_cast<std::uint32_t>(index);
  }

  // nullptr when the handle was dropped or never given.
  const Object* find(std::int64_t handle) const {
    const std::size_t index = static_cast<std::size_t>(handle & kHandleIndexMask);
    if (handle < 0 || index >= slots_.size()) return nullptr;
    const Slot& slot = slots_[index];
    return slot.taken && slot.generation == handle >> kHandleIndexBits ? &slot.object : nullptr;
  }

  // Whether there was something to drop. The object leaves the table before it dies: its destructor may come back here.
  bool drop(std::int64_t handle) {
    if (find(handle) == nullptr) return false;
    Slot& slot = slots_[static_cast<std::size_t>(handle & kHandleIndexMask)];
    slot.taken = false;
    slot.generation = slot.generation == kHandleIndexMask ? 1 : static_cast<std::uint16_t>(slot.generation + 1);
    const Object last = std::exchange(slot.object, Object());
    return true;
  }

  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Slot& slot : slots_) {
      if (slot.taken) visit(slot.object);
    }
  }

 private:
  struct Slot {
    Object object{};
    std::uint16_t generation = 1;
    bool taken = false;
  };

  // Of a slot that is free, after making one if need be; past the last index when there can be none.
  std::size_t free_index() {
    const auto slot = std::find_if(slots_.begin(), slots_.end(), [](const Slot& s) { return !s.taken; });
    const auto index = static_cast<std::size_t>(slot - slots_.begin());
    if (slot == slots_.end() && index <= kHandleIndexMask) slots_.emplace_back();
    return index;
  }

  std::vector<Slot> slots_;
};

}  // namespace epbuf
