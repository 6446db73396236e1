// What a device and the host say to each other about one lookup: a few words in memory that both
// see, every one alone on its cache lines, one writer each (the flag excepted: the host sets it,
// the stream clears it). Ordinary write-back memory; never write-combined, whose stores a release
// does not order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace rowstream {

enum class Status : uint32_t {
  kOk,
  kRead,     // the rows could not be read
  kTimeout,  // nobody answered in time
  kIds,      // an id outside the table, or a mailbox that makes no sense
  kClosed,   // the store was closed, or its thread is gone
  kMisuse,   // a ring before the last one was taken: two streams share the channel
};

struct Words {
  // what `post` leaves in the door when the channel was taken already
  static constexpr uint64_t kMisuse = ~uint64_t{0};

  alignas(128) std::atomic<uint64_t> door;    // device: the epoch of its last ring
  alignas(128) std::atomic<uint32_t> flag;    // host: 1, there is an answer; stream: 0
  alignas(128) std::atomic<uint64_t> header;  // host: whose rows these are, see header_of
  alignas(128) std::atomic<uint64_t> fault;   // device: the last void step, as a header
  std::atomic<uint32_t> faults;               // device: how many
  alignas(128) std::atomic<uint32_t> rows;    // device: ids in the mailbox

  // One word, so that no reader sees one half of it: a stale flag may let `take` read the header
  // at any time.
  static constexpr uint64_t header_of(uint64_t epoch, Status status) {
    return epoch << 8 | static_cast<uint64_t>(status);
  }
};

static_assert(offsetof(Words, door) == 0 && offsetof(Words, flag) == 128 &&
                  offsetof(Words, header) == 256 && offsetof(Words, fault) == 384 &&
                  offsetof(Words, faults) == 392 && offsetof(Words, rows) == 512 &&
                  sizeof(Words) == 640,
              "device/kernels.cu has these offsets");

// Beside a store with release, for a device too: `stlr` of aarch64 orders for other processors
// only, and stores past the cache are ordered by no release.
inline void order_stores_for_device() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#elif defined(__aarch64__)
  asm volatile("dmb oshst" ::: "memory");
#endif
}

// Beside a load with acquire: what the device wrote before the word is read after it.
inline void order_loads_from_device() {
#if defined(__aarch64__)
  asm volatile("dmb oshld" ::: "memory");
#endif
}

}  // namespace rowstream
