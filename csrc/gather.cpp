#include "gather.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

#include "failure.h"

namespace rowstream {
namespace {

constexpr auto kPollEvery = std::chrono::milliseconds(50);
constexpr int kPollCopies = 4096;
// after a signal or a failure, what is in flight gets so long to end before its
// lane is parked
constexpr auto kDrainFor = std::chrono::seconds(1);
// EINTR and EAGAIN are the kernel's "not now": a few are tried at once, more
// after a pause
constexpr unsigned kEagerAttempts = 16;
constexpr auto kPause = std::chrono::milliseconds(1);
// short reads in a row that brought nothing new: a direct read cannot start
// where one ended
constexpr unsigned kMaxShort = 8;
constexpr uint32_t kCacheLine = 64;
// of a row; the rest of a long one the processor foresees by itself
constexpr uint32_t kExpectBytes = 256;

// errors of a medium or a transport, which another try or another path may not
// meet
bool may_pass(int code) {
  return code == EIO || code == ENODATA || code == EREMOTEIO || code == EILSEQ ||
         code == ETIMEDOUT || code == ENOMEM;
}

}  // namespace

Gather::Gather(Source& source, Plan& plan, std::span<const uint32_t> alignments, ReadPolicy policy,
               Counters& counters, std::byte* out)
    : source_(source),
      plan_(plan),
      alignments_(alignments),
      policy_(policy),
      counters_(counters),
      out_(out) {}

void Gather::run(Lane& first, const std::function<Lane&()>& replace, const Poll& poll,
                 const Limit& limit) {
  for (const uint32_t row : plan_.missing()) {
    std::memset(out_ + size_t{row} * source_.row_bytes, 0, source_.row_bytes);
  }
  Lane* lane = &first;
  Clock::time_point next_poll = Clock::now() + kPollEvery;
  give_up_at_ = Clock::now() + policy_.timeout;
  for (;;) {
    const unsigned depth = limit ? std::min(limit(), lane->depth()) : lane->depth();
    feed(*lane, depth);
    if (lane->in_flight() == 0) break;
    bool arrived = false;
    try {
      arrived = reap(*lane, depth);
    } catch (const std::system_error&) {  // the ring itself is broken, reads in flight with it
      stop(std::current_exception());
      give_up_at_ = Clock::now();
    }
    const Clock::time_point now = Clock::now();
    if (arrived && !failure_) give_up_at_ = now + policy_.timeout;
    if (now >= give_up_at_ && lane->in_flight() > 0) {
      abandon(*lane);
      lane = &replace();
      give_up_at_ = Clock::now() + policy_.timeout;
    }
    if (now >= next_poll && !failure_) {
      count();
      if (poll()) stop(std::make_exception_ptr(Interrupted()));
      next_poll = now + kPollEvery;
    }
  }
  count();
  if (failure_) std::rethrow_exception(failure_);
  for (const Copy& copy : plan_.copies()) {
    if ((&copy - plan_.copies().data()) % kPollCopies == kPollCopies - 1 &&
        Clock::now() >= next_poll) {
      if (poll()) throw Interrupted();
      next_poll = Clock::now() + kPollEvery;
    }
    std::memcpy(out_ + size_t{copy.to_row} * source_.row_bytes,
                out_ + size_t{copy.from_row} * source_.row_bytes,
                size_t{copy.rows} * source_.row_bytes);
  }
  counters_.duplicate_rows += plan_.duplicate_rows();
  counters_.missing_rows += plan_.missing().size();
}

void Gather::feed(Lane& lane, unsigned limit) {
  Span span;
  while (lane.in_flight() < limit) {
    if (!apart_.empty()) {
      std::span<const Item>& items = apart_.back();
      span = plan_.merge(items, /*join=*/false);
      items = items.subspan(span.items.size());
      if (items.empty()) apart_.pop_back();
      read_.retries += 1;
    } else {
      more_ = more_ && plan_.next(span);
      if (!more_) return;
    }
    expect(span);
    if (!span.copies.empty()) span = plan_.moved(span, lane.drives()->choose(span.copies));
    push(lane, lane.take(span));
  }
}

// The rows' places in out are cold: a copy would wait for each of them, where the reads that are
// still to come hide that.
void Gather::expect(const Span& span) const {
  const uint32_t bytes = std::min(source_.row_bytes, kExpectBytes);
  for (const Item& item : span.items) {
    const std::byte* const to = out_ + size_t{item.row} * source_.row_bytes;
    for (uint32_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(to + at, 1);
  }
}

// false when no completion came
bool Gather::reap(Lane& lane, unsigned limit) {
  const unsigned in_flight = lane.in_flight();
  // In bulk a quarter of the queue per system call. At the end there is nothing
  // to submit in between: the last few are waited for at once, or each would
  // cost a wake-up of its own.
  const unsigned at_least = more_ ? std::max(1u, limit / 4) : std::max(in_flight / 2, 32u);
  const auto done = lane.wait(std::min(at_least, in_flight));
  for (const Completion& completion : done) {
    const Slot& slot = lane[completion.slot];
    try {
      // after a failure nothing is tried again: what arrives is dropped
      if (!failure_) {
        const Outcome outcome = judge(lane, completion);
        if (outcome == Outcome::kPushedAgain) continue;
        if (outcome == Outcome::kArrived) copy_rows(slot, lane.bounce_of(completion.slot));
      }
    } catch (const ReadFailure&) {
      if (try_another_copy(lane, completion.slot)) continue;
      lose(slot, std::current_exception());
    }
    lane.release(completion.slot);
  }
  return !done.empty();
}

// The reads in flight do not end. Their slots stay the kernel's; their rows are
// lost.
void Gather::abandon(Lane& lane) {
  const auto seconds = std::chrono::duration<double>(policy_.timeout).count();
  const std::string reason = no_answer_for(seconds);
  for (uint32_t number = 0; number < lane.depth() && !failure_; ++number) {
    if (!lane.busy(number)) continue;
    const Slot& slot = lane[number];
    lose(slot, std::make_exception_ptr(ReadFailure(ETIMEDOUT, source_.files[slot.span.file].path(),
                                                   slot.span.offset, slot.span.needed, slot.got,
                                                   reason)));
  }
  counters_.timeouts += 1;
}

void Gather::stop(std::exception_ptr why) {
  failure_ = std::move(why);
  more_ = false;
  apart_.clear();
  give_up_at_ = std::min(give_up_at_, Clock::now() + kDrainFor);
}

void Gather::lose(const Slot& slot, std::exception_ptr why) {
  if (failure_) return;
  counters_.read_errors += 1;
  if (policy_.on_error == OnReadError::kRaise) {
    stop(std::move(why));
    return;
  }
  for (const Item& item : slot.span.items) {
    // the whole row: of several planes, one that could not be read spoils the
    // others
    std::memset(out_ + size_t{item.row} * source_.row_bytes, 0, source_.row_bytes);
  }
  counters_.zeroed_rows += slot.span.items.size();
  lost_rows_ = true;
}

void Gather::push(Lane& lane, uint32_t number) {
  Slot& slot = lane[number];
  const TableFile& file = source_.files[slot.span.file];
  slot.direct = file.direct() && !slot.buffered;
  // what arrived is kept, but the rest must start on a block again
  const uint32_t align = alignments_[slot.span.file];
  const uint32_t skip = slot.got & ~(align - 1);
  const int fd = slot.direct ? file.fd() : file.buffered_fd();
  lane.reader().push({slot.span.offset + skip, lane.bounce_of(number) + skip,
                      slot.span.length - skip, number, slot.span.file, fd});
  read_.reads += 1;
  read_.bytes += slot.span.length - skip;
}

void Gather::count() {
  counters_.reads += read_.reads;
  counters_.read_bytes += read_.bytes;
  counters_.retries += read_.retries;
  read_ = {};
}

Gather::Outcome Gather::judge(Lane& lane, const Completion& completion) {
  Slot& slot = lane[completion.slot];
  TableFile& file = source_.files[slot.span.file];
  const int code = completion.result < 0 ? -completion.result : 0;
  if (code == 0) {
    const uint32_t align = alignments_[slot.span.file];
    const uint32_t got = (slot.got & ~(align - 1)) + static_cast<uint32_t>(completion.result);
    if (got > slot.got) slot.attempts = 0;
    slot.got = std::max(slot.got, got);
    // the last block of a file may be shorter than asked for: what the rows
    // need is there
    if (slot.got >= slot.span.needed) return Outcome::kArrived;
    // nothing, or time and again no more than before, is the end of the file
    if (completion.result == 0 || slot.attempts >= kMaxShort) {
      if (slot.span.joined) return take_apart(slot);
      fail(slot, EIO, "file ends early");
    }
  } else if (code == EINTR || code == EAGAIN) {
    if (slot.attempts >= kEagerAttempts) {
      if (slot.attempts - kEagerAttempts >= policy_.timeout / kPause) fail(slot, code);
      std::this_thread::sleep_for(kPause);
    }
  } else if ((code == EINVAL || code == EOPNOTSUPP) && slot.direct) {
    file.read_buffered(code);
  } else if (may_pass(code) && slot.span.joined) {
    return take_apart(slot);
  } else if (may_pass(code) && slot.errors < 2) {
    // once more the same way, then through the page cache, which may hold the
    // block
    slot.buffered = ++slot.errors == 2;
  } else {
    fail(slot, code);
  }
  ++slot.attempts;
  read_.retries += 1;
  push(lane, completion.slot);
  return Outcome::kPushedAgain;
}

// What failed may lie where no row is, or concern only some of the rows: each is read alone.
Gather::Outcome Gather::take_apart(const Slot& slot) {
  apart_.push_back(slot.span.items);
  return Outcome::kTakenApart;
}

// What one copy cannot give is lost only when no other one can.
bool Gather::try_another_copy(Lane& lane, uint32_t number) {
  const Slot& slot = lane[number];
  const auto copies = static_cast<uint32_t>(slot.span.copies.size());
  if (slot.bad_copies + 1 >= copies) return false;
  lane.drives()->failed(slot.span.file);
  lane.move(number, plan_.moved(slot.span, (slot.span.copy + 1) % copies));
  read_.retries += 1;
  push(lane, number);
  return true;
}

void Gather::fail(const Slot& slot, int code, std::string reason) const {
  throw ReadFailure(code, source_.files[slot.span.file].path(), slot.span.offset, slot.span.needed,
                    slot.got, std::move(reason));
}

void Gather::copy_rows(const Slot& slot, const std::byte* from) {
  for (const Item& item : slot.span.items) {
    std::memcpy(out_ + size_t{item.row} * source_.row_bytes + source_.starts[item.plane],
                from + (item.offset() + slot.span.shift - slot.span.offset),
                source_.planes[item.plane].row_bytes());
  }
}

}  // namespace rowstream
