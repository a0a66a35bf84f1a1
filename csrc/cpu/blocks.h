// How packed matrices lie in memory: the same on every instruction set, so that a packed form can be kept in a file.
//
// Columns of a product (rows of the matrix as stored) come in panels of 16, their inputs in blocks of 32. A block of a
// panel is: scales, then planes of bits. Byte 4 * column + i of a 64-byte chunk belongs to that column and to input i of
// a quad (4 neighbouring inputs), so that one vector holds a quad of as many columns as it has 32-bit lanes.
//
//   scales    16 float16, one per column; kinds with M: 16 more, what is added; Q6Z: 16 for each half of the block
//   top bits  Q5: 64 bytes, bit q of a byte is for quad q.  Q6: 128 bytes, two bits for quads 0..3, then for 4..7
//   nibbles   4 chunks; chunk c holds quad c in the low and quad c + 4 in the high halves
//   Q8Z       8 chunks of signed bytes instead, chunk q holds quad q
//   B16       no scales; 16 chunks of bfloat16: chunk p holds inputs 2p and 2p + 1 of every column side by side
//   B32       no scales; 32 chunks of float32: chunk p holds input p of every column
//
// value = scale * (q - zero), or scale * q + added for kinds with M. A matrix of B16 or B32 of whole panels takes the
// place of its plain rows: 16 rows are a panel.
#pragma once
#include <stdint.h>
#include <string.h>

#include "quire_cpu.h"

namespace quire {

constexpr int kPanel = 16, kBlock = 32, kChunk = 64;

struct Form {
  int bits, zero;
  bool added, halves;

  constexpr int scales() const { return bits >= 16 ? 0 : 32 * (1 + (added || halves)); }
  constexpr int top() const { return bits == 5 ? 64 : bits == 6 ? 128 : 0; }
  constexpr int planes() const { return bits >= 16 ? 64 * bits : bits == 8 ? 512 : 256; }
  constexpr int bytes() const { return scales() + top() + planes(); }
};

constexpr Form kForms[QC_KINDS] = {
    {4, 0, true, false}, {4, 8, false, false}, {5, 0, true, false},
    {5, 16, false, false}, {6, 32, false, true}, {8, 0, false, false},
    {16, 0, false, false}, {32, 0, false, false},
};

inline float half_to_float(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ff, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | fraction << 13;
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    float small = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
    memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t float_to_half(float value) {  // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits >= 0x7f800000) return uint16_t(sign | 0x7c00 | (bits > 0x7f800000 ? 0x200 : 0));
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);  // beyond the largest half
  if (bits < 0x38800000) {  // subnormal: let the adder round at 2^-24
    float magic = 0.5f, small;
    memcpy(&small, &bits, 4);
    float sum = small + magic;
    memcpy(&bits, &sum, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return uint16_t(sign | ((bits - 0x38000000) >> 13));
}

inline float bfloat_to_float(uint16_t given) {
  uint32_t bits = uint32_t(given) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t float_to_bfloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// 32 numbers of one column as the kinds know them: q unsigned (signed bytes for Q8Z), and their scales.
struct Column {
  uint8_t q[kBlock];
  float scale[2];  // of the halves; scale[1] counts only with `halves`
  float added;
};

void put(int kind, uint8_t* block, int column, const Column& from);
void get(int kind, const uint8_t* block, int column, Column& to);

}  // namespace quire
