#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "pause.h"

namespace quire {
namespace {

constexpr int kSpins = 4000;  // some tens of microseconds: longer than between two calls of a step

// `ticket` is (generation << 32 | next item): a late thread cannot take a piece of a job that it did not see begin.
struct Pool {
  std::mutex one_job;
  std::atomic<unsigned> generation{0};
  std::atomic<unsigned long long> ticket{0};
  std::atomic<int> items{0}, inside{0}, stop{0};
  std::atomic<bool> failed{false};
  Work work = nullptr;
  void* context = nullptr;
  std::vector<std::thread> crew;

  void take_part(unsigned mine) {
    for (;;) {
      unsigned long long seen = ticket.load();
      if (unsigned(seen >> 32) != mine || int(seen & 0xffffffffu) >= items.load()) return;
      if (!ticket.compare_exchange_weak(seen, seen + 1)) continue;
      try {
        work(context, int(seen & 0xffffffffu));
      } catch (...) {  // no memory: whoever waits for the job is told when all have left it
        failed.store(true);
      }
    }
  }

  void serve() {
    unsigned seen = 0;
    for (;;) {
      int spins = 0;
      while (generation.load(std::memory_order_acquire) == seen && ++spins < kSpins) pause_briefly();
      while (generation.load(std::memory_order_acquire) == seen) generation.wait(seen);
      inside.fetch_add(1, std::memory_order_acq_rel);
      seen = generation.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_acquire)) return;
      take_part(seen);
      inside.fetch_sub(1, std::memory_order_release);
    }
  }

  void run(int count, Work function, void* argument) {
    while (inside.load(std::memory_order_acquire)) pause_briefly();  // late threads of the job before
    unsigned next = generation.load(std::memory_order_relaxed) + 1;
    unsigned long long first = static_cast<unsigned long long>(next) << 32;
    ticket.store(first | 0x7fffffff);  // nothing to take, and the old ticket is void before `items` changes
    work = function, context = argument;
    items.store(count);
    ticket.store(first);
    generation.store(next, std::memory_order_release);
    generation.notify_all();
    take_part(next);
    for (int spins = 0; inside.load(std::memory_order_acquire); ++spins) {
      if (spins < kSpins) pause_briefly();
      else std::this_thread::yield();
    }
    if (failed.exchange(false)) throw std::bad_alloc();
  }

  ~Pool() {
    stop.store(1, std::memory_order_release);
    generation.fetch_add(1, std::memory_order_release);
    generation.notify_all();
    for (std::thread& thread : crew) thread.join();
  }
};

std::mutex changing;
Pool* pool = nullptr;  // not destroyed at exit: a thread may still run then
int wanted = 1;

// A child has none of its parent's threads.
void in_child() {
  pool = nullptr;
  new (&changing) std::mutex;
}

Pool* current() {
  std::lock_guard<std::mutex> hold(changing);
  if (pool == nullptr) {
    static bool once = pthread_atfork(nullptr, nullptr, in_child) == 0;
    (void)once;
    pool = new Pool;
    for (int i = 1; i < wanted; ++i) pool->crew.emplace_back([p = pool] { p->serve(); });
  }
  return pool;
}

}  // namespace

void set_threads(int count) {
  std::lock_guard<std::mutex> hold(changing);
  if (count < 1) count = 1;
  if (count == wanted) return;
  delete pool;
  pool = nullptr;
  wanted = count;
}

int threads() { return wanted; }

void run(int items, Work work, void* context) {
  if (items > 1 && wanted > 1) {
    Pool* here = current();
    std::unique_lock<std::mutex> alone(here->one_job, std::try_to_lock);
    if (alone.owns_lock()) return here->run(items, work, context);
  }
  for (int i = 0; i < items; ++i) work(context, i);  // one thread, or the pool is at work for somebody else
}

}  // namespace quire
