#include "device.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "program.h"
#include "rows.h"

namespace qv {
namespace {

constexpr uint64_t kLeastRegion = uint64_t{1} << 18;
constexpr uint64_t kStep = uint64_t{64} << 20;      // regions double up to this size, then grow by it
constexpr uint64_t kChunk = uint64_t{16} << 20;     // at most of staging for one copy of qv_write and qv_read
constexpr uint64_t kKeep = uint64_t{16} << 20;      // a region of this size stays though nothing needs it any more
constexpr auto kIdle = std::chrono::seconds(10);    // a larger one shrinks when no run has needed its size for so long
constexpr uint64_t kRegions[] = {QV_ARENA, QV_INPUT, QV_OUTPUT};

uint64_t rounded(uint64_t bytes) {
  if (bytes > UINT64_MAX - kStep) return bytes;
  if (bytes > kStep) return (bytes + kStep - 1) / kStep * kStep;
  uint64_t size = kLeastRegion;
  while (size < bytes) size *= 2;
  return size;
}

}  // namespace

void Region::ensure(uint64_t bytes) {
  if (bytes <= this->bytes()) return;
  needed_ = Clock::now();
  drop();  // before the new one is made: both might not fit
  context_.allocating();
  try {
    block_ = std::make_unique<Block>(context_, rounded(bytes), use_);
  } catch (const Error& error) {
    if (error.code != QV_OUT_OF_MEMORY || rounded(bytes) == bytes) throw;
    block_ = std::make_unique<Block>(context_, bytes, use_);
  }
}

void Region::shrink(uint64_t bytes) {
  if (this->bytes() <= kKeep) return;
  const auto now = Clock::now();
  if (rounded(bytes) >= this->bytes()) {
    needed_ = now;
  } else if (now - needed_ > kIdle) {
    drop();
    ensure(bytes);
  }
}

void Region::drop() {
  if (!block_) return;
  block_.reset();
  ++moves_;
}

Device::Device(Instance& instance, VkPhysicalDevice handle, const std::string& cache_folder, uint32_t flags)
    : context(instance, handle),
      queue(context, flags),
      pipelines(context, cache_folder),
      pool_(context),
      messages_(instance.messages) {}

Device::~Device() {
  context.vk.vkDeviceWaitIdle(context.device);  // a lost device may have been left in the middle of work
  pipelines.save();
}

uint64_t Device::allocate(uint64_t bytes, bool unwritten) {
  if (!bytes) throw Error(QV_INVALID, "a buffer of no bytes");
  context.allocating();
  std::shared_ptr<Range> range = pool_.allocate(bytes);
  if (!unwritten && range->mapped()) std::memset(range->mapped(), 0, bytes);
  if (!unwritten && !range->mapped()) {
    queue.once([&](VkCommandBuffer commands) {
      context.vk.vkCmdFillBuffer(commands, range->block.buffer, range->offset, range->reserved, 0);
    });
  }
  buffers_.emplace(next_, std::move(range));
  alive_ += bytes;
  return next_++;
}

const std::shared_ptr<Range>& Device::find(uint64_t buffer) const {
  auto found = buffers_.find(buffer);
  if (found == buffers_.end()) throw Error(QV_INVALID, "no buffer has the number " + std::to_string(buffer));
  return found->second;
}

void Device::free(uint64_t buffer) {
  alive_ -= find(buffer)->bytes;
  buffers_.erase(buffer);
  if (buffers_.empty() && programs_.empty()) drop_shared();
}

std::shared_ptr<Range> Device::within(uint64_t buffer, uint64_t offset, uint64_t bytes) const {
  const std::shared_ptr<Range>& range = find(buffer);
  if (offset > range->bytes || bytes > range->bytes - offset) {
    throw Error(QV_INVALID, "bytes outside of buffer " + std::to_string(buffer));
  }
  return range;
}

void Device::copy(VkBuffer from, uint64_t from_offset, VkBuffer to, uint64_t to_offset, uint64_t bytes) {
  const VkBufferCopy region{from_offset, to_offset, bytes};
  queue.once([&](VkCommandBuffer commands) { context.vk.vkCmdCopyBuffer(commands, from, to, 1, &region); });
}

void Device::write(uint64_t buffer, uint64_t offset, const char* data, uint64_t bytes) {
  const std::shared_ptr<Range> range = within(buffer, offset, bytes);
  if (range->mapped()) {
    copy_bytes(range->mapped() + offset, data, bytes);
    return;
  }
  input_.ensure(std::min(bytes, kChunk));
  const Block& staging = input_.block();
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t part = std::min(bytes - done, kChunk);
    copy_bytes(staging.mapped, data + done, part);
    copy(staging.buffer, 0, range->block.buffer, range->offset + offset + done, part);
    done += part;
  }
}

void Device::read(uint64_t buffer, uint64_t offset, char* data, uint64_t bytes) {
  const std::shared_ptr<Range> range = within(buffer, offset, bytes);
  if (range->mapped()) {
    copy_bytes(data, range->mapped() + offset, bytes);
    return;
  }
  output_.ensure(std::min(bytes, kChunk));
  const Block& staging = output_.block();
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t part = std::min(bytes - done, kChunk);
    copy(range->block.buffer, range->offset + offset + done, staging.buffer, 0, part);
    copy_bytes(data + done, staging.mapped, part);
    done += part;
  }
}

Region& Device::region(uint64_t buffer) {
  return buffer == QV_ARENA ? arena_ : buffer == QV_INPUT ? input_ : output_;
}

Program* Device::add(std::unique_ptr<Program> program) {
  Program* key = program.get();
  programs_.emplace(key, std::move(program));
  return key;
}

void Device::remove(Program* program) {
  programs_.erase(program);
  trim();
}

void Device::drop_shared() {
  for (uint64_t buffer : kRegions) region(buffer).drop();
}

void Device::give_back() {
  drop_shared();
  pool_.trim();
}

void Device::pretend_idle() {
  for (uint64_t buffer : kRegions) region(buffer).pretend_idle();
}

// Gives back large regions that no program needs any longer, and all with the last program and buffer.
void Device::trim() {
  if (buffers_.empty() && programs_.empty()) return drop_shared();
  for (uint64_t buffer : kRegions) {
    if (region(buffer).bytes() <= kKeep) continue;
    uint64_t needed = 0;
    for (const auto& [key, program] : programs_) needed = std::max(needed, program->needs(buffer));
    if (rounded(needed) < region(buffer).bytes()) region(buffer).drop();
  }
}

void Device::stats(uint64_t* values, uint32_t count) const {
  const uint64_t pooled = pool_.pooled() + arena_.bytes() + input_.bytes() + output_.bytes();
  const uint64_t messages = context.physical->instance.messages - messages_;
  const uint64_t all[] = {buffers_.size(),   alive_,  pooled, programs_.size(), pipelines.count(), queue.submissions(),
                          messages};
  for (uint32_t i = 0; i < count; ++i) values[i] = i < std::size(all) ? all[i] : 0;
}

}  // namespace qv
