// An open logical device with its queue.
#pragma once

#include <memory>

#include "physical.h"

namespace qv {

class Context {
 public:
  Context(Instance& instance, VkPhysicalDevice handle);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Called before memory is taken: throws if a test asked for that.
  void allocating();

  // Of the subgroup sizes that compute shaders may ask for.
  bool can_require_subgroup(uint32_t size) const;

  const std::unique_ptr<Physical> physical;
  VkDevice device = VK_NULL_HANDLE;
  VkQueue queue = VK_NULL_HANDLE;
  uint32_t family = 0;
  DeviceFunctions vk;
  bool fail_next_allocation = false;

 private:
  void create();
  void load();
};

}  // namespace qv
