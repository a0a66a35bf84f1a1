// Tile registers (AMX): eight of them, each up to 16 rows of 64 bytes, and products of whole tiles.
//
// Written as assembler and not with the compiler's intrinsics, which in gcc 12 do not say that they read and write
// memory. With QC_EMULATE_AMX the same functions are plain loops, so that what is built on them can be tested anywhere.
#pragma once
#include <stdlib.h>

#include "simd.h"

#if QC_TILES
namespace quire {
namespace QC_ISA {

// As the instruction reads it: bytes of a row and rows of each tile, 8 of 16 in use.
struct TileShapes {
  uint8_t palette = 1, start = 0, none[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int num_rows, int num_bytes) { rows[tile] = uint8_t(num_rows), bytes[tile] = uint16_t(num_bytes); }
};
static_assert(sizeof(TileShapes) == 64);

#if defined(QC_EMULATE_AMX)

struct TileState {
  TileShapes shapes;
  uint8_t data[8][16][64];
};
inline TileState& tile_state() {
  static thread_local TileState state;
  return state;
}
inline void configure(const TileShapes& shapes) { tile_state().shapes = shapes; }
inline void release() { tile_state().shapes = TileShapes(); }

template <int T>
void tile_zero() { memset(tile_state().data[T], 0, sizeof tile_state().data[T]); }
template <int T>
void tile_load(const void* from, int64_t stride) {
  TileState& s = tile_state();
  tile_zero<T>();
  for (int r = 0; r < s.shapes.rows[T]; ++r)
    memcpy(s.data[T][r], static_cast<const char*>(from) + r * stride, s.shapes.bytes[T]);
}
template <int T>
void tile_store(void* to, int64_t stride) {
  TileState& s = tile_state();
  for (int r = 0; r < s.shapes.rows[T]; ++r)
    memcpy(static_cast<char*>(to) + r * stride, s.data[T][r], s.shapes.bytes[T]);
}
inline void must_fit(const TileShapes& s, int c, int a, int b) {  // or the instruction faults
  const bool fits = s.rows[c] && s.rows[c] == s.rows[a] && s.bytes[c] == s.bytes[b] && s.bytes[a] == 4 * s.rows[b];
  if (!fits || s.bytes[c] > 64 || s.bytes[a] > 64 || s.rows[c] > 16) abort();
}
template <int C, int A, int B>
void tile_dot_bfloats() {
  TileState& s = tile_state();
  must_fit(s.shapes, C, A, B);
  float left[16][32] = {}, even[16][16] = {}, odd[16][16] = {};  // numbers of A, and of B by their place in a pair
  auto number = [&](int tile, int row, int at) {
    uint16_t bits;
    memcpy(&bits, s.data[tile][row] + 2 * at, 2);
    return bfloat_to_float(bits);
  };
  for (int m = 0; m < s.shapes.rows[A]; ++m)
    for (int k = 0; k < s.shapes.bytes[A] / 2; ++k) left[m][k] = number(A, m, k);
  for (int k = 0; k < s.shapes.rows[B]; ++k)
    for (int n = 0; n < s.shapes.bytes[B] / 4; ++n) even[k][n] = number(B, k, 2 * n), odd[k][n] = number(B, k, 2 * n + 1);
  for (int m = 0; m < s.shapes.rows[C]; ++m) {
    float first[16] = {}, second[16] = {};
    for (int k = 0; k < s.shapes.rows[B]; ++k)
      for (int n = 0; n < 16; ++n) first[n] += left[m][2 * k] * even[k][n], second[n] += left[m][2 * k + 1] * odd[k][n];
    for (int n = 0; n < s.shapes.bytes[C] / 4; ++n) {
      float sum;
      memcpy(&sum, s.data[C][m] + 4 * n, 4);
      sum += first[n] + second[n];
      memcpy(s.data[C][m] + 4 * n, &sum, 4);
    }
  }
}

#else

inline void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
inline void release() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
inline void tile_dot_bfloats() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }

#endif

// Tiles in use by this thread as long as this lives; the system need not keep them for the thread afterwards.
struct Tiles {
  explicit Tiles(const TileShapes& shapes) { configure(shapes); }
  ~Tiles() { release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace QC_ISA
}  // namespace quire
#endif
