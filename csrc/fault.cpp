#include "fault.h"

#include <algorithm>
#include <cstring>

namespace rowstream {

FaultReader::FaultReader(std::unique_ptr<Reader> inner, std::vector<Fault> faults, unsigned depth)
    : inner_(std::move(inner)), faults_(std::move(faults)), pending_(depth) {}

void FaultReader::push(const Read& read) {
  const uint64_t number = pushed_++;
  const auto hit = std::find_if(faults_.begin(), faults_.end(), [number](const Fault& fault) {
    return number >= fault.first && number - fault.first < fault.count;
  });
  pending_[read.slot] = {read, hit == faults_.end() ? nullptr : &*hit};
  inner_->push(read);
}

size_t FaultReader::wait(unsigned at_least, std::span<Completion> done) {
  const size_t count = inner_->wait(at_least, done);
  for (Completion& completion : done.first(count)) {
    const Pending& pending = pending_[completion.slot];
    if (pending.fault == nullptr || completion.result < 0) continue;
    completion.result = std::min(completion.result, pending.fault->result);
    // what did not arrive must not be there by luck
    const size_t kept = completion.result > 0 ? static_cast<size_t>(completion.result) : 0;
    std::memset(pending.read.into + kept, 0xA5, pending.read.length - kept);
  }
  return count;
}

}  // namespace rowstream
