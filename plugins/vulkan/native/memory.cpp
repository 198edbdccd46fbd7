#include "memory.h"

#include <algorithm>
#include <fstream>

#include "error.h"
#include "qcore_vulkan.h"

namespace qv {
namespace {

constexpr uint64_t kAlign = 256;  // the largest minStorageBufferOffsetAlignment that Vulkan allows
constexpr uint64_t kSmallBlock = uint64_t{4} << 20;
constexpr uint64_t kLargeBlock = uint64_t{64} << 20;
constexpr uint64_t kWideWindow = uint64_t{1} << 30;  // of device memory that the host sees: more than a 256 MiB BAR

constexpr VkMemoryPropertyFlags kLocal = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
constexpr VkMemoryPropertyFlags kShared = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
constexpr VkMemoryPropertyFlags kCached = VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
constexpr VkMemoryPropertyFlags kPlain = kLocal | kShared | kCached;  // others (protected, lazy) are not for us

bool behind_a_bus(const Physical& device) {
  return device.properties.properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU;
}

// How well a memory type fits; negative if it does not.
int score(const Physical& device, const VkMemoryType& type, Use use) {
  VkMemoryPropertyFlags flags = type.propertyFlags;
  bool local = flags & kLocal, shared = (flags & kShared) == kShared, cached = flags & kCached;
  bool bus = behind_a_bus(device);
  if (flags & ~kPlain) return -1;
  switch (use) {
    case Use::kDevice:
      if (!local) return -1;
      return bus ? !shared : 2 * shared + cached;
    case Use::kUpload:  // over the bus: the host's writes are combined and cheap, the device's reads are not
      if (!shared) return -1;
      return bus && local && device.memory.memoryHeaps[type.heapIndex].size < kWideWindow ? 0 : 1 + 2 * local;
    case Use::kDownload:  // over the bus: the host's reads of uncached memory are slow
      if (!shared) return -1;
      return 4 * cached + (local != bus);
  }
  return -1;
}

// Types that the buffer allows and the use needs, the best first.
std::vector<uint32_t> candidates(const Physical& device, uint32_t allowed, Use use) {
  std::vector<std::pair<int, uint32_t>> found;
  for (uint32_t type = 0; type < device.memory.memoryTypeCount; ++type) {
    int points = score(device, device.memory.memoryTypes[type], use);
    if (points >= 0 && (allowed >> type & 1)) found.emplace_back(-points, type);
  }
  std::stable_sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.first < b.first; });
  std::vector<uint32_t> types;
  for (auto& [points, type] : found) types.push_back(type);
  return types;
}

// Bytes of main memory that the system could give, by Linux's own estimate.
uint64_t available_memory() {
  std::ifstream lines("/proc/meminfo");
  for (std::string word; lines >> word;) {
    uint64_t kibibytes;
    if (word == "MemAvailable:" && lines >> kibibytes) return kibibytes << 10;
  }
  return UINT64_MAX;
}

// CPU devices hand out more than the machine has, and the process is killed later: refuse in time.
uint64_t most_bytes(const Physical& device) {
  uint64_t most = device.properties11.maxMemoryAllocationSize;
  if (device.properties13.maxBufferSize) most = std::min(most, uint64_t{device.properties13.maxBufferSize});
  if (device.properties.properties.deviceType != VK_PHYSICAL_DEVICE_TYPE_CPU) return most;
  return std::min(most, available_memory());
}

// Stays as it is if it would wrap around: no device has that much.
uint64_t aligned(uint64_t bytes) {
  return bytes > UINT64_MAX - kAlign ? bytes : (bytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

bool uploads_are_local(const Physical& device) {
  const std::vector<uint32_t> types = candidates(device, UINT32_MAX, Use::kUpload);
  return !types.empty() && device.memory.memoryTypes[types[0]].propertyFlags & kLocal;
}

Block::Block(Context& context, uint64_t bytes, Use use) : bytes(bytes), context_(context) {
  const uint64_t most = most_bytes(*context.physical);
  if (bytes > most) {
    throw Error(QV_OUT_OF_MEMORY, "out of device memory: " + std::to_string(bytes) + " bytes in one piece, at most " +
                                      std::to_string(most) + " are possible");
  }
  VkBufferCreateInfo info{VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO};
  info.size = bytes;
  info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT;
  try {
    check(context.vk.vkCreateBuffer(context.device, &info, nullptr, &buffer), "vkCreateBuffer");
    VkMemoryRequirements needs;
    context.vk.vkGetBufferMemoryRequirements(context.device, buffer, &needs);
    take(needs.memoryTypeBits, use, needs.size);
    check(context.vk.vkBindBufferMemory(context.device, buffer, memory_, 0), "vkBindBufferMemory");
  } catch (...) {
    release();
    throw;
  }
}

Block::~Block() { release(); }

void Block::release() {
  if (buffer) context_.vk.vkDestroyBuffer(context_.device, buffer, nullptr);
  if (memory_) context_.vk.vkFreeMemory(context_.device, memory_, nullptr);  // unmaps
}

void Block::take(uint32_t allowed, Use use, uint64_t size) {
  VkResult result = VK_ERROR_FEATURE_NOT_PRESENT;
  for (uint32_t type : candidates(*context_.physical, allowed, use)) {
    VkMemoryAllocateInfo info{VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO};
    info.allocationSize = size;
    info.memoryTypeIndex = type;
    result = context_.vk.vkAllocateMemory(context_.device, &info, nullptr, &memory_);
    if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY) continue;  // another heap may have room
    check(result, "vkAllocateMemory");
    if ((context_.physical->memory.memoryTypes[type].propertyFlags & kShared) != kShared) return;
    void* address = nullptr;
    check(context_.vk.vkMapMemory(context_.device, memory_, 0, VK_WHOLE_SIZE, 0, &address), "vkMapMemory");
    mapped = static_cast<char*>(address);
    return;
  }
  if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY) {
    throw Error(QV_OUT_OF_MEMORY, "out of device memory: " + std::to_string(size) + " bytes");
  }
  check(result, "choosing a memory type");
}

Range::~Range() { pool.release(block, offset, reserved); }

std::shared_ptr<Range> Pool::allocate(uint64_t bytes) {
  const uint64_t reserved = aligned(bytes);
  Block* best = nullptr;
  std::map<uint64_t, uint64_t>::iterator hole;
  for (auto& block : blocks_) {  // the smallest hole that fits
    for (auto it = block->holes_.begin(); it != block->holes_.end(); ++it) {
      if (it->second >= reserved && (!best || it->second < hole->second)) best = block.get(), hole = it;
    }
  }
  if (!best) {
    best = &grow(reserved);
    hole = best->holes_.begin();
  }
  auto range = std::make_shared<Range>(*this, *best, hole->first, bytes, reserved);
  const uint64_t rest = hole->second - reserved;
  best->holes_.erase(hole);
  if (rest) best->holes_.emplace(range->offset + reserved, rest);
  return range;
}

Block& Pool::grow(uint64_t reserved) {
  const uint64_t shared = std::min(std::max(pooled_, kSmallBlock), kLargeBlock);
  const uint64_t bytes = reserved > shared / 2 ? reserved : shared;
  blocks_.push_back(nullptr);  // so that nothing fails once the driver has given memory
  try {
    auto block = std::make_unique<Block>(context_, bytes, Use::kDevice);
    block->holes_.emplace(0, bytes);
    blocks_.back() = std::move(block);
  } catch (...) {
    blocks_.pop_back();
    throw;
  }
  pooled_ += bytes;
  return *blocks_.back();
}

void Pool::release(Block& block, uint64_t offset, uint64_t reserved) {
  auto after = block.holes_.lower_bound(offset);
  if (after != block.holes_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      reserved += before->second;
      block.holes_.erase(before);
    }
  }
  if (after != block.holes_.end() && offset + reserved == after->first) {
    reserved += after->second;
    block.holes_.erase(after);
  }
  block.holes_.emplace(offset, reserved);
  if (reserved == block.bytes) drop_spare(block);
}

void Pool::trim() {
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    if (!(*block)->empty()) {
      ++block;
      continue;
    }
    pooled_ -= (*block)->bytes;
    block = blocks_.erase(block);
  }
}

// One empty block of ordinary size stays, so that a buffer made and freed in turn does not ask the driver each time.
void Pool::drop_spare(const Block& block) {
  auto empty = [](const auto& other) { return other->empty(); };
  if (block.bytes <= kLargeBlock && std::count_if(blocks_.begin(), blocks_.end(), empty) == 1) return;
  pooled_ -= block.bytes;
  blocks_.erase(std::find_if(blocks_.begin(), blocks_.end(), [&](const auto& other) { return other.get() == &block; }));
}

}  // namespace qv
