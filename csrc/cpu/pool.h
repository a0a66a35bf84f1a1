// A small pool of threads that share one job at a time. A job is `items` pieces of work; threads take pieces one by one,
// so that a core somebody else uses delays only the piece it holds.
#pragma once

namespace quire {

void set_threads(int threads);
int threads();

typedef void (*Work)(void* context, int item);
void run(int items, Work work, void* context);

// run() for a callable (int item) -> void.
template <class F>
void each(int items, F& work) {
  run(items, [](void* context, int item) { (*static_cast<F*>(context))(item); }, &work);
}

}  // namespace quire
