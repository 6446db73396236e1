// Row ids in, rows out: a table on disk read through a reader. Plans a piece, keeps every
// bounce slot busy, copies each row to its place, and decides what a short read or an error
// means. Any thread may call; one gather runs at a time.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "extent.h"
#include "fault.h"
#include "file.h"
#include "memory.h"
#include "plan.h"
#include "reader.h"

namespace rowstream {

struct PlaneSpec {
  uint32_t row_bytes;
  std::vector<Extent> extents;
};

// asked every now and then; true ends the gather with Interrupted
using Poll = bool (*)();

struct Counters {
  std::atomic<uint64_t> gathers{0};
  std::atomic<uint64_t> rows{0};
  std::atomic<uint64_t> duplicate_rows{0};  // rows that another one of the same piece served
  std::atomic<uint64_t> missing_rows{0};    // id -1
  std::atomic<uint64_t> reads{0};
  std::atomic<uint64_t> read_bytes{0};
  std::atomic<uint64_t> retries{0};
  std::atomic<uint64_t> gather_ns{0};
};

// row bytes of all planes, one after the other
uint32_t total_row_bytes(const std::vector<Plane>& planes);
std::vector<Plane> make_planes(std::vector<PlaneSpec> specs);
// throws std::invalid_argument where an extent ends past its file
void check_extents(const std::vector<Plane>& planes, const std::vector<TableFile>& files);

class DiskTable {
 public:
  struct Options {
    std::string reader = "auto";
    unsigned queue_depth = 128;
    bool direct = true;
    std::vector<Fault> faults;
  };

  DiskTable(const std::vector<std::string>& paths, std::vector<PlaneSpec> planes,
            const Options& options);
  ~DiskTable();
  DiskTable(const DiskTable&) = delete;
  DiskTable& operator=(const DiskTable&) = delete;

  int64_t num_rows() const { return planes_.front().num_rows(); }
  uint32_t row_bytes() const { return row_bytes_; }
  const std::vector<TableFile>& files() const { return files_; }
  const Counters& counters() const { return counters_; }
  std::string reader_name() const { return reader_name_; }
  std::string reader_note() const { return reader_note_; }
  unsigned queue_depth() const { return depth_; }
  size_t memory_bytes() const { return memory_bytes_; }

  // out: tokens * heads rows of row_bytes() each. Every id is checked before the first read.
  // Throws std::out_of_range, ReadFailure, Interrupted, ClosedError, ForkedError; after any of
  // them the contents of out are undefined and the next gather works.
  void gather(const Batch& batch, std::byte* out, Poll poll);
  void close();

 private:
  struct Slot {
    Span span;
    uint32_t got = 0;  // bytes from span.offset that have arrived
    unsigned attempts = 0;
    bool direct = false;  // as it was pushed: the file may have been downgraded since
  };

  void gather_piece(const Batch& batch, std::byte* out, Poll poll);
  size_t wait(unsigned at_least);
  void abandon();
  void push(uint32_t slot);
  // true when the slot's span is complete; false when it was pushed again
  bool complete(const Completion& completion);
  void copy_rows(const Slot& slot, const std::byte* from, std::byte* out) const;
  std::byte* bounce_of(uint32_t slot) const { return bounce_.data() + size_t{slot} * slot_bytes_; }

  std::vector<Plane> planes_;
  std::vector<uint32_t> plane_starts_;  // where a plane's bytes begin in an output row
  uint32_t row_bytes_;
  unsigned depth_;
  unsigned forks_;
  std::vector<TableFile> files_;
  std::vector<int> registered_;  // the descriptors that the reader was made with
  std::vector<uint32_t> alignments_;
  uint32_t slot_bytes_ = 0;
  Pages bounce_;
  std::unique_ptr<Plan> plan_;
  std::unique_ptr<Reader> reader_;
  std::string reader_name_;
  std::string reader_note_;
  size_t memory_bytes_ = 0;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::vector<Completion> done_;
  std::mutex mutex_;
  Counters counters_;
};

}  // namespace rowstream
