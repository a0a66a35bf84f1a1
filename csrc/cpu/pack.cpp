// From the blocks of GGUF files, or from plain numbers, to packed matrices, and back to numbers. Runs at load.
#include <math.h>

#include <vector>

#include "blocks.h"
#include "checks.h"
#include "pool.h"

namespace quire {
namespace {

uint16_t read16(const uint8_t* at) { return uint16_t(at[0] | at[1] << 8); }
float half_at(const uint8_t* at) { return half_to_float(read16(at)); }

// The ids that GGUF files use.
enum Type { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

struct Stored {
  int type, kind, elements, bytes;
};
constexpr Stored kStored[] = {
    {Q4_0, QC_Q4Z, 32, 18}, {Q4_1, QC_Q4M, 32, 20}, {Q5_0, QC_Q5Z, 32, 22}, {Q5_1, QC_Q5M, 32, 24},
    {Q8_0, QC_Q8Z, 32, 34}, {Q4_K, QC_Q4M, 256, 144}, {Q5_K, QC_Q5M, 256, 176}, {Q6_K, QC_Q6Z, 256, 210},
};

const Stored* find(int type) {
  for (const Stored& stored : kStored)
    if (stored.type == type) return &stored;
  return nullptr;
}

void nibbles(const uint8_t* from, const uint8_t* fifth, Column& to) {
  uint32_t top = 0;
  if (fifth) memcpy(&top, fifth, 4);
  for (int i = 0; i < 16; ++i) {
    to.q[i] = uint8_t((from[i] & 15) | (top >> i & 1) << 4);
    to.q[i + 16] = uint8_t(from[i] >> 4 | (top >> (i + 16) & 1) << 4);
  }
}

// Six-bit scale and minimum number j of the 12 bytes of a Q4_K or Q5_K block.
void six_bits(const uint8_t* from, int j, int& scale, int& least) {
  if (j < 4) {
    scale = from[j] & 63, least = from[j + 4] & 63;
  } else {
    scale = (from[j + 4] & 15) | (from[j - 4] >> 6) << 4;
    least = from[j + 4] >> 4 | (from[j] >> 6) << 4;
  }
}

// Sub-block `part` (32 numbers) of a stored block.
void decode(int type, const uint8_t* from, int part, Column& to) {
  to.scale[0] = half_at(from), to.scale[1] = to.added = 0;
  switch (type) {
    case Q4_0: return nibbles(from + 2, nullptr, to);
    case Q4_1: to.added = half_at(from + 2); return nibbles(from + 4, nullptr, to);
    case Q5_0: return nibbles(from + 6, from + 2, to);
    case Q5_1: to.added = half_at(from + 2); return nibbles(from + 8, from + 4, to);
    case Q8_0: memcpy(to.q, from + 2, 32); return;
    case Q4_K:
    case Q5_K: {
      int scale, least;
      six_bits(from + 4, part, scale, least);
      to.added = -half_at(from + 2) * float(least);
      to.scale[0] *= float(scale);
      const uint8_t* low = from + (type == Q4_K ? 16 : 48) + part / 2 * 32;
      for (int i = 0; i < 32; ++i) {
        int top = type == Q5_K ? from[16 + i] >> part & 1 : 0;
        to.q[i] = uint8_t((part & 1 ? low[i] >> 4 : low[i] & 15) | top << 4);
      }
      return;
    }
    case Q6_K: {
      const uint8_t *low = from + part / 4 * 64 + part % 2 * 32, *top = from + 128 + part / 4 * 32;
      for (int i = 0; i < 32; ++i)
        to.q[i] = uint8_t((part % 4 < 2 ? low[i] & 15 : low[i] >> 4) | (top[i] >> 2 * (part % 4) & 3) << 4);
      float whole = half_at(from + 208);
      for (int h = 0; h < 2; ++h) to.scale[h] = whole * float(int8_t(from[192 + 2 * part + h]));
      return;
    }
  }
}

float number(const void* from, int dtype, int64_t at) {
  if (dtype == QC_F32) return static_cast<const float*>(from)[at];
  uint16_t bits = static_cast<const uint16_t*>(from)[at];
  return dtype == QC_BF16 ? bfloat_to_float(bits) : half_to_float(bits);
}

float through_half(float value) { return half_to_float(float_to_half(value)); }

// The nearest numbers that a kind can hold: symmetric for Q8Z, the whole range for Q4M.
void encode(int kind, const float* from, Column& to) {
  float low = from[0], high = from[0];
  for (int i = 1; i < kBlock; ++i) low = fminf(low, from[i]), high = fmaxf(high, from[i]);
  to.scale[1] = to.added = 0;
  if (kind == QC_Q8Z) {
    to.scale[0] = through_half(fmaxf(-low, high) / 127);
  } else {
    to.scale[0] = through_half((high - low) / 15), to.added = through_half(low);
  }
  float inverse = to.scale[0] ? 1 / to.scale[0] : 0;
  for (int i = 0; i < kBlock; ++i) {
    int q = int(lrintf((from[i] - to.added) * inverse));
    int least = kind == QC_Q8Z ? -127 : 0, most = kind == QC_Q8Z ? 127 : 15;
    to.q[i] = uint8_t(q < least ? least : q > most ? most : q);
  }
}

}  // namespace

void put(int kind, uint8_t* block, int column, const Column& from) {
  const Form form = kForms[kind];
  uint16_t half = float_to_half(from.scale[0]);
  memcpy(block + 2 * column, &half, 2);
  if (form.added || form.halves) {
    half = float_to_half(form.added ? from.added : from.scale[1]);
    memcpy(block + 32 + 2 * column, &half, 2);
  }
  uint8_t *top = block + form.scales() + 4 * column, *plane = top + form.top();
  for (int quad = 0; quad < 8; ++quad) {
    const uint8_t* q = from.q + 4 * quad;
    if (form.bits == 8) {
      memcpy(plane + kChunk * quad, q, 4);
      continue;
    }
    for (int i = 0; i < 4; ++i) {
      uint8_t& low = plane[kChunk * (quad % 4) + i];
      low = uint8_t(quad < 4 ? q[i] & 15 : low | (q[i] & 15) << 4);
      if (form.bits == 5) top[i] = uint8_t((quad ? top[i] : 0) | (q[i] >> 4 & 1) << quad);
      if (form.bits == 6) {
        uint8_t& pair = top[kChunk * (quad / 4) + i];
        pair = uint8_t((quad % 4 ? pair : 0) | (q[i] >> 4 & 3) << 2 * (quad % 4));
      }
    }
  }
}

void get(int kind, const uint8_t* block, int column, Column& to) {
  const Form form = kForms[kind];
  to.scale[0] = half_at(block + 2 * column), to.scale[1] = to.added = 0;
  if (form.added) to.added = half_at(block + 32 + 2 * column);
  to.scale[1] = form.halves ? half_at(block + 32 + 2 * column) : to.scale[0];
  const uint8_t *top = block + form.scales() + 4 * column, *plane = top + form.top();
  for (int quad = 0; quad < 8; ++quad)
    for (int i = 0; i < 4; ++i) {
      uint8_t& q = to.q[4 * quad + i];
      if (form.bits == 8) {
        q = plane[kChunk * quad + i];
        continue;
      }
      q = quad < 4 ? plane[kChunk * quad + i] & 15 : plane[kChunk * (quad - 4) + i] >> 4;
      if (form.bits == 5) q = uint8_t(q | (top[i] >> quad & 1) << 4);
      if (form.bits == 6) q = uint8_t(q | (top[kChunk * (quad / 4) + i] >> 2 * (quad % 4) & 3) << 4);
    }
}

}  // namespace quire

using namespace quire;

static bool is_panel(int64_t rows, int64_t width) { return is_read(rows, width, width) && width % kBlock == 0; }

QC_API int qc_kind_of(int gguf_type) {
  const Stored* stored = find(gguf_type);
  return stored ? stored->kind : -1;
}

QC_API int64_t qc_packed_bytes(int kind, int64_t rows, int64_t width) {
  if (kind < 0 || kind >= QC_KINDS || !is_panel(rows, width)) return QC_WRONG_MATRIX;
  return (rows + kPanel - 1) / kPanel * (width / kBlock) * kForms[kind].bytes();
}

QC_API int qc_pack(int gguf_type, const void* from, int64_t rows, int64_t width, void* packed) {
  const Stored* stored = find(gguf_type);
  if (!stored || !is_panel(rows, width) || width % stored->elements) return QC_WRONG_MATRIX;
  if (rows && !all_given(from, packed)) return QC_WRONG_POINTER;
  const int parts = stored->elements / kBlock, bytes = kForms[stored->kind].bytes();
  const int64_t blocks = width / kBlock, row_bytes = width / stored->elements * stored->bytes;
  Column column, nothing = {};
  for (int64_t panel = 0; panel * kPanel < rows; ++panel)
    for (int c = 0; c < kPanel; ++c) {
      const int64_t row = panel * kPanel + c;
      const uint8_t* source = static_cast<const uint8_t*>(from) + row * row_bytes;
      uint8_t* target = static_cast<uint8_t*>(packed) + panel * blocks * bytes;
      for (int64_t b = 0; b < blocks; ++b) {
        if (row < rows) decode(stored->type, source + b / parts * stored->bytes, int(b % parts), column);
        put(stored->kind, target + b * bytes, c, row < rows ? column : nothing);
      }
    }
  return 0;
}

QC_API int qc_pack_float(int kind, const void* from, int dtype, int64_t rows, int64_t width, void* packed) {
  if (!is_dtype(dtype)) return QC_WRONG_DTYPE;
  if ((kind != QC_Q8Z && kind != QC_Q4M) || !is_panel(rows, width)) return QC_WRONG_MATRIX;
  if (rows && !all_given(from, packed)) return QC_WRONG_POINTER;
  const int64_t blocks = width / kBlock;
  const int bytes = kForms[kind].bytes();
  Column column, nothing = {};
  float numbers[kBlock];
  for (int64_t panel = 0; panel * kPanel < rows; ++panel)
    for (int c = 0; c < kPanel; ++c) {
      const int64_t row = panel * kPanel + c;
      uint8_t* target = static_cast<uint8_t*>(packed) + panel * blocks * bytes;
      for (int64_t b = 0; b < blocks; ++b) {
        if (row < rows) {
          for (int i = 0; i < kBlock; ++i) numbers[i] = number(from, dtype, row * width + b * kBlock + i);
          encode(kind, numbers, column);
        }
        put(kind, target + b * bytes, c, row < rows ? column : nothing);
      }
    }
  return 0;
}

// Where number i of row r of a panel's 16 rows lies, `together` of a row side by side: 2 in B16, 1 in B32.
template <int Together>
int64_t in_panel(int64_t row, int64_t i) { return i / Together * Together * kPanel + Together * row + i % Together; }

static void put_float(void* out, int64_t at, float value, int dtype) {
  if (dtype == QC_F32) static_cast<float*>(out)[at] = value;
  else static_cast<uint16_t*>(out)[at] = dtype == QC_BF16 ? float_to_bfloat(value) : float_to_half(value);
}

static void unpack_bfloats(const uint16_t* all, int64_t width, const int64_t* index, int64_t count, void* out, int dtype) {
  auto one = [=](int n) {
    const uint16_t* from = all + index[n] / kPanel * kPanel * width + in_panel<2>(index[n] % kPanel, 0);
    for (int64_t i = 0; i < width; i += 2, from += 2 * kPanel) {
      const int64_t at = n * width + i;
      if (dtype == QC_BF16) memcpy(static_cast<uint16_t*>(out) + at, from, 4);
      else for (int j = 0; j < 2; ++j) put_float(out, at + j, bfloat_to_float(from[j]), dtype);
    }
  };
  each(int(count), one);
}

static void unpack_floats(const float* all, int64_t width, const int64_t* index, int64_t count, void* out, int dtype) {
  auto one = [=](int n) {
    const float* from = all + index[n] / kPanel * kPanel * width + index[n] % kPanel;
    for (int64_t i = 0; i < width; ++i, from += kPanel) put_float(out, n * width + i, *from, dtype);
  };
  each(int(count), one);
}

template <class T, int Together>
int lay_panels(T* all, int64_t rows, int64_t width, int back) {
  auto lay = [=](int panel) {
    static thread_local std::vector<T> before;
    T* here = all + panel * kPanel * width;
    before.assign(here, here + kPanel * width);
    for (int64_t row = 0; row < kPanel; ++row)
      for (int64_t i = 0; i < width; i += Together) {
        const int64_t plain = row * width + i, laid = in_panel<Together>(row, i);
        memcpy(here + (back ? plain : laid), before.data() + (back ? laid : plain), 4);
      }
  };
  return done([&] { each(int(rows / kPanel), lay); });
}

QC_API int qc_lay_panels(int kind, void* weight, int64_t rows, int64_t width, int back) {
  if ((kind != QC_B16 && kind != QC_B32) || !is_panel(rows, width) || rows % kPanel) return QC_WRONG_MATRIX;
  if (rows && !weight) return QC_WRONG_POINTER;
  if (kind == QC_B32) return lay_panels<float, 1>(static_cast<float*>(weight), rows, width, back);
  return lay_panels<uint16_t, 2>(static_cast<uint16_t*>(weight), rows, width, back);
}

static void unpack_blocks(int kind, const void* packed, int64_t width, const int64_t* index, int64_t count, void* out, int dtype) {
  const Form form = kForms[kind];
  const int64_t blocks = width / kBlock;
  Column column;
  for (int64_t n = 0; n < count; ++n)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t block = index[n] / kPanel * blocks + b;
      get(kind, static_cast<const uint8_t*>(packed) + block * form.bytes(), int(index[n] % kPanel), column);
      for (int i = 0; i < kBlock; ++i) {
        int q = form.bits == 8 ? int(int8_t(column.q[i])) : int(column.q[i]) - form.zero;
        float value = column.scale[i / 16] * float(q);
        if (form.added) value = value + column.added;
        const int64_t at = n * width + b * kBlock + i;
        put_float(out, at, value, dtype);
      }
    }
}

QC_API int qc_unpack_rows(int kind, const void* packed, int64_t rows, int64_t width, const int64_t* index, int64_t count,
                          void* out, int dtype) {
  if (!is_dtype(dtype)) return QC_WRONG_DTYPE;
  if (kind < 0 || kind >= QC_KINDS || !is_panel(rows, width)) return QC_WRONG_MATRIX;
  if (!is_read(count, width, width)) return QC_WRONG_ROWS;
  if (!count) return 0;
  if (!all_given(packed, index, out)) return QC_WRONG_POINTER;
  if (!all_below(index, count, rows)) return QC_WRONG_INDEX;
  if (kind == QC_B16) unpack_bfloats(static_cast<const uint16_t*>(packed), width, index, count, out, dtype);
  else if (kind == QC_B32) unpack_floats(static_cast<const float*>(packed), width, index, count, out, dtype);
  else unpack_blocks(kind, packed, width, index, count, out, dtype);
  return 0;
}
