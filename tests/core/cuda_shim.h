// What device/kernels.cu takes from CUDA, for a compiler of the host: the blocks of a launch run
// one after the other, the threads of a block beside each other.
#pragma once

#include <pthread.h>

#include <chrono>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // of one block at a time

struct Place {
  unsigned x;
};
static thread_local Place threadIdx, blockIdx, blockDim, gridDim;
static pthread_barrier_t barrier;

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

template <class T>
static T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
static T max(T a, T b) {
  return a < b ? b : a;
}

extern "C" {
// called by each fence of the system's scope: what another stream may do meanwhile
void (*at_fence)() = nullptr;
// loads and stores at an address that no GPU takes; -fsanitize=alignment calls the function below
unsigned misaligned = 0;
void __ubsan_handle_type_mismatch_v1(void*, void*) {
  __atomic_fetch_add(&misaligned, 1, __ATOMIC_RELAXED);
}
}

static inline void __syncthreads() {
  if (blockDim.x > 1) pthread_barrier_wait(&barrier);
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() {
  __threadfence();
  if (at_fence != nullptr) at_fence();
}
static inline void __nanosleep(unsigned) { std::this_thread::yield(); }
static inline unsigned long long globaltimer() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

static inline unsigned atomicExch(unsigned* at, unsigned value) {
  return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);
}
static inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
static inline unsigned atomicInc(unsigned* at, unsigned last) {
  unsigned was = __atomic_load_n(at, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(at, &was, was >= last ? 0 : was + 1, false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST)) {
  }
  return was;
}

// Every argument in eight bytes of its own, as a driver has them. On the 64-bit ABIs of Linux a
// function ignores what is above its own arguments, and above the low half of a 32-bit one.
using Word = unsigned long long;
using Kernel = void(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word);

extern "C" void launch(Kernel* kernel, unsigned blocks, unsigned threads, const Word* a) {
  const auto run = [=](unsigned block, unsigned thread) {
    threadIdx.x = thread, blockDim.x = threads;
    blockIdx.x = block, gridDim.x = blocks;
    kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12]);
  };
  for (unsigned block = 0; block < blocks; block++) {
    pthread_barrier_init(&barrier, nullptr, threads);
    std::vector<std::thread> others;
    for (unsigned thread = 1; thread < threads; thread++) others.emplace_back(run, block, thread);
    run(block, 0);
    for (std::thread& other : others) other.join();
    pthread_barrier_destroy(&barrier);
  }
}
