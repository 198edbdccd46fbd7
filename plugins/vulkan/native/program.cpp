#include "program.h"

#include "error.h"
#include "rows.h"

namespace qv {
namespace {

constexpr uint64_t kRegions[] = {QV_ARENA, QV_INPUT, QV_OUTPUT};

[[noreturn]] void refuse(const std::string& text) { throw Error(QV_INVALID, text); }

}  // namespace

Program::Program(Device& device, const qv_step* steps, uint32_t count, uint64_t arena, uint64_t input, uint64_t output,
                 uint32_t flags)
    : device_(device), vk_(device.context.vk), steps_(steps, steps + count), sizes_{0, arena, input, output} {
  for (const qv_step& step : steps_) {
    check_step(step);
    hold(step);
  }
  try {
    commands_ = device_.queue.allocate();
    if (flags & (QV_TIMESTAMPS | QV_STEP_TIMES) && device.context.physical->timestamp_bits()) {
      VkQueryPoolCreateInfo info{VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO};
      info.queryType = VK_QUERY_TYPE_TIMESTAMP;
      info.queryCount = queried_ = flags & QV_STEP_TIMES ? count + 1 : 2;
      check(vk_.vkCreateQueryPool(device.context.device, &info, nullptr, &queries_), "vkCreateQueryPool");
    }
    for (uint64_t region : kRegions) device_.region(region).ensure(sizes_[region]);
    record();
  } catch (...) {
    release();
    throw;
  }
}

Program::~Program() { release(); }

void Program::release() {
  if (queries_) vk_.vkDestroyQueryPool(device_.context.device, queries_, nullptr);
  if (commands_) device_.queue.free(commands_);
}

void Program::hold(const qv_step& step) {
  for (uint32_t i = 0; i < step.bindings; ++i) {
    const uint64_t buffer = step.ranges[i].buffer;
    if (buffer >= QV_FIRST_BUFFER) held_.emplace(buffer, device_.find(buffer));
  }
}

void Program::check_step(const qv_step& step) const {
  const uint32_t most = device_.context.physical->bindings();
  if (step.bindings > most) refuse("a step with more than " + std::to_string(most) + " ranges");
  if (step.kind == QV_DISPATCH) return check_dispatch(step);
  if (step.kind > QV_FILL) refuse("no kind of step has the number " + std::to_string(step.kind));
  const uint32_t needed = step.kind == QV_COPY ? 2 : 1;
  if (step.bindings != needed) refuse("a copy names two ranges, a fill one");
  for (uint32_t i = 0; i < needed; ++i) check_range(step.ranges[i], 4, UINT64_MAX);
  if (step.kind == QV_COPY && step.ranges[0].bytes != step.ranges[1].bytes) refuse("a copy between ranges that differ");
}

void Program::check_dispatch(const qv_step& step) const {
  const VkPhysicalDeviceLimits& limits = device_.context.physical->limits();
  device_.pipelines.at(step.pipeline);
  if (step.push_bytes > kPushBytes || step.push_bytes % 4) refuse("push constants of more than 128 bytes, or no words");
  for (int axis = 0; axis < 3; ++axis) {
    if (step.groups[axis] > limits.maxComputeWorkGroupCount[axis]) {
      refuse(std::to_string(step.groups[axis]) + " workgroups along axis " + std::to_string(axis) +
             ", and the device takes " + std::to_string(limits.maxComputeWorkGroupCount[axis]));
    }
  }
  for (uint32_t i = 0; i < step.bindings; ++i) {
    if (step.ranges[i].buffer == QV_NONE) continue;
    check_range(step.ranges[i], limits.minStorageBufferOffsetAlignment, limits.maxStorageBufferRange);
  }
}

uint64_t Program::size_of(uint64_t buffer) const {
  if (buffer >= QV_FIRST_BUFFER) return device_.find(buffer)->bytes;
  if (buffer == QV_NONE || buffer > QV_OUTPUT) refuse("no buffer has the number " + std::to_string(buffer));
  return sizes_[buffer];
}

void Program::check_range(const qv_range& range, uint64_t align, uint64_t most) const {
  const uint64_t size = size_of(range.buffer);
  const std::string name = "the range of " + std::to_string(range.bytes) + " bytes at " + std::to_string(range.offset) +
                           " of buffer " + std::to_string(range.buffer);
  if (!range.bytes || range.bytes % 4) refuse(name + " is empty, or no words");
  if (range.offset > size || range.bytes > size - range.offset) refuse(name + " ends outside of it");
  if (range.offset % align) refuse(name + " does not start at a multiple of " + std::to_string(align));
  if (range.bytes > most) refuse(name + " is longer than the device's storage ranges, " + std::to_string(most));
}

void Program::refresh() {
  bool moved = false;
  for (uint64_t region : kRegions) {
    device_.region(region).shrink(sizes_[region]);
    device_.region(region).ensure(sizes_[region]);
    moved = moved || device_.region(region).moves() != moves_[region];
  }
  if (moved) record();
}

void Program::record() {
  for (uint64_t& moves : moves_) moves = UINT64_MAX;  // nothing valid is recorded until the end of this
  bound_ = VK_NULL_HANDLE;
  VkCommandBufferBeginInfo begin{VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
  check(vk_.vkBeginCommandBuffer(commands_, &begin), "vkBeginCommandBuffer");
  if (queries_) {
    vk_.vkCmdResetQueryPool(commands_, queries_, 0, queried_);
    vk_.vkCmdWriteTimestamp(commands_, VK_PIPELINE_STAGE_TOP_OF_PIPE_BIT, queries_, 0);
  }
  uint32_t done = 0;
  for (const qv_step& step : steps_) {
    if (done && !(step.flags & QV_NO_BARRIER)) barrier(vk_, commands_);
    record_step(step);
    // A timestamp waits for the steps before it: with one after each, steps without barriers run one by one.
    if (++done < queried_ && queried_ == steps_.size() + 1) write_timestamp(done);
  }
  if (queries_) write_timestamp(queried_ - 1);
  barrier(vk_, commands_, true);
  check(vk_.vkEndCommandBuffer(commands_), "vkEndCommandBuffer");
  for (uint64_t region : kRegions) moves_[region] = device_.region(region).moves();
}

void Program::record_step(const qv_step& step) {
  if (step.kind == QV_DISPATCH) return record_dispatch(step);
  const Place to = place(step.ranges[step.kind == QV_COPY]);
  if (step.kind == QV_FILL) {
    vk_.vkCmdFillBuffer(commands_, to.buffer, to.offset, step.ranges[0].bytes, step.push[0]);
    return;
  }
  const Place from = place(step.ranges[0]);
  const VkBufferCopy region{from.offset, to.offset, step.ranges[0].bytes};
  vk_.vkCmdCopyBuffer(commands_, from.buffer, to.buffer, 1, &region);
}

void Program::record_dispatch(const qv_step& step) {
  const VkPipeline pipeline = device_.pipelines.at(step.pipeline);
  const VkPipelineLayout layout = device_.pipelines.layout;
  if (pipeline != bound_) vk_.vkCmdBindPipeline(commands_, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline);
  bound_ = pipeline;
  if (step.push_bytes) {
    vk_.vkCmdPushConstants(commands_, layout, VK_SHADER_STAGE_COMPUTE_BIT, 0, step.push_bytes, step.push);
  }
  VkDescriptorBufferInfo buffers[kBindings];
  VkWriteDescriptorSet writes[kBindings];
  uint32_t count = 0;
  for (uint32_t i = 0; i < step.bindings; ++i) {
    if (step.ranges[i].buffer == QV_NONE) continue;
    const Place at = place(step.ranges[i]);
    buffers[count] = {at.buffer, at.offset, step.ranges[i].bytes};
    writes[count] = {VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET};
    writes[count].dstBinding = i;
    writes[count].descriptorCount = 1;
    writes[count].descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER;
    writes[count].pBufferInfo = &buffers[count];
    ++count;
  }
  if (count) {
    vk_.vkCmdPushDescriptorSetKHR(commands_, VK_PIPELINE_BIND_POINT_COMPUTE, layout, 0, count, writes);
  }
  vk_.vkCmdDispatch(commands_, step.groups[0], step.groups[1], step.groups[2]);
}

Program::Place Program::place(const qv_range& range) const {
  if (range.buffer < QV_FIRST_BUFFER) return {device_.region(range.buffer).block().buffer, range.offset};
  const Range& held = *held_.at(range.buffer);
  return {held.block.buffer, held.offset + range.offset};
}

void Program::check_copy(const qv_copy& copy, uint64_t buffer) const {
  const uint64_t size = sizes_[buffer];
  const bool fits = copy.row_bytes <= size && copy.offset <= size - copy.row_bytes &&
                    (copy.rows <= 1 || !copy.pitch ||
                     copy.rows - 1 <= (size - copy.row_bytes - copy.offset) / copy.pitch);
  if (!fits) refuse("rows outside of what the program uses of its staging memory");
  if (!copy.host && copy.rows && copy.row_bytes) refuse("rows without an address");
}

double Program::run(const qv_copy* in, uint32_t n_in, const qv_copy* out, uint32_t n_out) {
  for (uint32_t i = 0; i < n_in; ++i) check_copy(in[i], QV_INPUT);
  for (uint32_t i = 0; i < n_out; ++i) check_copy(out[i], QV_OUTPUT);
  refresh();
  for (const qv_copy* copy = in; copy != in + n_in; ++copy) {
    copy_rows(device_.region(QV_INPUT).block().mapped + copy->offset, copy->pitch, static_cast<char*>(copy->host),
              copy->host_pitch, copy->rows, copy->row_bytes);
  }
  device_.queue.run(commands_);
  for (const qv_copy* copy = out; copy != out + n_out; ++copy) {
    copy_rows(static_cast<char*>(copy->host), copy->host_pitch,
              device_.region(QV_OUTPUT).block().mapped + copy->offset, copy->pitch, copy->rows, copy->row_bytes);
  }
  return queries_ ? elapsed() : -1.0;
}

void Program::write_timestamp(uint32_t query) {
  vk_.vkCmdWriteTimestamp(commands_, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, queries_, query);
}

void Program::times(double* us, uint32_t count) const {
  if (!queries_) refuse("a program without timestamps");
  if (count + 1 != queried_) refuse("a program with another number of timestamps");
  std::vector<uint64_t> ticks(queried_);
  check(vk_.vkGetQueryPoolResults(device_.context.device, queries_, 0, queried_, 8 * ticks.size(), ticks.data(), 8,
                                  VK_QUERY_RESULT_64_BIT | VK_QUERY_RESULT_WAIT_BIT),
        "vkGetQueryPoolResults");
  for (uint32_t i = 0; i < count; ++i) us[i] = microseconds(ticks[i], ticks[i + 1]);
}

double Program::elapsed() const {
  uint64_t ticks[2];
  for (uint32_t i : {0u, 1u}) {
    check(vk_.vkGetQueryPoolResults(device_.context.device, queries_, i * (queried_ - 1), 1, 8, &ticks[i], 8,
                                    VK_QUERY_RESULT_64_BIT | VK_QUERY_RESULT_WAIT_BIT),
          "vkGetQueryPoolResults");
  }
  return microseconds(ticks[0], ticks[1]);
}

double Program::microseconds(uint64_t from, uint64_t to) const {
  const uint32_t bits = device_.context.physical->timestamp_bits();
  const uint64_t mask = bits >= 64 ? UINT64_MAX : (uint64_t{1} << bits) - 1;
  return double((to - from) & mask) * device_.context.physical->limits().timestampPeriod * 1e-3;
}

}  // namespace qv
