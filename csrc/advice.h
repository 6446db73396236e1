// Tells the kernel which rows of a mapping are wanted next, so that those it must read are read
// together and not fault by fault. Whether a table's rows are in the page cache is learned from
// the kernel's count of this thread's reads: asking page by page costs more than the advice.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "mapping.h"

namespace rowstream {

// all threads of a table share one
class Advice {
 public:
  Advice();
  ~Advice();
  Advice(const Advice&) = delete;
  Advice& operator=(const Advice&) = delete;

  // whether rows lately had to be read
  bool worth_it() const { return warm_rows_.load(std::memory_order_relaxed) < kWarmRows; }

  // Asks for the pages of some ranges; returns before they are there. As many ranges at a time
  // as one system call takes.
  class Batch {
   public:
    explicit Batch(Advice& advice) : advice_(advice) {}
    ~Batch() { send(); }
    void add(const std::byte* data, size_t bytes);

   private:
    static constexpr size_t kRanges = 512;
    struct Range {  // the kernel's struct iovec
      uintptr_t begin;
      size_t bytes;
    };
    void send();

    Advice& advice_;
    size_t count_ = 0;
    Range ranges_[kRanges];
  };

  // That many rows were copied by this thread, which has read for them what it had to. What else
  // it has read counts as well, and costs no more than advice that was not needed.
  void learn(size_t rows);

  uint64_t failures() const { return failures_.load(std::memory_order_relaxed); }

 private:
  // rows found in the page cache in a row until advice ends: one chunk of a prompt, or a thousand
  // tokens
  static constexpr uint32_t kWarmRows = 16'384;
  // between two questions to the kernel, each of which costs as much as copying two rows
  static constexpr uint32_t kLearnRows = 256;

  const uintptr_t page_mask_;
  const int self_;  // a pidfd, -1: one call for each range
  std::atomic<bool> batched_;
  std::atomic<uint32_t> warm_rows_{0};
  std::atomic<size_t> copied_{0};  // since the last question
  std::atomic<uint64_t> failures_{0};
};

}  // namespace rowstream
