// Device memory: few allocations of the driver, each one buffer, cut into ranges that callers hold.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "context.h"

namespace qv {

enum class Use {
  kDevice,    // read by kernels again and again
  kUpload,    // written by the host, read by kernels once
  kDownload,  // written by kernels once, read by the host
};

// Whether Use::kUpload gets memory that the device reads as fast as its own.
bool uploads_are_local(const Physical& device);

// One allocation of the driver with the buffer that covers it.
class Block {
 public:
  Block(Context& context, uint64_t bytes, Use use);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  const uint64_t bytes;
  VkBuffer buffer = VK_NULL_HANDLE;
  char* mapped = nullptr;  // null if the host cannot see it

 private:
  friend class Pool;
  bool empty() const { return holes_.size() == 1 && holes_.begin()->second == bytes; }
  void take(uint32_t allowed, Use use, uint64_t size);
  void release();

  Context& context_;
  VkDeviceMemory memory_ = VK_NULL_HANDLE;
  std::map<uint64_t, uint64_t> holes_;  // free ranges: offset -> bytes
};

// A range of device memory; gives itself back when the last holder lets go.
class Pool;
struct Range {
  Range(Pool& pool, Block& block, uint64_t offset, uint64_t bytes, uint64_t reserved)
      : pool(pool), block(block), offset(offset), bytes(bytes), reserved(reserved) {}
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  char* mapped() const { return block.mapped ? block.mapped + offset : nullptr; }

  Pool& pool;
  Block& block;
  const uint64_t offset, bytes, reserved;
};

// Ranges with 256-byte alignment out of blocks that grow with what is held; large ranges get a block of their own.
class Pool {
 public:
  explicit Pool(Context& context) : context_(context) {}

  std::shared_ptr<Range> allocate(uint64_t bytes);
  uint64_t pooled() const { return pooled_; }  // bytes taken from the driver
  void trim();                                 // gives back blocks that nothing is in

 private:
  friend struct Range;
  Block& grow(uint64_t reserved);
  void release(Block& block, uint64_t offset, uint64_t reserved);
  void drop_spare(const Block& block);

  Context& context_;
  std::vector<std::unique_ptr<Block>> blocks_;
  uint64_t pooled_ = 0;
};

}  // namespace qv
