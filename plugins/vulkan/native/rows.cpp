#include "rows.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace qv {
namespace {

// One core fills 14 of the 50 GB/s of a PCIe 5 bus, four about 30 (H200); starting a thread costs as much as 1 MiB.
constexpr uint64_t kWorkers = 4, kShare = uint64_t{2} << 20;

uint64_t workers_for(uint64_t bytes) {
  if (bytes < 2 * kShare) return 1;  // most calls: they need not ask for the number of cores
  const uint64_t most = std::min(kWorkers, std::max<uint64_t>(1, std::thread::hardware_concurrency()));
  return std::min(bytes / kShare, most);
}

// Calls part(first, end) on shares of 0..count, each in a thread of its own, and waits for all.
template <class Part>
void in_shares(uint64_t count, uint64_t workers, const Part& part) {
  if (workers == 1) return part(0, count);
  const uint64_t share = (count + workers - 1) / workers;
  std::vector<std::thread> threads;
  threads.reserve(workers);
  uint64_t first = share;  // the first share is this thread's
  try {
    for (; first < count; first += share) threads.emplace_back(part, first, std::min(count, first + share));
  } catch (const std::system_error&) {  // no more threads to be had
    part(first, count);
  }
  part(0, std::min(count, share));
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

void copy_rows(char* to, uint64_t to_pitch, const char* from, uint64_t from_pitch, uint64_t rows, uint64_t bytes) {
  const uint64_t workers = workers_for(rows * bytes);
  if (rows == 1 || (to_pitch == bytes && from_pitch == bytes)) {
    in_shares(rows * bytes, workers,
              [=](uint64_t first, uint64_t end) { std::memcpy(to + first, from + first, end - first); });
    return;
  }
  in_shares(rows, workers, [=](uint64_t first, uint64_t end) {
    for (uint64_t row = first; row < end; ++row) std::memcpy(to + row * to_pitch, from + row * from_pitch, bytes);
  });
}

}  // namespace qv
