// A reader together with its bounce slots: what a gather drives, and what is
// parked when a read never ends. One owner at a time.
#pragma once

#include <memory>
#include <vector>

#include "drives.h"
#include "memory.h"
#include "plan.h"
#include "reader.h"

namespace rowstream {

// a span on its way: which bytes have arrived, and what has been tried
struct Slot {
  Span span;
  uint32_t got = 0;         // bytes from span.offset that have arrived
  unsigned attempts = 0;    // in a row, without a new byte
  unsigned errors = 0;      // real errors, as opposed to "not now"
  bool direct = false;      // as it was pushed: the file may have been downgraded since
  bool buffered = false;    // direct reads of it failed
  unsigned bad_copies = 0;  // that could not be read
  bool busy = false;
};

class Lane {
 public:
  // A slot has room for a span of slot_bytes. One of row_bytes, of a single row that is, has its
  // own that lies closer to the others: far apart, the sixteen reads of a token took 3 % longer.
  // drives: where some rows have copies.
  Lane(std::unique_ptr<Reader> reader, Pages bounce, unsigned depth, uint32_t row_bytes,
       uint32_t slot_bytes, Drives* drives);

  static size_t bounce_bytes(unsigned depth, uint32_t row_bytes, uint32_t slot_bytes) {
    return depth * (size_t{row_bytes} + (slot_bytes > row_bytes ? slot_bytes : 0));
  }

  Reader& reader() { return *reader_; }
  unsigned depth() const { return static_cast<unsigned>(slots_.size()); }
  uint32_t slot_bytes() const { return slot_bytes_; }
  unsigned in_flight() const { return depth() - static_cast<unsigned>(free_.size()); }

  // where rows have copies, else nothing
  Drives* drives() { return drives_; }

  uint32_t take(const Span& span);
  // the slot goes on with another copy of its rows
  void move(uint32_t slot, const Span& span);
  void release(uint32_t slot);
  bool busy(uint32_t slot) const { return slots_[slot].busy; }
  Slot& operator[](uint32_t slot) { return slots_[slot]; }
  std::byte* bounce_of(uint32_t slot) const {
    if (slots_[slot].span.length <= row_bytes_) return bounce_.data() + size_t{slot} * row_bytes_;
    return bounce_.data() + size_t{depth()} * row_bytes_ + size_t{slot} * slot_bytes_;
  }

  // completions of pushed reads, as Reader::wait; valid until the next call
  std::span<const Completion> wait(unsigned at_least);

  // Nobody wants the reads in flight any more: collects what has ended, true
  // when all have.
  bool drained();
  size_t memory_bytes() const;

 private:
  // in this order: the reader ends before the memory that it writes to
  Pages bounce_;
  std::unique_ptr<Reader> reader_;
  uint32_t row_bytes_;
  uint32_t slot_bytes_;
  Drives* drives_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::vector<Completion> done_;
};

}  // namespace rowstream
