#include "lane.h"

#include <system_error>

namespace rowstream {

Lane::Lane(std::unique_ptr<Reader> reader, Pages bounce, unsigned depth, uint32_t row_bytes,
           uint32_t slot_bytes, Drives* drives)
    : bounce_(std::move(bounce)),
      reader_(std::move(reader)),
      row_bytes_(row_bytes),
      slot_bytes_(slot_bytes),
      drives_(drives),
      slots_(depth),
      done_(depth) {
  free_.reserve(depth);
  for (unsigned slot = depth; slot > 0; --slot) free_.push_back(slot - 1);
}

uint32_t Lane::take(const Span& span) {
  const uint32_t slot = free_.back();
  free_.pop_back();
  slots_[slot] = {span};
  slots_[slot].busy = true;
  if (drives_ != nullptr) drives_->began(span.file);
  return slot;
}

void Lane::move(uint32_t slot, const Span& span) {
  const unsigned bad = slots_[slot].bad_copies + 1;
  release(slot);
  take(span);  // the one that has just become free
  slots_[slot].bad_copies = bad;
}

void Lane::release(uint32_t slot) {
  if (drives_ != nullptr) drives_->ended(slots_[slot].span.file);
  slots_[slot].busy = false;
  free_.push_back(slot);
}

std::span<const Completion> Lane::wait(unsigned at_least) {
  return std::span(done_).first(reader_->wait(at_least, done_));
}

bool Lane::drained() {
  try {
    for (const Completion& completion : wait(0)) release(completion.slot);
  } catch (const std::system_error&) {
    return false;  // a broken ring; its reads may be in flight for ever
  }
  return in_flight() == 0;
}

size_t Lane::memory_bytes() const {
  return bounce_.size() + reader_->memory_bytes() + slots_.size() * sizeof(Slot) +
         done_.size() * sizeof(Completion);
}

}  // namespace rowstream
