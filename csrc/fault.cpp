#include "fault.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace rowstream {

const Fault* FaultSchedule::next(const Read& read) {
  const uint64_t number = pushed_++;
  for (const Fault& fault : faults_) {
    const bool hit = fault.at ? *fault.at >= read.offset && *fault.at - read.offset < read.length
                              : number >= fault.first && number - fault.first < fault.count;
    if (hit) return &fault;
  }
  return nullptr;
}

FaultReader::FaultReader(std::unique_ptr<Reader> inner, std::shared_ptr<FaultSchedule> schedule,
                         unsigned depth)
    : inner_(std::move(inner)), schedule_(std::move(schedule)), pending_(depth) {}

void FaultReader::push(const Read& read) {
  pending_[read.slot] = {read, schedule_->next(read)};
  inner_->push(read);
}

size_t FaultReader::wait(unsigned at_least, std::span<Completion> done) {
  // what is held back must not be waited for inside
  const size_t arrived = inner_->wait(held_.empty() ? at_least : 0, done);
  size_t count = 0;
  for (Completion completion : done.first(arrived)) {
    const auto& [read, fault] = pending_[completion.slot];
    if (fault != nullptr && fault->result && completion.result >= 0) {
      completion.result = std::min(completion.result, *fault->result);
      // what did not arrive must not be there by luck
      const size_t kept = completion.result > 0 ? static_cast<size_t>(completion.result) : 0;
      std::memset(read.into + kept, 0xA5, read.length - kept);
    }
    if (fault != nullptr && fault->delay_ms > 0) {
      held_.push_back({completion, Clock::now() + std::chrono::milliseconds(fault->delay_ms)});
    } else if (fault == nullptr || fault->delay_ms == 0) {
      done[count++] = completion;
    }  // else it never ends
  }
  const Clock::time_point now = Clock::now();
  for (size_t i = 0; i < held_.size() && count < done.size();) {
    if (held_[i].until > now) {
      ++i;
      continue;
    }
    done[count++] = held_[i].completion;
    held_.erase(held_.begin() + static_cast<ptrdiff_t>(i));
  }
  if (count == 0 && at_least > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return count;
}

}  // namespace rowstream
