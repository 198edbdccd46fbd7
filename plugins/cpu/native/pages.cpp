#include "pages.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "host.h"

namespace qcore_cpu {
#ifdef __linux__
namespace {

constexpr uintptr_t SMALL_PAGE = 4096, HUGE_PAGE = 1 << 21;
constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, which older headers do not have
// A whole model of small layers is worth it, a layer of a test is not.
constexpr int64_t LEAST = 1 << 16;

constexpr uintptr_t down(uintptr_t at, uintptr_t page) { return at / page * page; }
constexpr uintptr_t up(uintptr_t at, uintptr_t page) { return down(at + page - 1, page); }

}  // namespace

// Only pages that the weight has for itself: others may belong to somebody who wants small ones.
void want_huge_pages(void* at, int64_t bytes) {
  const uintptr_t from = up(reinterpret_cast<uintptr_t>(at), SMALL_PAGE);
  const uintptr_t end = down(reinterpret_cast<uintptr_t>(at) + static_cast<uintptr_t>(bytes), SMALL_PAGE);
  if (bytes >= static_cast<int64_t>(HUGE_PAGE) && from < end) madvise(reinterpret_cast<void*>(from), end - from, MADV_HUGEPAGE);
}

// Neighbours in the same 2 MiB, often weights as well, come along: their contents stay. Ranges that are not all memory of
// one kind are left as they are by the system.
void make_huge_pages(const void* at, int64_t bytes) {
  if (bytes < LEAST) return;
  const uintptr_t from = reinterpret_cast<uintptr_t>(at), end = from + static_cast<uintptr_t>(bytes);
  for (uintptr_t page = down(from, HUGE_PAGE); page < end; page += HUGE_PAGE)
    madvise(reinterpret_cast<void*>(page), HUGE_PAGE, COLLAPSE);
}
#else
void want_huge_pages(void*, int64_t) {}
void make_huge_pages(const void*, int64_t) {}
#endif

}  // namespace qcore_cpu

// For ctypes: of tensors that Python has put together.
QCORE_EXPORT void qcore_cpu_make_huge_pages(const void* at, int64_t bytes) { qcore_cpu::make_huge_pages(at, bytes); }
