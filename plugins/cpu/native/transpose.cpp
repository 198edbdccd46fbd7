// Images between channels first and last: a copy of which both sides are read and written by whole cache lines. A copy along
// either side alone meets one line per element, and where an image is a power of two these share a few places of the cache.
#include "transpose.h"

#include <algorithm>
#include <cstring>

namespace qcore_cpu {
namespace {

constexpr int LINE = 64, VECTOR = 16;

template <class T>
using Lanes __attribute__((vector_size(VECTOR))) = T;

#if defined(__clang__) || __GNUC__ >= 12
#define QCORE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define QCORE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (decltype(a)){__VA_ARGS__})
#endif

using Words = Lanes<uint16_t>;
using Numbers = Lanes<uint32_t>;

inline Words low(Words a, Words b) { return QCORE_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline Words high(Words a, Words b) { return QCORE_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
inline Numbers low(Numbers a, Numbers b) { return QCORE_SHUFFLE(a, b, 0, 4, 1, 5); }
inline Numbers high(Numbers a, Numbers b) { return QCORE_SHUFFLE(a, b, 2, 6, 3, 7); }

// A square of SIDE rows and columns: each stage interleaves the elements of rows that are half the square apart.
template <class T, int SIDE = VECTOR / static_cast<int>(sizeof(T))>
inline void square(const T* from, int64_t stride, T* to, int64_t to_stride) {
  Lanes<T> a[SIDE], b[SIDE];
  for (int i = 0; i < SIDE; i++) std::memcpy(&a[i], from + i * stride, VECTOR);
  for (int stage = 1; stage < SIDE; stage *= 2) {
    for (int i = 0; i < SIDE / 2; i++) {
      b[2 * i] = low(a[i], a[i + SIDE / 2]);
      b[2 * i + 1] = high(a[i], a[i + SIDE / 2]);
    }
    std::copy(b, b + SIDE, a);
  }
  for (int i = 0; i < SIDE; i++) std::memcpy(to + i * to_stride, &a[i], VECTOR);
}

template <class T>
void tile(const T* x, T* y, int64_t rows, int64_t columns) {
  constexpr int SIZE = LINE / sizeof(T), SIDE = VECTOR / sizeof(T);
  // The tile as y has it, so that each of its lines is written once.
  alignas(LINE) T made[SIZE * SIZE];
  for (int r = 0; r < SIZE; r += SIDE)  // all of a line of x while it is near
    for (int c = 0; c < SIZE; c += SIDE) square<T>(x + r * columns + c, columns, made + c * SIZE + r, SIZE);
  for (int c = 0; c < SIZE; c++) std::memcpy(y + c * rows, made + c * SIZE, LINE);
}

template <class T>
void each_tile(const Pool& pool, const T* x, T* y, int64_t batch, int64_t rows, int64_t columns) {
  constexpr int64_t SIZE = LINE / sizeof(T);
  const int64_t down = (rows + SIZE - 1) / SIZE, across = (columns + SIZE - 1) / SIZE;
  // Tiles below each other in x are beside each other in y: a thread's lines of y follow each other.
  each(pool, batch * across * down, 32, [&](int64_t unit) {
    const int64_t image = unit / (across * down), rest = unit % (across * down);
    const int64_t r = rest % down * SIZE, c = rest / down * SIZE;
    const T* from = x + image * rows * columns + r * columns + c;
    T* to = y + image * rows * columns + c * rows + r;
    if (r + SIZE <= rows && c + SIZE <= columns) return tile(from, to, rows, columns);
    const int64_t height = std::min(SIZE, rows - r), width = std::min(SIZE, columns - c);
    for (int64_t i = 0; i < width; i++)
      for (int64_t j = 0; j < height; j++) to[i * rows + j] = from[j * columns + i];
  });
}

}  // namespace

void transpose(const Pool& pool, const void* x, void* y, int64_t batch, int64_t rows, int64_t columns, int64_t size) {
  if (size == 2) return each_tile(pool, static_cast<const uint16_t*>(x), static_cast<uint16_t*>(y), batch, rows, columns);
  each_tile(pool, static_cast<const uint32_t*>(x), static_cast<uint32_t*>(y), batch, rows, columns);
}

}  // namespace qcore_cpu
