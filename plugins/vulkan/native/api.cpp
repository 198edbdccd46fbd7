// The C interface: locks, processes, and exceptions turned into codes.
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <new>

#include "device.h"
#include "error.h"
#include "program.h"

// Handles of devices are never deleted: whoever still holds one after qv_close finds it empty instead of gone.
struct qv_device {
  const pid_t owner = getpid();
  std::mutex mutex;
  bool lost = false;
  std::unique_ptr<qv::Device> open;
};

struct qv_recording {
  qv_device* device;
  qv::Program* body;  // owned by the device
};

namespace {

using qv::Device;
using qv::Error;

thread_local std::string last_message;

template <class Call>
int guarded(Call&& call) noexcept {
  try {
    call();
    return QV_OK;
  } catch (const Error& error) {
    last_message = error.what();
    return error.code;
  } catch (const std::bad_alloc&) {
    last_message = "out of main memory";
    return QV_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    last_message = error.what();
    return QV_ERROR;
  }
}

// Runs `call` on an open device, alone.
template <class Call>
int with(qv_device* device, Call&& call) noexcept {
  return guarded([&] {
    if (!device) throw Error(QV_INVALID, "no device");
    qv::check_process(device->owner);  // before the lock: another thread may have held it at the fork
    std::lock_guard<std::mutex> lock(device->mutex);
    if (device->lost) throw Error(QV_DEVICE_LOST, "the device was lost earlier; open it again");
    if (!device->open) throw Error(QV_INVALID, "the device is closed");
    try {
      call(*device->open);
    } catch (const Error& error) {
      device->lost = error.code == QV_DEVICE_LOST;
      if (device->lost) device->open.reset();  // what the driver still keeps of it may be needed to open it again
      throw;
    }
  });
}

}  // namespace

#define QV_EXPORT extern "C" __attribute__((visibility("default")))

QV_EXPORT uint32_t qv_abi(void) { return QV_ABI; }

QV_EXPORT const char* qv_message(void) { return last_message.c_str(); }

QV_EXPORT int qv_devices(char* json, uint64_t size, uint64_t* needed) {
  return guarded([&] {
    const std::string text = qv::describe_devices(qv::Instance::get(false));
    *needed = text.size() + 1;
    if (!json || !size) return;
    const uint64_t copied = std::min<uint64_t>(size - 1, text.size());
    std::memcpy(json, text.data(), copied);
    json[copied] = 0;
  });
}

QV_EXPORT int qv_open(uint32_t index, const char* cache_dir, uint32_t flags, qv_device** device) {
  return guarded([&] {
    qv::Instance& instance = qv::Instance::get(flags & QV_VALIDATE);
    const std::vector<VkPhysicalDevice> found = instance.devices();
    if (index >= found.size()) {
      throw Error(QV_UNAVAILABLE, "no device: " + std::to_string(index) + " of " + std::to_string(found.size()));
    }
    auto made = std::make_unique<qv_device>();
    made->open = std::make_unique<Device>(instance, found[index], cache_dir ? cache_dir : "", flags);
    *device = made.release();
  });
}

QV_EXPORT int qv_close(qv_device* device) {
  return guarded([&] {
    if (!device) return;
    qv::check_process(device->owner);
    std::lock_guard<std::mutex> lock(device->mutex);
    device->lost = false;
    device->open.reset();
  });
}

QV_EXPORT int qv_alloc(qv_device* device, uint64_t bytes, uint32_t flags, uint64_t* buffer) {
  return with(device, [&](Device& open) { *buffer = open.allocate(bytes, flags & QV_UNWRITTEN); });
}

QV_EXPORT int qv_free(qv_device* device, uint64_t buffer) {
  return with(device, [&](Device& open) { open.free(buffer); });
}

QV_EXPORT int qv_write(qv_device* device, uint64_t buffer, uint64_t offset, const void* data, uint64_t bytes) {
  return with(device, [&](Device& open) { open.write(buffer, offset, static_cast<const char*>(data), bytes); });
}

QV_EXPORT int qv_read(qv_device* device, uint64_t buffer, uint64_t offset, void* data, uint64_t bytes) {
  return with(device, [&](Device& open) { open.read(buffer, offset, static_cast<char*>(data), bytes); });
}

QV_EXPORT int qv_pipeline(qv_device* device, const uint32_t* spirv, uint64_t bytes, const uint32_t* constants,
                          uint32_t count, uint32_t subgroup, uint32_t* pipeline) {
  return with(device,
              [&](Device& open) { *pipeline = open.pipelines.add(spirv, bytes, constants, count, subgroup); });
}

QV_EXPORT int qv_program(qv_device* device, const qv_step* steps, uint32_t count, uint64_t arena, uint64_t input,
                         uint64_t output, uint32_t flags, qv_recording** program) {
  return with(device, [&](Device& open) {
    auto handle = std::make_unique<qv_recording>();
    handle->device = device;
    handle->body = open.add(std::make_unique<qv::Program>(open, steps, count, arena, input, output, flags));
    *program = handle.release();
  });
}

QV_EXPORT int qv_run(qv_recording* program, const qv_copy* in, uint32_t n_in, const qv_copy* out, uint32_t n_out,
                     double* gpu_us) {
  return with(program ? program->device : nullptr, [&](Device&) {
    const double elapsed = program->body->run(in, n_in, out, n_out);
    if (gpu_us) *gpu_us = elapsed;
  });
}

QV_EXPORT int qv_times(qv_recording* program, double* us, uint32_t count) {
  return with(program ? program->device : nullptr, [&](Device&) { program->body->times(us, count); });
}

QV_EXPORT int qv_program_free(qv_recording* program) {
  const int code = with(program ? program->device : nullptr, [&](Device& open) { open.remove(program->body); });
  delete program;  // what of it a closed or lost device had is freed with the device
  return code;
}

QV_EXPORT int qv_stats(qv_device* device, uint64_t* values, uint32_t count) {
  return with(device, [&](Device& open) { open.stats(values, count); });
}

QV_EXPORT int qv_trim(qv_device* device) {
  return with(device, [&](Device& open) { open.give_back(); });
}

QV_EXPORT int qv_inject(qv_device* device, uint32_t what) {
  return with(device, [&](Device& open) {
    if (what == QV_INJECT_LOST) open.queue.lose_next();
    if (what == QV_INJECT_OUT_OF_MEMORY) open.context.fail_next_allocation = true;
    if (what == QV_INJECT_IDLE) open.pretend_idle();
  });
}
