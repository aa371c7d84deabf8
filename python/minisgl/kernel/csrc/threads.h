// The threads of the kernels: each thread that calls them has workers of its own, which help it.
//
// A decode step is some 110 calls, a few microseconds apart. Waking a thread that sleeps takes 20 to
// 60 us on a virtual machine, so a worker that has nothing to do spins for about that long before it
// sleeps. libgomp spins for 2 to 5 us where a process has more threads than cores, as an engine has.
//
// The caller waits for workers that have begun, and not for those that got no core: all work is taken
// from counters, so the threads that are there do it. Where workers keep losing their cores to another
// process in the middle of their work, spinning would only use up their share of the cores: for some
// calls workers then sleep early, so that they are woken with a fresh share. A server's own processes
// take a core for a moment in each step; waking workers in each call would cost more than that.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

class Workers {
 public:
  // Calls f(0) here and f(1) to f(count - 1) in workers, those that come in time. Throws what f throws.
  template <class F>
  void run(int count, F& f) {
    while (int(threads_.size()) < count - 1) {
      const int index = int(threads_.size()) + 1;
      try {
        threads_.emplace_back([this, index, seen = call_.load()] { serve(index, seen); });
      } catch (const std::system_error&) {  // no more threads or no memory for them: fewer do the work
        break;
      }
    }
    task_ = [](void* f, int index) { (*static_cast<F*>(f))(index); };
    context_ = &f, count_ = count, error_ = nullptr;
    if (num_crowded_ > 0) num_crowded_--;
    gate_.store(0, std::memory_order_release);
    call_.fetch_add(1);
    if (num_asleep_.load()) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    {
      const Closing closing{*this};
      f(0);
    }
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  ~Workers() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds SPIN{50};  // as long as a wake
  static constexpr std::chrono::microseconds CROWDED_SPIN{5};
  static constexpr std::chrono::milliseconds LATE{2};  // longer than items, as long as a turn of others
  static constexpr int LATE_SHARE = 10;  // of the time: what waking workers in each call takes
  static constexpr int CROWDED_CALLS = 1000;           // some steps
  static constexpr int CLOSED = 1 << 30;

  struct Closing {  // also where f throws
    Workers& workers;
    ~Closing() {
      workers.gate_.fetch_or(CLOSED);
      const auto all_left = [&] { return workers.gate_.load() == CLOSED; };
      if (workers.spin_until(all_left)) return;
      const auto start = Clock::now();
      std::unique_lock<std::mutex> lock(workers.mutex_);
      workers.waits_ = true;
      workers.left_.wait(lock, all_left);
      workers.waits_ = false;
      const auto end = Clock::now();
      if (end - start <= LATE) return;
      if ((end - start) * LATE_SHARE > end - workers.last_late_) workers.num_crowded_ = CROWDED_CALLS;
      workers.last_late_ = end;
    }
  };

  void serve(int index, uint32_t seen) {
    const auto is_called = [&] { return stop_ || call_.load() != seen; };
    for (;;) {
      if (!spin_until(is_called)) {
        std::unique_lock<std::mutex> lock(mutex_);
        num_asleep_++;
        wake_.wait(lock, is_called);
        num_asleep_--;
      }
      if (stop_) return;
      seen = call_.load();
      int inside = gate_.load();
      while (!(inside & CLOSED) && !gate_.compare_exchange_weak(inside, inside + 1)) continue;
      if (inside & CLOSED) continue;
      try {
        if (index < count_) task_(context_, index);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex_);
        error_ = std::current_exception();
      }
      if (gate_.fetch_sub(1) == CLOSED + 1 && waits_) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        left_.notify_one();
      }
    }
  }

  // Whether `is_true` became true in time.
  template <class F>
  bool spin_until(F is_true) const {
    const auto end = Clock::now() + (num_crowded_ > 0 ? CROWDED_SPIN : SPIN);
    do {
      for (int i = 0; i < 8; i++) {
        if (is_true()) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
      }
    } while (Clock::now() < end);
    return is_true();
  }

  void (*task_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int count_ = 0;
  std::exception_ptr error_;  // of a worker
  alignas(64) std::atomic<uint32_t> call_{0};
  alignas(64) std::atomic<int> gate_{CLOSED};  // how many workers are in the call, and CLOSED after it
  std::atomic<int> num_asleep_{0}, num_crowded_{0};
  Clock::time_point last_late_{};
  std::atomic<bool> stop_{false}, waits_{false};
  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::vector<std::thread> threads_;
};

inline thread_local std::unique_ptr<Workers> own_workers;

#if defined(__unix__) || defined(__APPLE__)
// A fork has the object and not its threads, which may have held its mutex: the fork forgets it.
inline const int forgets_in_forks = pthread_atfork(nullptr, nullptr, [] { (void)own_workers.release(); });
#endif

inline Workers& workers() {
  if (!own_workers) own_workers = std::make_unique<Workers>();
  return *own_workers;
}

// Calls f(item) for items 0 to count - 1. A thread takes those of an equal share in order, so that it
// can ask for the next item's bytes; then what is left of other shares, which slower threads leave.
template <class F>
void each_item(int64_t count, int64_t num_threads, F f) {
  num_threads = std::max<int64_t>(std::min(num_threads, count), 1);
  struct alignas(64) Next {
    std::atomic<int64_t> item;
  };
  std::vector<Next> next(num_threads);
  for (int64_t i = 0; i < num_threads; i++) next[i].item = count * i / num_threads;
  // noinline: f is large, and there are two calls
  auto take = [&](int thread) __attribute__((noinline)) {
    for (int64_t i = 0; i < num_threads; i++) {
      const int64_t share = (thread + i) % num_threads, end = count * (share + 1) / num_threads;
      for (int64_t item; (item = next[share].item++) < end;) f(item);
    }
  };
  num_threads == 1 ? take(0) : workers().run(int(num_threads), take);
}
