// The contract of everything that fetches spans: io_uring, a pool of threads,
// the calling thread itself, and the fault-injecting reader that tests put
// before any of them. A reader moves
// bytes and reports raw results (a count or -errno); what a short read or an
// error means is decided in gather.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "file.h"

namespace rowstream {

struct Read {
  uint64_t offset;
  std::byte* into;
  uint32_t length;
  uint32_t slot;  // comes back with the completion; one read per slot at a time
  uint32_t file;  // index of the file, for readers that registered its descriptor
  int fd;
};

struct Completion {
  uint32_t slot;
  int32_t result;  // bytes read, or -errno
};

// One owner at a time (the table's lock). `into` must stay alive until the
// completion came.
class Reader {
 public:
  virtual ~Reader() = default;
  virtual const char* name() const = 0;
  // queues a read; at most `depth` are in flight. Nothing may reach the kernel
  // before wait().
  virtual void push(const Read& read) = 0;
  // Submits what was pushed and returns up to done.size() completions: at least
  // `at_least`, fewer when a signal came or 100 ms went by, so that the caller
  // can look at its poll.
  virtual size_t wait(unsigned at_least, std::span<Completion> done) = 0;
  virtual size_t memory_bytes() const = 0;
};

struct ReaderOptions {
  std::string name = "auto";  // auto, uring, pool, inline
  unsigned depth = 128;
  std::span<std::byte> bounce;  // every `into` lies here; empty: anywhere
  std::vector<int> files;       // descriptors worth registering
};

struct ReaderChoice {
  std::unique_ptr<Reader> reader;
  std::string note;  // why it is this one
};

// "uring" throws Unavailable where io_uring cannot run; "auto" falls back to
// the pool, and reads tmpfs inline.
ReaderChoice make_reader(const ReaderOptions& options, bool on_tmpfs);

}  // namespace rowstream
