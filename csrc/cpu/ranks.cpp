#include "ranks.h"

#include <errno.h>
#include <limits.h>
#include <time.h>

#include <algorithm>
#include <chrono>

#include "pause.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {
namespace {

typedef std::chrono::steady_clock Clock;
constexpr int kLooks = 32;  // between two looks at the clock
constexpr std::chrono::nanoseconds kSleep = std::chrono::seconds(1);
constexpr int kDtypeBits = 8;

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

bool has_come(uint32_t seen, uint32_t turn) { return int32_t(seen - turn) >= 0; }

// Until the word is another than `seen`, or somebody calls, or the time is over. std::atomic::wait is of one process.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds most) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
  timespec limit = {time_t(seconds.count()), long((most - seconds).count())};
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  limit = {0, 50000};
  if (word.load() == seen) nanosleep(&limit, nullptr);
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Sleepers are counted before they look again, and a turn is told before they are counted: one of both sees the other.
struct Sleeper {
  RankLine& line;
  explicit Sleeper(RankLine& line) : line(line) { line.sleepers.fetch_add(1); }
  ~Sleeper() { line.sleepers.fetch_sub(1); }
};

// slept: by this rank, for the ranks of one turn.
void await(RankLine& line, uint32_t turn, Clock::time_point began, const qc_ranks& group, std::chrono::nanoseconds& slept) {
  const std::chrono::microseconds awake(group.spin_us);
  const std::chrono::milliseconds patience(group.patience_ms);
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (has_come(line.turn.load(std::memory_order_acquire), turn)) return;
      pause_briefly();
    }
  } while (Clock::now() - began < awake);
  const Sleeper asleep(line);
  for (uint32_t seen; !has_come(seen = line.turn.load(), turn);) {
    if (slept >= patience) throw Refused{QC_WRONG_PEER};
    const auto most = std::min<std::chrono::nanoseconds>(patience - slept, kSleep);
    const Clock::time_point from = Clock::now();
    sleep_on(line.turn, seen, most);
    slept += std::min<std::chrono::nanoseconds>(Clock::now() - from, most);  // more: this process was stopped
  }
}

}  // namespace

int64_t RankMemory::room_of(const qc_ranks& group) {
  return (group.bytes - int64_t(sizeof(RankLine)) * group.ranks) / (2 * int64_t(group.ranks)) / 64 * 64;
}

RankMemory::RankMemory(const qc_ranks& group) : group(group), room(room_of(group)) {
  if (own().busy.exchange(1)) throw Refused{QC_WRONG_RANKS};
}

RankMemory::~RankMemory() {
  if (!is_open_) own().busy.store(0);
}

char* RankMemory::slot(int rank) const {
  char* first = static_cast<char*>(group.memory) + int64_t(sizeof(RankLine)) * group.ranks;
  return first + room * (2 * int64_t(rank) + own().round);
}

void RankMemory::begin_round(int64_t left, int dtype) {
  is_open_ = true;
  own().round ^= 1;
  own().sums[own().round] = uint64_t(left) << kDtypeBits | uint64_t(dtype);
}

void RankMemory::agree() {
  for (int rank = 0; rank < group.ranks; ++rank)
    if (summed_by(rank) != summed_by(group.rank)) {
      end_round();
      throw Refused{QC_WRONG_SUM};
    }
}

void RankMemory::meet() {
  const uint32_t turn = own().turn.load(std::memory_order_relaxed) + 1;
  own().turn.store(turn);
  if (own().sleepers.load()) wake_all(own().turn);
  const Clock::time_point began = Clock::now();
  std::chrono::nanoseconds slept(0);
  for (int rank = 0; rank < group.ranks; ++rank)
    if (rank != group.rank) await(line(rank), turn, began, group, slept);
}

}  // namespace quire
