// Steps that were recorded once and run many times.
#pragma once

#include "device.h"

namespace qv {

class Program {
 public:
  Program(Device& device, const qv_step* steps, uint32_t count, uint64_t arena, uint64_t input, uint64_t output,
          uint32_t flags);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Microseconds on the device; negative if the program has no timestamps.
  double run(const qv_copy* in, uint32_t n_in, const qv_copy* out, uint32_t n_out);
  // Microseconds of each of `count` steps in the last run of a program with QV_STEP_TIMES.
  void times(double* us, uint32_t count) const;
  uint64_t needs(uint64_t buffer) const { return sizes_[buffer]; }  // bytes of QV_ARENA, QV_INPUT, QV_OUTPUT

 private:
  struct Place {
    VkBuffer buffer;
    uint64_t offset;
  };

  void check_step(const qv_step& step) const;
  void check_dispatch(const qv_step& step) const;
  void check_range(const qv_range& range, uint64_t align, uint64_t most) const;
  void check_copy(const qv_copy& copy, uint64_t buffer) const;
  uint64_t size_of(uint64_t buffer) const;
  void hold(const qv_step& step);

  void refresh();
  void record();
  void record_step(const qv_step& step);
  void record_dispatch(const qv_step& step);
  Place place(const qv_range& range) const;
  void write_timestamp(uint32_t query);
  double elapsed() const;
  double microseconds(uint64_t from, uint64_t to) const;
  void release();

  Device& device_;
  const DeviceFunctions& vk_;
  const std::vector<qv_step> steps_;
  const uint64_t sizes_[4];                           // of QV_ARENA, QV_INPUT, QV_OUTPUT
  std::unordered_map<uint64_t, std::shared_ptr<Range>> held_;  // freed buffers stay until the program goes
  VkCommandBuffer commands_ = VK_NULL_HANDLE;
  VkQueryPool queries_ = VK_NULL_HANDLE;
  uint32_t queried_ = 0;  // timestamps: before the first step, and after the last or after each
  VkPipeline bound_ = VK_NULL_HANDLE;  // while recording
  uint64_t moves_[4] = {};             // of the regions when the commands were recorded
};

}  // namespace qv
