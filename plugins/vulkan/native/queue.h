// Submissions: command buffers, and waiting for them by a timeline semaphore.
#pragma once

#include <functional>

#include "context.h"

namespace qv {

class Queue {
 public:
  Queue(Context& context, uint32_t flags);  // flags of qv_open
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  VkCommandBuffer allocate();
  void free(VkCommandBuffer commands);

  // Runs recorded commands and waits for their end.
  void run(VkCommandBuffer commands);
  // Records and runs commands that are needed once.
  void once(const std::function<void(VkCommandBuffer)>& record);

  uint64_t submissions() const { return value_; }
  void lose_next() { lose_next_ = true; }

 private:
  void wait();
  void release();

  Context& context_;
  VkCommandPool pool_ = VK_NULL_HANDLE;
  VkSemaphore timeline_ = VK_NULL_HANDLE;
  VkCommandBuffer once_ = VK_NULL_HANDLE;
  uint64_t value_ = 0;
  bool spin_ = false, lose_next_ = false;
};

// Everything before it in the queue is complete and visible to everything after it; `host`: to the host as well.
void barrier(const DeviceFunctions& vk, VkCommandBuffer commands, bool host = false);

}  // namespace qv
