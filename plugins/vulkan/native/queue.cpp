#include "queue.h"

#include <chrono>

#include "error.h"
#include "qcore_vulkan.h"

namespace qv {
namespace {

using Clock = std::chrono::steady_clock;

// Work of layers ends within this time: asking again and again finds out 20 to 30 us sooner than being woken up (H200).
constexpr auto kSpin = std::chrono::milliseconds(1);

}  // namespace

void barrier(const DeviceFunctions& vk, VkCommandBuffer commands, bool host) {
  constexpr VkPipelineStageFlags kWork = VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT;
  constexpr VkAccessFlags kWrites = VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT;
  constexpr VkAccessFlags kReads = VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_TRANSFER_READ_BIT;
  VkMemoryBarrier memory{VK_STRUCTURE_TYPE_MEMORY_BARRIER};
  memory.srcAccessMask = kWrites;
  memory.dstAccessMask = kWrites | kReads | (host ? VK_ACCESS_HOST_READ_BIT : 0);
  vk.vkCmdPipelineBarrier(commands, kWork, kWork | (host ? VK_PIPELINE_STAGE_HOST_BIT : 0), 0, 1, &memory, 0, nullptr,
                          0, nullptr);
}

Queue::Queue(Context& context, uint32_t flags) : context_(context) {
  const auto type = context.physical->properties.properties.deviceType;
  spin_ = flags & QV_SPIN || (!(flags & QV_BLOCK) && type != VK_PHYSICAL_DEVICE_TYPE_CPU);
  VkCommandPoolCreateInfo pool{VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO};
  pool.flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT;
  pool.queueFamilyIndex = context.family;
  VkSemaphoreTypeCreateInfo type_info{VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO};
  type_info.semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE;
  VkSemaphoreCreateInfo semaphore{VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO};
  semaphore.pNext = &type_info;
  try {
    check(context.vk.vkCreateCommandPool(context.device, &pool, nullptr, &pool_), "vkCreateCommandPool");
    check(context.vk.vkCreateSemaphore(context.device, &semaphore, nullptr, &timeline_), "vkCreateSemaphore");
    once_ = allocate();
  } catch (...) {
    release();
    throw;
  }
}

Queue::~Queue() { release(); }

void Queue::release() {
  if (timeline_) context_.vk.vkDestroySemaphore(context_.device, timeline_, nullptr);
  if (pool_) context_.vk.vkDestroyCommandPool(context_.device, pool_, nullptr);
}

VkCommandBuffer Queue::allocate() {
  VkCommandBufferAllocateInfo info{VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO};
  info.commandPool = pool_;
  info.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
  info.commandBufferCount = 1;
  VkCommandBuffer commands;
  check(context_.vk.vkAllocateCommandBuffers(context_.device, &info, &commands), "vkAllocateCommandBuffers");
  return commands;
}

void Queue::free(VkCommandBuffer commands) { context_.vk.vkFreeCommandBuffers(context_.device, pool_, 1, &commands); }

void Queue::run(VkCommandBuffer commands) {
  if (lose_next_) throw Error(QV_DEVICE_LOST, "the device is lost: injected by a test");
  const uint64_t done = value_ + 1;
  VkTimelineSemaphoreSubmitInfo values{VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO};
  values.signalSemaphoreValueCount = 1;
  values.pSignalSemaphoreValues = &done;
  VkSubmitInfo info{VK_STRUCTURE_TYPE_SUBMIT_INFO};
  info.pNext = &values;
  info.commandBufferCount = 1;
  info.pCommandBuffers = &commands;
  info.signalSemaphoreCount = 1;
  info.pSignalSemaphores = &timeline_;
  check(context_.vk.vkQueueSubmit(context_.queue, 1, &info, VK_NULL_HANDLE), "vkQueueSubmit");
  value_ = done;
  wait();
}

void Queue::wait() {
  if (spin_) {
    const auto end = Clock::now() + kSpin;
    do {
      uint64_t reached = 0;
      check(context_.vk.vkGetSemaphoreCounterValue(context_.device, timeline_, &reached),
            "vkGetSemaphoreCounterValue");
      if (reached == UINT64_MAX) throw Error(QV_DEVICE_LOST, "the device is lost");
      if (reached >= value_) return;
    } while (Clock::now() < end);
  }
  VkSemaphoreWaitInfo info{VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO};
  info.semaphoreCount = 1;
  info.pSemaphores = &timeline_;
  info.pValues = &value_;
  check(context_.vk.vkWaitSemaphores(context_.device, &info, UINT64_MAX), "vkWaitSemaphores");
}

void Queue::once(const std::function<void(VkCommandBuffer)>& record) {
  VkCommandBufferBeginInfo begin{VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
  begin.flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT;
  check(context_.vk.vkBeginCommandBuffer(once_, &begin), "vkBeginCommandBuffer");  // resets it
  record(once_);
  barrier(context_.vk, once_, true);
  check(context_.vk.vkEndCommandBuffer(once_), "vkEndCommandBuffer");
  run(once_);
}

}  // namespace qv
