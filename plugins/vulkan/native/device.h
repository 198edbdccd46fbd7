// One open device: its memory, pipelines and programs. Not thread safe: the C interface holds a lock around every call,
// and every submission has ended before that lock is let go.
#pragma once

#include <chrono>
#include <unordered_map>

#include "memory.h"
#include "pipelines.h"
#include "qcore_vulkan.h"
#include "queue.h"

namespace qv {

class Program;

// Memory that all programs of a device share, one run at a time. Grows, and shrinks if nobody has needed its size for
// a while; whatever recorded its address looks at `moves`.
class Region {
 public:
  using Clock = std::chrono::steady_clock;

  Region(Context& context, Use use) : context_(context), use_(use) {}

  void ensure(uint64_t bytes);
  void shrink(uint64_t bytes);  // to what a run needs, if this is less than all for long
  void drop();
  void pretend_idle() { needed_ = Clock::time_point(); }
  const Block& block() const { return *block_; }
  uint64_t bytes() const { return block_ ? block_->bytes : 0; }
  uint64_t moves() const { return moves_; }

 private:
  Context& context_;
  const Use use_;
  std::unique_ptr<Block> block_;
  Clock::time_point needed_;  // when a run last needed all of it
  uint64_t moves_ = 0;
};

class Device {
 public:
  Device(Instance& instance, VkPhysicalDevice handle, const std::string& cache_folder, uint32_t flags);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  uint64_t allocate(uint64_t bytes, bool unwritten);
  void free(uint64_t buffer);
  void write(uint64_t buffer, uint64_t offset, const char* data, uint64_t bytes);
  void read(uint64_t buffer, uint64_t offset, char* data, uint64_t bytes);
  const std::shared_ptr<Range>& find(uint64_t buffer) const;

  Program* add(std::unique_ptr<Program> program);
  void remove(Program* program);
  void drop_shared();
  void give_back();  // whatever no buffer is in
  void pretend_idle();

  void stats(uint64_t* values, uint32_t count) const;
  Region& region(uint64_t buffer);  // QV_ARENA, QV_INPUT or QV_OUTPUT

 private:
  std::shared_ptr<Range> within(uint64_t buffer, uint64_t offset, uint64_t bytes) const;
  void copy(VkBuffer from, uint64_t from_offset, VkBuffer to, uint64_t to_offset, uint64_t bytes);
  void trim();

 public:  // in the order in which they must end
  Context context;
  Queue queue;
  Pipelines pipelines;

 private:
  Pool pool_;
  Region arena_{context, Use::kDevice}, input_{context, Use::kUpload}, output_{context, Use::kDownload};
  std::unordered_map<uint64_t, std::shared_ptr<Range>> buffers_;
  std::unordered_map<Program*, std::unique_ptr<Program>> programs_;
  uint64_t next_ = QV_FIRST_BUFFER, alive_ = 0;
  const uint64_t messages_;  // of the validation layer, before this device was opened
};

}  // namespace qv
