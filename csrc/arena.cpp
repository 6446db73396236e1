#include "arena.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <thread>

#include "cpus.h"

namespace rowstream {

Arena::Arena(size_t bytes, const std::vector<int>& cpus) : pages_(bytes, "rowstream channels") {
  free_[0] = pages_.size();
  std::thread([&] {
    run_on(cpus);
    std::memset(pages_.data(), 0, pages_.size());
  }).join();
}

size_t Arena::used() const {
  const std::lock_guard lock(mutex_);
  return std::accumulate(taken_.begin(), taken_.end(), size_t{0},
                         [](size_t sum, const auto& block) { return sum + block.second; });
}

size_t Arena::largest_free() const {
  const std::lock_guard lock(mutex_);
  size_t largest = 0;
  for (const auto& block : free_) largest = std::max(largest, block.second);
  return largest;
}

std::byte* Arena::take(size_t bytes) {
  const size_t wanted = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(free_.begin(), free_.end(),
                                  [&](const auto& block) { return block.second >= wanted; });
  if (found == free_.end()) return nullptr;
  const auto [offset, size] = *found;
  free_.erase(found);
  if (size > wanted) free_[offset + wanted] = size - wanted;
  taken_[offset] = wanted;
  return pages_.data() + offset;
}

void Arena::give_back(std::byte* block) {
  const std::lock_guard lock(mutex_);
  const auto taken = taken_.find(static_cast<size_t>(block - pages_.data()));
  auto [at, inserted] = free_.insert(*taken);
  taken_.erase(taken);
  if (const auto next = std::next(at);
      next != free_.end() && at->first + at->second == next->first) {
    at->second += next->second;
    free_.erase(next);
  }
  if (at == free_.begin()) return;
  if (const auto before = std::prev(at); before->first + before->second == at->first) {
    before->second += at->second;
    free_.erase(at);
  }
}

}  // namespace rowstream
