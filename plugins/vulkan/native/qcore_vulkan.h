// The C interface of libqcore_vulkan: compute on Vulkan devices, made for ctypes.
//
// Every function returns QV_OK or a negative code; qv_message() then says what failed. Functions may be called from any
// thread; those on one device take turns. Sizes and offsets are bytes. A process that inherited a device by fork() gets
// QV_FORKED from every call and touches nothing.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define QV_ABI 4u  // raised whenever anything below changes its meaning

enum {
  QV_OK = 0,
  QV_ERROR = -1,          // a Vulkan call failed for another reason than those below
  QV_UNAVAILABLE = -2,    // no loader, no driver or no such device
  QV_OUT_OF_MEMORY = -3,  // nothing was allocated; the device goes on working
  QV_DEVICE_LOST = -4,    // close the device and open it again
  QV_FORKED = -5,         // the device was opened by another process
  QV_INVALID = -6,        // an argument is wrong: a defect of the caller
  QV_UNSUPPORTED = -7     // the device lacks what a shader or a call needs
};

// Buffers of a program that belong to the device rather than to the caller; those of qv_alloc follow.
enum { QV_NONE = 0, QV_ARENA = 1, QV_INPUT = 2, QV_OUTPUT = 3, QV_FIRST_BUFFER = 16 };

enum { QV_VALIDATE = 1, QV_BLOCK = 2, QV_SPIN = 4 };     // flags of qv_open; QV_BLOCK and QV_SPIN: how qv_run waits
enum { QV_DISPATCH = 0, QV_COPY = 1, QV_FILL = 2 };      // kinds of steps
enum { QV_NO_BARRIER = 1 };                              // flags of a step
enum { QV_TIMESTAMPS = 1, QV_STEP_TIMES = 2 };           // flags of a program: to measure the whole, or each step
enum { QV_UNWRITTEN = 1 };                               // flags of qv_alloc
enum { QV_INJECT_LOST = 1, QV_INJECT_OUT_OF_MEMORY = 2, QV_INJECT_IDLE = 4 };

typedef struct qv_device qv_device;
typedef struct qv_recording qv_recording;  // a program

typedef struct {
  uint64_t buffer, offset, bytes;
} qv_range;

// One step of a program. Everything before it is complete and visible to it, unless QV_NO_BARRIER is set.
typedef struct {
  uint32_t kind;                  // QV_DISPATCH; QV_COPY: ranges[0] -> ranges[1]; QV_FILL: ranges[0] with push[0]
  uint32_t pipeline;              // of qv_pipeline
  uint32_t groups[3];             // workgroups, within limits.max_groups
  uint32_t flags;
  uint32_t push_bytes, bindings;  // used lengths of the two arrays
  uint32_t push[32];
  qv_range ranges[12];            // set 0, bindings 0..11, within limits.storage_buffers
} qv_step;

// Rows of host memory and the rows of INPUT or OUTPUT that they are copied to or from. `host_pitch` and `pitch`: bytes
// from one row to the next.
typedef struct {
  void* host;
  uint64_t offset, rows, row_bytes, host_pitch, pitch;
} qv_copy;

uint32_t qv_abi(void);

// Text of this thread's last failure; valid until the next call of this thread.
const char* qv_message(void);

// The physical devices as a JSON list. Writes at most `size` bytes (with the final zero) and always sets `needed`.
int qv_devices(char* json, uint64_t size, uint64_t* needed);

// `index`: place in the list of qv_devices. `cache_dir`: folder of pipeline caches, NULL for none.
int qv_open(uint32_t index, const char* cache_dir, uint32_t flags, qv_device** device);

// Saves the pipeline cache and frees everything of the device. Whatever still names the device gets QV_INVALID.
int qv_close(qv_device* device);

// Memory on the device: zeros, or anything with QV_UNWRITTEN. A program keeps the buffers it names until it is freed.
int qv_alloc(qv_device* device, uint64_t bytes, uint32_t flags, uint64_t* buffer);
int qv_free(qv_device* device, uint64_t buffer);
int qv_write(qv_device* device, uint64_t buffer, uint64_t offset, const void* data, uint64_t bytes);
int qv_read(qv_device* device, uint64_t buffer, uint64_t offset, void* data, uint64_t bytes);

// Compiles a shader: storage buffers in set 0 at bindings 0..11, 128 bytes of push constants at most, entry "main".
// `constants`: specialization constants with ids 0..count-1. `subgroup`: required size, 0 for any.
// QV_UNSUPPORTED if the device or its compiler cannot do it.
int qv_pipeline(qv_device* device, const uint32_t* spirv, uint64_t bytes, const uint32_t* constants, uint32_t count,
                uint32_t subgroup, uint32_t* pipeline);

// Records steps once for many runs. `arena`, `input`, `output`: bytes that its steps use of the three shared buffers;
// their content does not outlive a run.
int qv_program(qv_device* device, const qv_step* steps, uint32_t count, uint64_t arena, uint64_t input, uint64_t output,
               uint32_t flags, qv_recording** program);

// Copies in, runs, waits, copies out. `gpu_us`: time on the device, negative if it was not measured; may be NULL.
int qv_run(qv_recording* program, const qv_copy* in, uint32_t n_in, const qv_copy* out, uint32_t n_out, double* gpu_us);

// Microseconds of each of the `count` steps in the last run of a program with QV_STEP_TIMES; such steps do not overlap.
// QV_INVALID if it has none, or no queue of the device measures time.
int qv_times(qv_recording* program, double* us, uint32_t count);
int qv_program_free(qv_recording* program);

// buffers alive, their bytes, bytes taken from the driver, programs, pipelines, submissions, validation messages.
int qv_stats(qv_device* device, uint64_t* values, uint32_t count);

// Gives back memory without buffers, and ARENA, INPUT and OUTPUT; the next run takes what it needs. Without this call
// those shrink if no run has needed their size for 10 seconds, and go with the last program and buffer.
int qv_trim(qv_device* device);

// For tests: what the next submission or allocation meets; IDLE: the next run finds that 10 seconds have passed.
int qv_inject(qv_device* device, uint32_t what);

#ifdef __cplusplus
}
#endif
