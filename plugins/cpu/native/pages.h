// Huge pages under packed weights: a product of few rows reads its whole weight once, and with pages of 4 KiB a third of that
// time went to translating addresses in the virtual machine that it was measured in, whose page tables are nested.
#pragma once
#include <cstdint>

namespace qcore_cpu {

// Ask for huge pages under memory that nothing has been written to yet. Hints: what the system refuses stays as it is.
void want_huge_pages(void* at, int64_t bytes);

// The same for memory that has been written: its pages are copied to huge ones, where Linux can (6.1 and newer).
void make_huge_pages(const void* at, int64_t bytes);

}  // namespace qcore_cpu
