// Products with tile registers.
//
// Packed weights: a block of a panel, unpacked to bytes, is a tile as it lies (8 quads x 16 columns), and 32 quantized
// numbers of 16 rows are another. Their sums are whole numbers, so that scaling them as tile() of packed.h does gives
// the same bits: how many rows a product has decides only which of the two is faster.
//
// Plain bfloat16: 16 rows of the weight are a tile as they lie, and the input is turned, so the weight needs no form of
// its own. Every product, of one row too, is made so: a result is summed by the same instruction in the same order
// (32 inputs at a time, from the first on) whatever stands beside it.
#pragma once
#include "dense.h"
#include "packed.h"
#include "tiles.h"
#include "turn.h"

#include <utility>

#if QC_TILES
namespace quire {
namespace QC_ISA {

#define QC_INLINE __attribute__((always_inline))

// body(0), body(1) ... body(N - 1) with constants: arrays of vectors that they index stay in registers, which after an
// instruction that touches memory they would not in a loop.
template <class F, int... I>
QC_INLINE inline void constants(std::integer_sequence<int, I...>, F&& body) {
  (body(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
QC_INLINE inline void constant_times(F&& body) {
  constants(std::make_integer_sequence<int, N>(), body);
}

#ifndef QC_SECOND_CACHE  // a test wants less
#define QC_SECOND_CACHE (1 << 20)
#endif
constexpr int64_t kSecondCache = QC_SECOND_CACHE;  // bytes of input that a core works on at a time

// `memory` grows where it must: what shrinks would be cleared when it grows again.
inline char* aligned(std::vector<char>& memory, int64_t bytes) {
  if (memory.size() < size_t(bytes + 64)) memory.resize(size_t(bytes + 64));
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

// ---- packed weights

typedef void (*WriteTile)(const Product& job, int64_t row, int64_t rows, int64_t column, int64_t count, const float* from);

// from [rows, 16].
template <int Dtype>
void write_tile(const Product& job, int64_t row, int64_t rows, int64_t column, int64_t count, const float* from) {
  for (int64_t r = 0; r < rows; ++r) write_columns<Dtype>(job, row + r, column, count, from + r * kPanel);
}

// A panel's numbers as signed bytes, 512 for each block.
template <int Kind>
void unpack_panel(const uint8_t* panel, int64_t blocks, uint8_t* to) {
  constexpr Form form = kForms[Kind];
  for (int64_t b = 0; b < blocks; ++b, panel += form.bytes(), to += 8 * kChunk) {
    const uint8_t *top = panel + form.scales(), *planes = top + form.top();
    if constexpr (form.bits == 8) {
      memcpy(to, planes, 8 * kChunk);
    } else {
      for (int half = 0; half < 2; ++half)
        for (int at = 0; at < kChunk; at += 4 * kLanes) {
          vb w[4];
          unpack<Kind>(planes + at, top + at, half, w);
          for (int i = 0; i < 4; ++i) {
            vb bytes = w[i] - (uint8_t)form.zero;
            memcpy(to + kChunk * (4 * half + i) + at, &bytes, sizeof bytes);
          }
        }
    }
  }
}

// One panel: packed (for its scales), and its bytes.
struct OpenPanel {
  const uint8_t *packed, *bytes;
  int64_t bytes_step;  // from block to block
};

inline TileShapes packed_shapes(bool halves) {  // tiles 0..3: sums; 4, 5: rows; 6, 7: weights
  TileShapes all;
  for (int i = 0; i < 4; ++i) all.set(i, 16, 64);
  for (int i = 4; i < 6; ++i) all.set(i, 16, halves ? kBlock / 2 : kBlock), all.set(i + 2, halves ? 4 : 8, 64);
  return all;
}

template <int Kind>
struct PackedTiles {
  static constexpr Form form = kForms[Kind];
  static constexpr int kHalves = form.halves ? 2 : 1, kVectors = kPanel / kLanes;
  typedef int32_t Found[kHalves][16][16];

  // Block b of a tile of rows; Odd blocks have tiles of their own, so that two are under way.
  template <int Odd>
  QC_INLINE static void multiply(const int8_t* q, const uint8_t* bytes, Found& found) {
    constexpr int first = 2 * Odd, second = first + kHalves - 1;
    tile_zero<first>();
    tile_load<4>(q, kBlock);
    tile_load<6>(bytes, kChunk);
    tile_dot_bytes<first, 4, 6>();
    if constexpr (form.halves) {
      tile_zero<second>();
      tile_load<5>(q + kBlock / 2, kBlock);
      tile_load<7>(bytes + 4 * kChunk, kChunk);
      tile_dot_bytes<second, 5, 7>();
      tile_store<second>(found[kHalves - 1], 64);
    }
    tile_store<first>(found[0], 64);
  }

  // Sums of block b, scaled, to R rows of the result.
  template <int R>
  QC_INLINE static void add(const Found& found, const uint8_t* packed, const float* step, const float* total,
                            vf (&out)[R][kVectors]) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(packed);
    constant_times<kVectors>([&](auto v) QC_INLINE {
      vf scale = load_half(scales + kLanes * v), second = scale;
      if (form.added || form.halves) second = load_half(scales + kPanel + kLanes * v);
      constant_times<R>([&](auto r) QC_INLINE {
        vf here = fma(to_floats(found[0][r] + kLanes * v), scale * fill(step[r]), out[r][v]);
        if (form.halves) here = fma(to_floats(found[kHalves - 1][r] + kLanes * v), second * fill(step[r]), here);
        if (form.added) here = fma(second, fill(total[r]), here);
        out[r][v] = here;
      });
    });
  }

  QC_INLINE static vf to_floats(const int32_t* from) {
    vi whole;
    memcpy(&whole, from, sizeof whole);
    return __builtin_convertvector(whole, vf);
  }

  // R of the 16 rows of tile `number`.
  template <int R>
  __attribute__((noinline)) static void rows(const Quantized& x, int64_t number, const OpenPanel& panel, float* to) {
    alignas(64) Found found[2];
    const int64_t blocks = x.k / kBlock, at = number * blocks * kTileRows;
    const int8_t* q = x.q + at * kBlock;
    const float *step = x.scale + at, *total = x.total + at;
    vf out[R][kVectors];
    constant_times<R * kVectors>([&](auto i) QC_INLINE { out[i / kVectors][i % kVectors] = fill(0); });
    auto begin = [&](auto odd, int64_t b) QC_INLINE {
      multiply<odd>(q + b * kTileRows * kBlock, panel.bytes + b * panel.bytes_step, found[odd]);
    };
    auto finish = [&](auto odd, int64_t b) QC_INLINE {
      add<R>(found[odd], panel.packed + b * form.bytes(), step + b * kTileRows, total + b * kTileRows, out);
    };
    constexpr std::integral_constant<int, 0> even;
    constexpr std::integral_constant<int, 1> odd;
    begin(even, 0);
    for (int64_t b = 0; b < blocks; b += 2) {
      if (b + 1 < blocks) begin(odd, b + 1);
      finish(even, b);
      if (b + 1 == blocks) break;
      if (b + 2 < blocks) begin(even, b + 2);
      finish(odd, b + 1);
    }
    constant_times<R * kVectors>([&](auto i) QC_INLINE { store(to + i * kLanes, out[i / kVectors][i % kVectors]); });
  }

  // Rows [from, to), from a multiple of 16, times one panel. Whoever calls has set the tiles' shapes.
  static void panel(const Product& job, WriteTile write, const uint8_t* packed, int64_t column, int64_t count, int64_t from, int64_t to) {
    static thread_local std::vector<char> memory;
    const int64_t blocks = job.x.k / kBlock;
    OpenPanel here = {packed, packed + form.scales() + form.top(), form.bytes()};
    if (form.bits < 8 || to - from > 32) {
      uint8_t* bytes = reinterpret_cast<uint8_t*>(aligned(memory, blocks * 8 * kChunk));
      unpack_panel<Kind>(packed, blocks, bytes);
      here.bytes = bytes, here.bytes_step = 8 * kChunk;
    }
    alignas(64) float found[16 * kPanel];
    for (int64_t row = from; row < to; row += 16) {
      const int64_t many = to - row < 16 ? to - row : 16;
      if (many > 8) rows<16>(job.x, row / 16, here, found);
      else rows<8>(job.x, row / 16, here, found);
      write(job, row, many, column, count < kPanel ? count : kPanel, found);
    }
  }
};

inline void tiled_panel(int64_t kind, const Product& job, WriteTile write, const uint8_t* panel, int64_t column,
                        int64_t count, int64_t from, int64_t to) {
  switch (kind) {
    case QC_Q4M: return PackedTiles<QC_Q4M>::panel(job, write, panel, column, count, from, to);
    case QC_Q4Z: return PackedTiles<QC_Q4Z>::panel(job, write, panel, column, count, from, to);
    case QC_Q5M: return PackedTiles<QC_Q5M>::panel(job, write, panel, column, count, from, to);
    case QC_Q5Z: return PackedTiles<QC_Q5Z>::panel(job, write, panel, column, count, from, to);
    case QC_Q6Z: return PackedTiles<QC_Q6Z>::panel(job, write, panel, column, count, from, to);
    case QC_Q8Z: return PackedTiles<QC_Q8Z>::panel(job, write, panel, column, count, from, to);
  }
}

// Rows [row, end) times panels [from, to) of all segments, counted through.
inline void tiled_panels(const Product& job, WriteTile write, int64_t from, int64_t to, int64_t row, int64_t end) {
  int64_t column = 0, before = 0;
  for (int64_t i = 0; i < job.num_segments; ++i) {
    const qc_segment& segment = job.segments[i];
    const int64_t panels = panels_of(segment), bytes = job.x.k / kBlock * kForms[segment.kind].bytes();
    if (before >= to || before + panels <= from) {
      column += segment.rows, before += panels;
      continue;
    }
    Tiles tiles(packed_shapes(kForms[segment.kind].halves));
    for (int64_t p = from > before ? from - before : 0; p < panels && before + p < to; ++p)
      tiled_panel(segment.kind, job, write, static_cast<const uint8_t*>(segment.data) + p * bytes, column + p * kPanel,
                  segment.rows - p * kPanel, row, end);
    column += segment.rows, before += panels;
  }
}

template <int Dtype>
void packed_by_tiles(const Product& job, int64_t panels) {
  int64_t tall = kSecondCache / (job.x.k + job.x.k / 2) / 16 * 16;  // rows, as bytes with their scales
  tall = tall < 64 ? 64 : tall;
  const int64_t floors = (job.m + tall - 1) / tall, wanted = (4 * threads() + floors - 1) / floors;
  const int64_t parts = wanted < panels ? wanted : panels;
  auto work = [&](int item) {
    const int64_t row = item % floors * tall, end = row + tall < job.m ? row + tall : job.m, part = item / floors;
    tiled_panels(job, write_tile<Dtype>, panels * part / parts, panels * (part + 1) / parts, row, end);
  };
  each(int(floors * parts), work);
}

// ---- plain bfloat16

struct BfloatTiles {
  const char* x;  // turned: [tiles of rows, blocks, 16 pairs of inputs, columns] words
  const uint16_t *weight, *bias;
  uint16_t* out;
  int64_t weight_stride, out_stride, m, n, k, blocks;
  int columns;  // rows of x in a tile

  int64_t x_block() const { return int64_t(16) * 4 * columns; }

  TileShapes shapes() const {  // tiles 0..3: sums; 4, 5: rows of the weight; 6, 7: turned input
    TileShapes all;
    for (int i = 0; i < 4; ++i) all.set(i, 16, 4 * columns);
    for (int i = 0; i < 2; ++i) all.set(4 + i, 16, 64), all.set(6 + i, 16, 4 * columns);
    return all;
  }

  // Rows of a weight where they lie, or copied with zeros around them.
  struct Strip {
    const char* at;
    int64_t row, tile, block, ahead;  // bytes to the next of each; what is wanted soon (0: nothing)
  };

  // A tiles of the weight times B tiles of the input; found: [A * B][16 columns of the result][16 rows].
  template <int A, int B>
  void multiply(const Strip& strip, const char* b, float* found) const {
    const char* a = strip.at;
    const int64_t width = 4 * columns, next = blocks * x_block();
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int64_t i = 0; i < blocks; ++i, a += strip.block, b += x_block()) {
      tile_load<6>(b, width);
      if constexpr (B == 2) tile_load<7>(b + next, width);
      tile_load<4>(a, strip.row);
      tile_dot_bfloats<0, 4, 6>();
      if constexpr (B == 2) tile_dot_bfloats<1, 4, 7>();
      tile_load<5>(a + strip.tile, strip.row);
      tile_dot_bfloats<B, 5, 6>();
      if constexpr (B == 2) tile_dot_bfloats<3, 5, 7>();
      if constexpr (A == 4) {
        tile_load<4>(a + 2 * strip.tile, strip.row);
        tile_dot_bfloats<2, 4, 6>();
        tile_load<5>(a + 3 * strip.tile, strip.row);
        tile_dot_bfloats<3, 5, 6>();
      }
      if (strip.ahead)
        for (int r = 0; r < 16 * A; ++r) __builtin_prefetch(a + r * strip.row + strip.ahead, 0, 2);
    }
    tile_store<0>(found, 64), tile_store<1>(found + 256, 64);
    if (A * B == 4) tile_store<2>(found + 512, 64), tile_store<3>(found + 768, 64);
  }

  // found [16 columns][16 rows] to the result, from (row, column) on.
  void write(const float* found, int64_t row, int64_t column) const {
    const int64_t rows = m - row < columns ? m - row : columns;
    if (n - column >= 16) {
      Words joined[8];
      for (int i = 0; i < 8; ++i) {
        Floats a = (Floats)load_words(found + 32 * i), b = (Floats)load_words(found + 32 * i + 16);
        if (bias) a += bfloat_to_float(bias[column + 2 * i]), b += bfloat_to_float(bias[column + 2 * i + 1]);
        joined[i] = join_bfloats(a, b);
      }
      return turn_8_to(joined, reinterpret_cast<char*>(out + row * out_stride + column), 2 * out_stride, int(rows));
    }
    write_rest(found, row, column, rows);
  }

  __attribute__((noinline)) void write_rest(const float* found, int64_t row, int64_t column, int64_t rows) const {
    for (int64_t c = 0; column + c < n; ++c)
      for (int64_t r = 0; r < rows; ++r) {
        const float value = bias ? found[16 * c + r] + bfloat_to_float(bias[column + c]) : found[16 * c + r];
        out[(row + r) * out_stride + column + c] = tiny_to_zero(value);
      }
  }

  // As join_bfloats rounds: where that is an instruction, numbers too small to be normal become zero.
  static uint16_t tiny_to_zero(float value) {
    uint16_t bits = float_to_bfloat(value);
#if defined(__AVX512BF16__)
    if (__builtin_fabsf(value) < 1.17549435e-38f) bits &= 0x8000;
#endif
    return bits;
  }

  template <int A>
  Strip strip_at(int64_t column, std::vector<char>& memory) const {
    const int64_t row = 2 * weight_stride, rows = n - column < 16 * A ? n - column : 16 * A;
    const char* from = reinterpret_cast<const char*>(weight + column * weight_stride);
    if (rows == 16 * A && k % kBlock == 0) {
      const int64_t whole = 16 * A * row;
      return {from, row, 16 * row, 64, whole <= kSecondCache / 4 ? whole : 1024};
    }
    char* to = aligned(memory, A * blocks * 1024);
    memset(to, 0, size_t(A * blocks * 1024));
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t left = 2 * k - 64 * b;
        memcpy(to + (r / 16 * blocks + b) * 1024 + r % 16 * 64, from + r * row + 64 * b, size_t(left < 64 ? left : 64));
      }
    return {to, 64, blocks * 1024, 1024, 0};
  }

  // Columns [first, last) of the result for tiles of rows [from, to); A: 4 where there is one tile of rows only.
  template <int A>
  void part(int64_t first, int64_t last, int64_t from, int64_t to) const {
    static thread_local std::vector<char> memory;
    Tiles tiles(shapes());
    alignas(64) float found[4 * 256];
    for (int64_t column = first; column < last; column += 16 * A) {
      Strip strip = strip_at<A>(column, memory);
      for (int64_t tile = from; tile < to;) {
        const char* b = x + tile * blocks * x_block();
        const int many = A == 2 && tile + 1 < to ? 2 : 1;
        if constexpr (A == 2) {
          if (many == 2) multiply<2, 2>(strip, b, found);
          else multiply<2, 1>(strip, b, found);
        } else {
          multiply<A, 1>(strip, b, found);
        }
        for (int i = 0; i < A; ++i)
          for (int j = 0; j < many; ++j)
            if (column + 16 * i < n) write(found + (i * many + j) * 256, (tile + j) * 16, column + 16 * i);
        tile += many, strip.ahead = 0;
      }
    }
  }
};

// One tile of rows of x, turned: pairs of inputs down, rows across, zeros where there is nothing.
inline void turn_rows(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t k, int columns, char* to) {
  for (int64_t b = 0; b * kBlock < k; ++b, to += 16 * 4 * columns) {
    if (rows == 16 && (b + 1) * kBlock <= k) {
      turn_16(x + b * kBlock, 2 * x_stride, to);
      continue;
    }
    memset(to, 0, size_t(16 * 4 * columns));
    const int64_t left = k - b * kBlock < kBlock ? k - b * kBlock : kBlock;
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t* from = x + r * x_stride + b * kBlock;
      for (int64_t i = 0; i + 2 <= left; i += 2) memcpy(to + (i / 2 * columns + r) * 4, from + i, 4);
      if (left % 2) memcpy(to + (left / 2 * columns + r) * 4, from + left - 1, 2);
    }
  }
}

inline void linear_by_tiles(const uint16_t* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias,
                            void* out, int64_t out_stride, int64_t m, int64_t n, int64_t k) {
  static thread_local std::vector<char> memory;
  const int columns = m < 16 ? int(m) : 16;
  const int64_t tiles = (m + 15) / 16, blocks = (k + kBlock - 1) / kBlock, bytes = blocks * 16 * 4 * columns;
  char* turned = aligned(memory, tiles * bytes);
  auto turn = [=](int tile) {
    turn_rows(x + tile * 16 * x_stride, x_stride, m - tile * 16 < 16 ? m - tile * 16 : 16, k, columns, turned + tile * bytes);
  };
  each(int(tiles), turn);
  BfloatTiles job = {turned, static_cast<const uint16_t*>(weight), static_cast<const uint16_t*>(bias), static_cast<uint16_t*>(out),
                     weight_stride, out_stride, m, n, k, blocks, columns};
  const int64_t width = tiles == 1 ? 64 : 32, strips = (n + width - 1) / width;
  int64_t tall = kSecondCache / bytes / 2 * 2;
  tall = tall < 4 ? 4 : tall;
  const int64_t floors = (tiles + tall - 1) / tall, wanted = (4 * threads() + floors - 1) / floors;
  const int64_t parts = wanted < strips ? wanted : strips;
  auto work = [&](int item) {
    const int64_t from = item % floors * tall, to = from + tall < tiles ? from + tall : tiles, part = item / floors;
    const int64_t first = strips * part / parts * width, end = strips * (part + 1) / parts * width, last = end < n ? end : n;
    if (tiles == 1) job.part<4>(first, last, from, to);
    else job.part<2>(first, last, from, to);
  };
  each(int(floors * parts), work);
}

}  // namespace QC_ISA
}  // namespace quire
#endif
