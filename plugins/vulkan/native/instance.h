// The Vulkan loader and the process's instances.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "functions.h"

namespace qv {

// An instance lives as long as the process: drivers keep threads and state that outlive vkDestroyInstance badly.
class Instance {
 public:
  // The instance with or without the validation layer, made at the first call of this process.
  static Instance& get(bool validate);

  std::vector<VkPhysicalDevice> devices() const;

  InstanceFunctions vk;
  std::atomic<uint64_t> messages{0};  // warnings and errors of the validation layer

 private:
  explicit Instance(bool validate);
  void load();
  void listen();

  VkInstance handle_ = VK_NULL_HANDLE;
  const pid_t owner_;
};

// Throws QV_FORKED unless this process is `owner`.
void check_process(pid_t owner);

}  // namespace qv
