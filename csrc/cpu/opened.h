// Packed weights times many rows with tile registers: panels are opened to bfloat16 (those of B16 are so), and rows are
// rounded to it.
//
// Bytes of a block have a scale of their own, so that their products (amx.h) must leave the tiles after every 32 inputs;
// numbers stay in them to the end. That is faster from a few tiles of rows on, and no less exact than rows rounded to
// bytes, but its bits are others: it is left alone where a result may not depend on how many rows there are.
#pragma once
#include "amx.h"

#if QC_TILES
namespace quire {
namespace QC_ISA {

typedef int32_t Whole __attribute__((vector_size(64)));

inline Floats sixteen_halves(const uint8_t* from) {
  Floats to;
  float each_one[kPanel];
  for (int i = 0; i < kPanel; i += kLanes) store(each_one + i, load_half(reinterpret_cast<const uint16_t*>(from) + i));
  memcpy(&to, each_one, sizeof to);
  return to;
}

// A panel as tiles of 16 pairs of inputs x 16 columns, one for each block.
template <int Kind>
void open_panel(const uint8_t* panel, int64_t blocks, char* to) {
  constexpr Form form = kForms[Kind];
  alignas(64) uint8_t bytes[8 * kChunk];
  for (int64_t b = 0; b < blocks; ++b, panel += form.bytes()) {
    unpack_panel<Kind>(panel, 1, bytes);
    const Floats first = sixteen_halves(panel);
    const Floats second = form.added || form.halves ? sixteen_halves(panel + 2 * kPanel) : first;
    for (int quad = 0; quad < 8; ++quad, to += 2 * kChunk) {
      const Words all = load_words(bytes + quad * kChunk);
      const Floats scale = form.halves && quad >= 4 ? second : first;
      Floats value[4];
      for (int i = 0; i < 4; ++i) {
        value[i] = __builtin_convertvector((Whole)(all << (24 - 8 * i)) >> 24, Floats) * scale;
        if (form.added) value[i] += second;
      }
      store_words(to, join_bfloats(value[0], value[1])), store_words(to + kChunk, join_bfloats(value[2], value[3]));
    }
  }
}

inline void open_panel_of_kind(int64_t kind, const uint8_t* panel, int64_t blocks, char* to) {
  switch (kind) {
    case QC_Q4M: return open_panel<QC_Q4M>(panel, blocks, to);
    case QC_Q4Z: return open_panel<QC_Q4Z>(panel, blocks, to);
    case QC_Q5M: return open_panel<QC_Q5M>(panel, blocks, to);
    case QC_Q5Z: return open_panel<QC_Q5Z>(panel, blocks, to);
    case QC_Q6Z: return open_panel<QC_Q6Z>(panel, blocks, to);
    case QC_Q8Z: return open_panel<QC_Q8Z>(panel, blocks, to);
  }
}

// Memory that is read next, in one place or two, brought nearer a few lines at a time while something else is computed.
struct Soon {
  const char *at, *other;  // other: null where there is none
  int64_t lines;  // of each, for each block of a product

  void bring() {
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
    at += 64 * lines;
    if (!other) return;
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(other + 64 * i, 0, 2);
    other += 64 * lines;
  }
};

// Rows of bfloat16 as tiles: [tiles of 16 rows, blocks, 16, 32].
struct TiledRows {
  char* data;
  int64_t blocks;

  char* tile(int64_t row) const { return data + row / 16 * blocks * 1024; }
  char* line(int64_t row, int64_t block) const { return tile(row) + block * 1024 + row % 16 * 64; }

  // `memory` is made large enough for `rows` of k numbers.
  static TiledRows in(std::vector<char>& memory, int64_t rows, int64_t k) {
    return {aligned(memory, (rows + 15) / 16 * (k / kBlock) * 1024), k / kBlock};
  }

  template <int Dtype>
  void put(int64_t row, const typename Numbers<Dtype>::Type* from) const {
    for (int64_t b = 0; b < blocks; ++b, from += kBlock) {
      uint16_t* to = reinterpret_cast<uint16_t*>(line(row, b));
      if (Dtype == QC_BF16) memcpy(to, from, 2 * kBlock);
      else for (int i = 0; i < kBlock; i += kLanes) Numbers<QC_BF16>::write(to + i, Numbers<Dtype>::read(from + i));
    }
  }

  // Rows that fill up the last tile are zero.
  template <int Dtype>
  void put_all(const typename Numbers<Dtype>::Type* x, int64_t x_stride, int64_t rows) const {
    auto some = [&](int tile) {
      for (int64_t row = tile * 16; row < tile * 16 + 16; ++row) {
        if (row < rows) put<Dtype>(row, x + row * x_stride);
        else for (int64_t b = 0; b < blocks; ++b) memset(line(row, b), 0, 64);
      }
    };
    const int tiles = int((rows + 15) / 16);
    if (tiles <= 2) for (int tile = 0; tile < tiles; ++tile) some(tile);
    else each(tiles, some);
  }
};

// Sums that left the tiles, and are written a few rows at a time while the next ones are computed: vectors are at work then
// beside the tiles.
struct Waiting {
  alignas(64) float found[2][4 * 256];
  int now = 0, many = 0;  // many: panels of those that wait
  int64_t row = 0, rows = 0, column = 0, count = 0;  // rows from `row` on are left

  float* room() { return found[now]; }

  // What room() holds waits from here on; nothing does before.
  void put(int panels, int64_t at, int64_t num, int64_t first, int64_t columns) {
    many = panels, row = at, rows = num, column = first, count = columns, now = 1 - now, next_ = found[1 - now];
  }

  template <class F>
  QC_INLINE void some(int64_t most, const F& write) {
    const int64_t num = most < rows ? most : rows;
    write(next_, many, row, num, column, count);
    next_ += num * many * kPanel, row += num, rows -= num;
  }

 private:
  const float* next_ = nullptr;
};

template <int Dtype>
struct OpenProduct {
  typedef Numbers<Dtype> N;
  const Product& job;
  const TiledRows x;
  const int64_t blocks = x.blocks;

  static constexpr int64_t kTileBytes = 1024;

  static TileShapes shapes() {  // 0..3: sums; 4, 5: rows; 6, 7: panels
    TileShapes all;
    for (int i = 0; i < 8; ++i) all.set(i, 16, 64);
    return all;
  }

  // A tiles of rows times B panels, of which the second is `apart` bytes behind, to [A * 16 rows][B * 16 columns] of the
  // room; what waits is written meanwhile.
  template <int A, int B, class F>
  void multiply(const char* a, const char* b, int64_t apart, Soon& soon, Waiting& waiting, const F& write) const {
    const int64_t next = blocks * kTileBytes, share = (waiting.rows + blocks - 1) / blocks;
    float* found = waiting.room();
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int64_t i = 0; i < blocks; ++i, a += kTileBytes, b += kTileBytes) {
      tile_load<4>(a, 64), tile_load<6>(b, 64);
      tile_dot_bfloats<0, 4, 6>();
      if constexpr (B == 2) tile_load<7>(b + apart, 64), tile_dot_bfloats<1, 4, 7>();
      if constexpr (A == 2) {
        tile_load<5>(a + next, 64);
        tile_dot_bfloats<B, 5, 6>();
        if constexpr (B == 2) tile_dot_bfloats<3, 5, 7>();
      }
      soon.bring();
      waiting.some(share, write);
    }
    tile_store<0>(found, 64 * B);
    if constexpr (B == 2) tile_store<1>(found + 16, 128);
    if constexpr (A == 2) tile_store<B>(found + 256 * B, 64 * B);
    if constexpr (A == 2 && B == 2) tile_store<3>(found + 528, 128);
  }

  // found [rows, width of `many` panels] to the result; count: how many of these columns there are.
  QC_INLINE void write(const float* found, int many, int64_t row, int64_t rows, int64_t column, int64_t count) const {
    const int64_t width = many * kPanel;
    for (int64_t r = 0; r < rows; ++r, found += width) {
      typename N::Type* to = static_cast<typename N::Type*>(job.out) + (row + r) * job.out_stride + column;
      if (count < width || job.bias) write_columns<Dtype>(job, row + r, column, count, found);
      else if (Dtype == QC_BF16 && width == 2 * kPanel)
        store_words(to, side_by_side((Floats)load_words(found), (Floats)load_words(found + kPanel)));
      else for (int64_t i = 0; i < width; i += kLanes) N::write(to + i, load(found + i));
    }
  }

  // `many` (1 or 2) open panels for rows [from, to); count: columns that they have together.
  void panels(const char* open, int many, int64_t column, int64_t count, int64_t from, int64_t to, Soon soon,
              Waiting& waiting) const {
    count = count < many * kPanel ? count : many * kPanel;
    for (int64_t row = from; row < to; row += 32) {
      const int tall = to - row > 16 ? 2 : 1;
      const char* a = x.tile(row);
      const int64_t apart = blocks * kTileBytes;
      if (tall == 2 && many == 2) multiply<2, 2>(a, open, apart, soon, waiting, writer());
      else if (tall == 2) multiply<2, 1>(a, open, apart, soon, waiting, writer());
      else if (many == 2) multiply<1, 2>(a, open, apart, soon, waiting, writer());
      else multiply<1, 1>(a, open, apart, soon, waiting, writer());
      waiting.put(many, row, to - row < 16 * tall ? to - row : 16 * tall, column, count);
    }
  }

  auto writer() const {
    return [this](const float* found, int many, int64_t row, int64_t rows, int64_t column, int64_t count) QC_INLINE {
      write(found, many, row, rows, column, count);
    };
  }

  // Panels [from, to) of all segments, counted through, for rows [row, end).
  void part(int64_t from, int64_t to, int64_t row, int64_t end) const {
    static thread_local std::vector<char> memory;
    Waiting waiting;
    const int64_t passes = (end - row + 31) / 32;
    Tiles tiles(shapes());
    int64_t column = 0, before = 0;
    for (int64_t i = 0; i < job.num_segments; ++i) {
      const qc_segment& segment = job.segments[i];
      const int64_t num = panels_of(segment), bytes = blocks * kForms[segment.kind].bytes();
      const int64_t last = to - before < num ? to - before : num;
      const int64_t lines = (2 * bytes / 64 + passes * blocks - 1) / (passes * blocks);
      for (int64_t p = from > before ? from - before : 0; p < last; p += 2) {
        const int many = last - p > 1 ? 2 : 1;
        const char *stored = static_cast<const char*>(segment.data) + p * bytes, *open = stored;
        if (segment.kind != QC_B16) open = opened(segment.kind, stored, bytes, many, memory);
        const Soon soon = {stored + 2 * bytes, nullptr, p + 2 < last ? lines : 0};
        panels(open, many, column + p * kPanel, segment.rows - p * kPanel, row, end, soon, waiting);
      }
      column += segment.rows, before += num;
    }
    waiting.some(waiting.rows, writer());
  }

  const char* opened(int64_t kind, const char* stored, int64_t bytes, int many, std::vector<char>& memory) const {
    char* open = aligned(memory, many * blocks * kTileBytes);
    for (int m = 0; m < many; ++m)
      open_panel_of_kind(kind, reinterpret_cast<const uint8_t*>(stored) + m * bytes, blocks, open + m * blocks * kTileBytes);
    return open;
  }
};

// work(first, last, row, end): panels [first, last), in pairs, for rows [row, end), so many that they stay near.
template <class F>
void share_panels(int64_t m, int64_t k, int64_t panels, F& work) {
  if (m <= 0) return;
  int64_t tall = kSecondCache / (2 * k) / 32 * 32;
  tall = tall < 64 ? 64 : tall;
  const int64_t floors = (m + tall - 1) / tall, pairs = (panels + 1) / 2;
  tall = ((m + floors - 1) / floors + 31) / 32 * 32;  // all of one size, so that none is too small for its panels
  const int64_t wanted = (4 * threads() + floors - 1) / floors, parts = wanted < pairs ? wanted : pairs;
  auto some = [&](int item) {
    const int64_t row = item % floors * tall, part = item / floors, last = pairs * (part + 1) / parts * 2;
    work(pairs * part / parts * 2, last < panels ? last : panels, row, row + tall < m ? row + tall : m);
  };
  each(int(floors * parts), some);
}

template <int Dtype>
void product_of_tiles(const TiledRows& x, const Product& job, int64_t panels) {
  const OpenProduct<Dtype> open = {job, x};
  auto work = [&](int64_t first, int64_t last, int64_t row, int64_t end) { open.part(first, last, row, end); };
  share_panels(job.m, job.x.k, panels, work);
}

template <int Dtype>
void packed_by_opening(const typename Numbers<Dtype>::Type* x, int64_t x_stride, const Product& job, int64_t panels) {
  static thread_local std::vector<char> memory;
  const TiledRows tiled = TiledRows::in(memory, job.m, job.x.k);
  tiled.put_all<Dtype>(x, x_stride, job.m);
  product_of_tiles<Dtype>(tiled, job, panels);
}

}  // namespace QC_ISA
}  // namespace quire
#endif
