// Copies between host memory and memory that the device shares with it.
#pragma once

#include <cstdint>

namespace qv {

// Copies `rows` rows of `bytes` bytes; the pitches are bytes from one row to the next.
void copy_rows(char* to, uint64_t to_pitch, const char* from, uint64_t from_pitch, uint64_t rows, uint64_t bytes);

inline void copy_bytes(char* to, const char* from, uint64_t bytes) { copy_rows(to, bytes, from, bytes, 1, bytes); }

}  // namespace qv
