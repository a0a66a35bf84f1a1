// Sums over ranks. Every number is added up in the order of ranks, in float32, and rounded once, by whichever rank: all
// ranks get the same bits, and a row's do not depend on how many rows are summed.
#pragma once
#include "pool.h"
#include "ranks.h"
#include "simd.h"

namespace quire {
namespace QC_ISA {

constexpr int64_t kSumPiece = 16 << 10;     // bytes that a thread copies or adds at once
constexpr int64_t kSumTwice = 64 << 10;     // bytes from which on each of more than two ranks adds up a share for all

// work(first, count) for pieces of so many numbers.
template <class T, class F>
void each_piece(int64_t count, F& work) {
  constexpr int64_t most = kSumPiece / int64_t(sizeof(T));
  if (count <= most) return work(int64_t(0), count);
  auto piece = [&](int item) { work(item * most, count - item * most < most ? count - item * most : most); };
  each(int((count + most - 1) / most), piece);
}

template <int Dtype>
void add_slots(const RankMemory& memory, int64_t from, int64_t count, void* out) {
  typedef Numbers<Dtype> N;
  typedef typename N::Type T;
  const int ranks = memory.group.ranks;
  const int64_t step = 2 * memory.room / int64_t(sizeof(T));
  const T* slots = reinterpret_cast<const T*>(memory.slot(0)) + from;
  T* to = static_cast<T*>(out);
  auto work = [&](int64_t first, int64_t some) {
    const T* at = slots + first;
    int64_t i = 0;
    for (; i + kLanes <= some; i += kLanes) {
      vf sum = N::read(at + i);
      for (int rank = 1; rank < ranks; ++rank) sum = sum + N::read(at + rank * step + i);
      N::write(to + first + i, sum);
    }
    for (; i < some; ++i) {
      float sum = N::one(at + i);
      for (int rank = 1; rank < ranks; ++rank) sum += N::one(at + rank * step + i);
      N::put_one(to + first + i, sum);
    }
  };
  each_piece<T>(count, work);
}

template <class T>
void copy_numbers(const T* from, T* to, int64_t count) {
  auto work = [&](int64_t first, int64_t some) { memcpy(to + first, from + first, size_t(some) * sizeof(T)); };
  each_piece<T>(count, work);
}

// At most as many as fit into half a slot, of those that are left.
template <int Dtype>
void sum_round(RankMemory& memory, typename Numbers<Dtype>::Type* x, int64_t count, int64_t left) {
  typedef typename Numbers<Dtype>::Type T;
  const int ranks = memory.group.ranks;
  memory.begin_round(left, Dtype);
  auto slot = [&](int rank) { return reinterpret_cast<T*>(memory.slot(rank)); };
  T* own = slot(memory.group.rank);
  copy_numbers(x, own, count);
  memory.meet();
  memory.agree();
  if (ranks < 3 || count * int64_t(sizeof(T)) < kSumTwice) return add_slots<Dtype>(memory, 0, count, x);
  constexpr int64_t line = 64 / int64_t(sizeof(T));
  auto start = [&](int rank) { return count / line * rank / ranks * line; };
  auto end = [&](int rank) { return rank + 1 == ranks ? count : start(rank + 1); };
  const int64_t mine = start(memory.group.rank);  // nobody else reads this part of this slot
  add_slots<Dtype>(memory, mine, end(memory.group.rank) - mine, own + mine);
  memory.meet();
  for (int rank = 0; rank < ranks; ++rank) copy_numbers(slot(rank) + start(rank), x + start(rank), end(rank) - start(rank));
}

template <int Dtype>
void sum_ranks(const qc_ranks& group, void* x, int64_t count) {
  typedef typename Numbers<Dtype>::Type T;
  RankMemory memory(group);
  const int64_t most = memory.room / int64_t(sizeof(T));
  for (T* at = static_cast<T*>(x); count > 0; at += most, count -= most) {
    sum_round<Dtype>(memory, at, count < most ? count : most, count);
    memory.end_round();
  }
}

}  // namespace QC_ISA
}  // namespace quire
