// Memory through which processes of one machine sum: a line for each rank, and behind the lines a slot for each.
//
// A line says to how many turns its rank has come; ranks wait for one another there, awake for a little while and then
// asleep. A slot has two halves that are used in turn: who comes to a turn has read all that was written two rounds
// before, so a half is not written again before everybody is done with it. So is what a rank says that it sums. What other
// ranks write is never an address or a size: what they say is compared, and refused where it differs.
#pragma once
#include <atomic>

#include "quire_cpu.h"

namespace quire {

// Why work was given up in the middle.
struct Refused {
  int code;  // one of qc_wrong
};

// Two lines of a processor's cache, which it may fetch together.
struct alignas(128) RankLine {
  std::atomic<uint32_t> turn;      // others wait for it
  std::atomic<uint32_t> sleepers;  // how many of them sleep
  std::atomic<uint32_t> busy;      // this and the next are this rank's own
  uint32_t round;
  uint64_t sums[2];  // for each half, what this rank sums: others read it once they have met
};

class RankMemory {
 public:
  explicit RankMemory(const qc_ranks& group);  // Refused: this rank is in a sum already, or has left one in the middle
  ~RankMemory();  // in the middle of a round: who is out of step with the others does not sum again
  RankMemory(const RankMemory&) = delete;
  RankMemory& operator=(const RankMemory&) = delete;

  static int64_t room_of(const qc_ranks& group);  // bytes of half a slot, a multiple of 64; below 1: there is none

  void begin_round(int64_t left, int dtype);  // left: how many numbers are still to be summed, with those of this round
  void meet();  // says that this rank has come, and returns when all have. Refused: one does not come
  void agree();  // once all have met in a round. Refused, all of them: one sums something else
  void end_round() { is_open_ = false; }
  char* slot(int rank) const;  // the half of this round

  const qc_ranks& group;
  const int64_t room;

 private:
  RankLine& line(int rank) const { return static_cast<RankLine*>(group.memory)[rank]; }
  RankLine& own() const { return line(group.rank); }
  uint64_t summed_by(int rank) const { return line(rank).sums[own().round]; }

  bool is_open_ = false;  // a round
};

}  // namespace quire
