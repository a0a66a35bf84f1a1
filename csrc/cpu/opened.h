// Packed weights with tile registers: panels are opened to bfloat16 (those of B16 are so), and rows are rounded to it.
//
// A result is summed in the same order (32 inputs at a time, from the first on) whatever stands beside it. What the number
// of rows decides is where opened blocks go: for one tile of rows to a few places in the first cache, just before they are
// multiplied; for more, panel by panel to memory. Up to kByLanes rows do without tiles, which wait for what vectors store:
// their blocks stay in vector registers and are summed as the instruction does it, so that bits are the same.
#pragma once
#include "amx.h"

#if QC_TILES
namespace quire {
namespace QC_ISA {

inline Floats sixteen_halves(const uint8_t* from) {
  Floats to;
  float each_one[kPanel];
  for (int i = 0; i < kPanel; i += kLanes) store(each_one + i, load_half(reinterpret_cast<const uint16_t*>(from) + i));
  memcpy(&to, each_one, sizeof to);
  return to;
}

// Whole numbers q of 16 columns become scale * q + base by one fused operation: q is put into a float's fraction from bit
// `At` on, beside the exponent of 1, which makes it 1 + q * 2^(At - 23) without a conversion.
//
// Results are cut off after their upper 16 bits, which is cheaper than to round them; so that this takes as often up as
// down, they are made larger before by what a cut takes on average, 0.7213 * 2^-8 of a number whose fraction may be any.
template <int At, int Bits>
struct Opening {
  static constexpr float kMore = 1.0028176f, kUnit = float(1 << (23 - At));
  static constexpr uint32_t kMask = ((1u << Bits) - 1) << At, kOne = 0x3f800000;
  Floats by, base;

  Opening(Floats scale, Floats added) : by(scale * (kUnit * kMore)), base(added * kMore - by) {}
  Floats operator()(Words w) const { return (Floats)((w & kMask) | kOne) * by + base; }
};

// The upper halves of two rows of words side by side: those of `a` in the low halves. (One shuffle of halves takes longer.)
inline Words upper_halves(Floats a, Floats b) { return (Words)a >> 16 | ((Words)b & 0xffff0000u); }

// A quad of inputs, given as floats, to two lines of a tile.
inline void put_quad(char* to, Floats a, Floats b, Floats c, Floats d) {
  store_words(to, upper_halves(a, b)), store_words(to + kChunk, upper_halves(c, d));
}

// Quad `half` * 4 + c of a block, a byte for each input, of kinds with more than 4 bits; those of Q8Z 128 larger.
template <int Kind>
inline Words bytes_of_quad(const uint8_t* top, const uint8_t* planes, int half, int c) {
  constexpr Form form = kForms[Kind];
  if constexpr (form.bits == 8) return load_words(planes + kChunk * (4 * half + c)) ^ 0x80808080u;
  const Words low = (load_words(planes + kChunk * c) >> (4 * half)) & 0x0f0f0f0fu;
  if constexpr (form.bits == 5) return low | ((load_words(top) >> (4 * half + c)) & 0x01010101u) << 4;
  else return low | ((load_words(top + kChunk * half) >> (2 * c)) & 0x03030303u) << 4;
}

// A block of a panel as a tile of 16 pairs of inputs x 16 columns.
template <int Kind>
void open_block(const uint8_t* block, char* to) {
  constexpr Form form = kForms[Kind];
  constexpr float zero = form.bits == 8 ? 128 : form.zero;
  const uint8_t *top = block + form.scales(), *planes = top + form.top();
  const Floats scale = sixteen_halves(block);
  const Floats second = form.added || form.halves ? sixteen_halves(block + 2 * kPanel) : scale;
  const Floats base = form.added ? second : scale * -zero;
  if constexpr (form.bits == 4) {
    const Opening<16, 4> low(scale, base);
    const Opening<12, 4> high(scale, base);
    for (int c = 0; c < 4; ++c, to += 2 * kChunk) {
      const Words w = load_words(planes + kChunk * c), left = w << 8, right = w >> 8;
      put_quad(to, low(w << 16), low(left), low(w), low(right));
      put_quad(to + 8 * kChunk, high(left), high(w), high(right), high(w >> 16));
    }
  } else {
    for (int half = 0; half < 2; ++half) {
      const bool other = form.halves && half;
      const Opening<8, 8> open(other ? second : scale, other ? second * -zero : base);
      for (int c = 0; c < 4; ++c, to += 2 * kChunk) {
        const Words w = bytes_of_quad<Kind>(top, planes, half, c);
        put_quad(to, open(w << 8), open(w), open(w >> 8), open(w >> 16));
      }
    }
  }
}

typedef void (*OpenBlock)(const uint8_t* block, char* to);

inline OpenBlock opening_of(int64_t kind) {
  constexpr OpenBlock all[QC_KINDS] = {open_block<QC_Q4M>, open_block<QC_Q4Z>, open_block<QC_Q5M>, open_block<QC_Q5Z>,
                                       open_block<QC_Q6Z>, open_block<QC_Q8Z>, nullptr, nullptr};
  return all[kind];
}

constexpr int kByLanes = 4;  // rows whose products are summed without tiles

// Numbers too small for a normal float are zero, as they are for tiles, as long as this lives.
struct TinyIsZero {
#if defined(__SSE__)
  const unsigned before = _mm_getcsr();
  TinyIsZero() { _mm_setcsr(before | 0x8040); }
  ~TinyIsZero() { _mm_setcsr(before); }
#endif
};

// A block of a panel as quads of inputs in order, as they are before they are cut off: take(quad, a, b, c, d).
template <int Kind, class F>
QC_INLINE inline void each_quad(const uint8_t* block, const F& take) {
  constexpr Form form = kForms[Kind];
  constexpr float zero = form.bits == 8 ? 128 : form.zero;
  const uint8_t *top = block + form.scales(), *planes = top + form.top();
  const Floats scale = sixteen_halves(block);
  const Floats second = form.added || form.halves ? sixteen_halves(block + 2 * kPanel) : scale;
  const Floats base = form.added ? second : scale * -zero;
  if constexpr (form.bits == 4) {
    const Opening<16, 4> low(scale, base);
    const Opening<12, 4> high(scale, base);
    for (int c = 0; c < 4; ++c) {
      const Words w = load_words(planes + kChunk * c);
      take(c, low(w << 16), low(w << 8), low(w), low(w >> 8));
    }
    for (int c = 0; c < 4; ++c) {
      const Words w = load_words(planes + kChunk * c);
      take(4 + c, high(w << 8), high(w), high(w >> 8), high(w >> 16));
    }
  } else {
    for (int half = 0; half < 2; ++half) {
      const bool other = form.halves && half;
      const Opening<8, 8> open(other ? second : scale, other ? second * -zero : base);
      for (int c = 0; c < 4; ++c) {
        const Words w = bytes_of_quad<Kind>(top, planes, half, c);
        take(4 * half + c, open(w << 8), open(w), open(w >> 8), open(w >> 16));
      }
    }
  }
}

// `Rows` rows x [Rows, blocks * 32] times a packed panel, as tile_dot_bfloats sums it: products of even inputs of a block by
// themselves, those of odd ones too, then both to the sum. (A product of two bfloat16 is exact as a float.)
template <int Kind, int Rows>
void multiply_by_lanes(const float* x, int64_t blocks, const uint8_t* panel, float* found, int64_t stride) {
  auto cut = [](Floats v) QC_INLINE { return (Floats)((Words)v & 0xffff0000u); };
  const int64_t next = blocks * kBlock;
  Floats sums[Rows] = {};
  for (int64_t i = 0; i < blocks; ++i, x += kBlock, panel += kForms[Kind].bytes()) {
    for (int64_t line = 0; line < kForms[Kind].bytes(); line += 64) __builtin_prefetch(panel + kAheadBytes + line);
    Floats even[Rows] = {}, odd[Rows] = {};
    each_quad<Kind>(panel, [&](int quad, Floats v0, Floats v1, Floats v2, Floats v3) QC_INLINE {
      const Floats w0 = cut(v0), w1 = cut(v1), w2 = cut(v2), w3 = cut(v3);
      for (int r = 0; r < Rows; ++r) {
        const float* at = x + r * next + 4 * quad;
        even[r] += w0 * at[0], odd[r] += w1 * at[1];
        even[r] += w2 * at[2], odd[r] += w3 * at[3];
      }
    });
    for (int r = 0; r < Rows; ++r) sums[r] += even[r] + odd[r];
  }
  for (int r = 0; r < Rows; ++r) store_words(found + r * stride, (Words)sums[r]);
}

typedef void (*ByLanes)(const float* x, int64_t blocks, const uint8_t* panel, float* found, int64_t stride);

template <int Rows>
ByLanes by_lanes_of(int64_t kind) {
  constexpr ByLanes all[QC_KINDS] = {multiply_by_lanes<QC_Q4M, Rows>, multiply_by_lanes<QC_Q4Z, Rows>,
                                     multiply_by_lanes<QC_Q5M, Rows>, multiply_by_lanes<QC_Q5Z, Rows>,
                                     multiply_by_lanes<QC_Q6Z, Rows>, multiply_by_lanes<QC_Q8Z, Rows>, nullptr, nullptr};
  return all[kind];
}

inline ByLanes by_lanes_of(int64_t kind, int64_t rows) {
  return rows == 1 ? by_lanes_of<1>(kind) : rows == 2 ? by_lanes_of<2>(kind) : rows == 3 ? by_lanes_of<3>(kind) : by_lanes_of<4>(kind);
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

  // Rows that fill up the last tile are zero; a single tile has only as many as there are.
  template <int Dtype>
  void put_all(const typename Numbers<Dtype>::Type* x, int64_t x_stride, int64_t rows) const {
    auto some = [&](int tile) {
      for (int64_t row = tile * 16; row < tile * 16 + 16; ++row) {
        if (row < rows) put<Dtype>(row, x + row * x_stride);
        else for (int64_t b = 0; b < blocks && rows > 16; ++b) memset(line(row, b), 0, 64);
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

  static TileShapes shapes(int64_t rows) {  // 0..3: sums; 4, 5: rows; 6, 7: panels
    TileShapes all;
    for (int i = 0; i < 8; ++i) all.set(i, i < 6 && rows < 16 ? int(rows) : 16, 64);
    return all;
  }

  // Rows [row, end) as floats [rows, blocks * 32] where there are few enough for `multiply_few` to read them so.
  const float* as_floats(int64_t row, int64_t end) const {
    static thread_local std::vector<float> memory;
    if (end - row > kByLanes) return nullptr;
    memory.resize(size_t((end - row) * blocks * kBlock));
    float* to = memory.data();
    for (; row < end; ++row)
      for (int64_t b = 0; b < blocks; ++b, to += kBlock) {
        const uint16_t* from = reinterpret_cast<const uint16_t*>(x.line(row, b));
        for (int i = 0; i < kBlock; i += kLanes) store(to + i, Numbers<QC_BF16>::read(from + i));
      }
    return memory.data();
  }

  // One tile of rows, given as `floats` too if they are few, times a packed panel, to `found`, whose rows are `stride` floats
  // apart.
  void multiply_few(const float* floats, int64_t row, int64_t end, int64_t kind, const char* panel, float* found,
                    int64_t stride) const {
    if (!floats) return multiply_opening(x.tile(row), kind, panel, found, stride);
    by_lanes_of(kind, end - row)(floats, blocks, reinterpret_cast<const uint8_t*>(panel), found, stride);
  }

  void multiply_opening(const char* a, int64_t kind, const char* panel, float* found, int64_t stride) const {
    constexpr int64_t kLead = 4, kPlaces = 2 * kLead;  // blocks are opened so long before, or the tile waits for its lines
    alignas(64) char places[kPlaces][kTileBytes];
    const int64_t bytes = kForms[kind].bytes();
    const OpenBlock open = opening_of(kind);
    tile_zero<0>();
    for (int64_t i = -kLead; i < blocks; ++i, panel += bytes) {
      if (i + kLead < blocks) {
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(panel + kAheadBytes + line);
        open(reinterpret_cast<const uint8_t*>(panel), places[(i + kLead) % kPlaces]);
      }
      if (i < 0) continue;
      tile_load<4>(a + i * kTileBytes, 64), tile_load<6>(places[i % kPlaces], 64);
      tile_dot_bfloats<0, 4, 6>();
    }
    tile_store<0>(found, 4 * stride);
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

  // found [rows, width of `many` panels] to the result; count: how many of these columns there are. Whole panels are all
  // rounded alike, whichever stand side by side.
  QC_INLINE void write(const float* found, int many, int64_t row, int64_t rows, int64_t column, int64_t count) const {
    const int64_t width = many * kPanel, whole = job.bias ? 0 : count / kPanel * kPanel;
    for (int64_t r = 0; r < rows; ++r, found += width) {
      typename N::Type* to = static_cast<typename N::Type*>(job.out) + (row + r) * job.out_stride + column;
      if (Dtype == QC_BF16) write_bfloats(found, whole, to);
      else for (int64_t i = 0; i < whole; i += kLanes) N::write(to + i, load(found + i));
      if (whole < count) write_columns<Dtype>(job, row + r, 1, column + whole, count - whole, found + whole, kPanel);
    }
  }

  QC_INLINE static void write_bfloats(const float* found, int64_t count, void* to) {
    if (!count) return;
    const Floats first = (Floats)load_words(found);
    const Words both = side_by_side(first, count > kPanel ? (Floats)load_words(found + kPanel) : first);
    if (count > kPanel) store_words(to, both);
    else memcpy(to, &both, 2 * kPanel);
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

  // Whether rows [row, end) are one tile of its own, for which panels are opened block by block.
  static bool few(int64_t kind, int64_t row, int64_t end) { return kind != QC_B16 && end - row <= 16; }

  // Panels [from, to) of all segments, counted through, for rows [row, end).
  void part(int64_t from, int64_t to, int64_t row, int64_t end) const {
    Tiles tiles(shapes(end - row));
    if (few(job.segments[0].kind, row, end)) part_of_few(from, to, row, end);
    else part_of_many(from, to, row, end);
  }

  void part_of_few(int64_t from, int64_t to, int64_t row, int64_t end) const {
    const TinyIsZero flushed;
    const float* floats = as_floats(row, end);
    over_panels(job, from, to, [&](int64_t kind, const uint8_t* panel, int64_t column, int64_t count) {
      alignas(64) float found[16 * kPanel];
      multiply_few(floats, row, end, kind, reinterpret_cast<const char*>(panel), found, kPanel);
      write(found, 1, row, end - row, column, count < kPanel ? count : kPanel);
    });
  }

  void part_of_many(int64_t from, int64_t to, int64_t row, int64_t end) const {
    static thread_local std::vector<char> memory;
    Waiting waiting;
    const int64_t passes = (end - row + 31) / 32;
    int64_t column = 0, before = 0;
    for (int64_t i = 0; i < job.num_segments; ++i) {
      const qc_segment& segment = job.segments[i];
      const int64_t num = panels_of(segment), bytes = blocks * kForms[segment.kind].bytes();
      const int64_t last = to - before < num ? to - before : num;
      const int64_t lines = (2 * bytes / 64 + passes * blocks - 1) / (passes * blocks);
      for (int64_t p = from > before ? from - before : 0; p < last; p += 2) {
        const int many = last - p > 1 ? 2 : 1;
        const char *stored = static_cast<const char*>(segment.data) + p * bytes, *open = stored;
        if (segment.kind != QC_B16) open = opened(segment.kind, stored, many, memory);
        const Soon soon = {stored + 2 * bytes, nullptr, p + 2 < last ? lines : 0};
        panels(open, many, column + p * kPanel, segment.rows - p * kPanel, row, end, soon, waiting);
      }
      column += segment.rows, before += num;
    }
    waiting.some(waiting.rows, writer());
  }

  const char* opened(int64_t kind, const char* stored, int many, std::vector<char>& memory) const {
    char* open = aligned(memory, many * blocks * kTileBytes);
    const OpenBlock open_one = opening_of(kind);
    for (int64_t i = 0; i < many * blocks; ++i)  // panels lie one behind the other, blocks of each too
      open_one(reinterpret_cast<const uint8_t*>(stored) + i * kForms[kind].bytes(), open + i * kTileBytes);
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
