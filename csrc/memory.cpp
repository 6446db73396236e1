#include "memory.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

#include "fork.h"

#ifndef PR_SET_VMA  // Linux 5.17
#define PR_SET_VMA 0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif

namespace rowstream {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Pages::Pages(size_t bytes, const char* name) : Pages(bytes, name, 0) {}

Pages Pages::huge(size_t bytes, const char* name) { return Pages(bytes, name, kHugePage); }

Pages::Pages(size_t bytes, const char* name, size_t alignment) : forks_(fork_generation()) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes > SIZE_MAX - page - alignment) {
    throw std::system_error(ENOMEM, std::system_category(), name);
  }
  size_ = (bytes + page - 1) / page * page;
  if (size_ == 0) return;
  void* at =
      mmap(nullptr, size_ + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) {
    throw std::system_error(errno, std::system_category(),
                            std::string(name) + ": " + std::to_string(size_) + " bytes");
  }
  data_ = static_cast<std::byte*>(at);
  if (alignment > 0) {
    // what lies before and behind is given back
    const size_t lead = (alignment - reinterpret_cast<uintptr_t>(at) % alignment) % alignment;
    if (lead > 0) munmap(data_, lead);
    data_ += lead;
    if (lead < alignment) munmap(data_ + size_, alignment - lead);
    (void)madvise(data_, size_, MADV_HUGEPAGE);  // EINVAL where the kernel has no such pages
  }
  madvise(data_, size_, MADV_DONTFORK);
  prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, data_, size_,
        name);  // best effort: old kernels refuse
}

Pages::~Pages() {
  // in a forked child the range was never ours, and may be somebody else's by
  // now
  if (data_ != nullptr && forks_ == fork_generation()) munmap(data_, size_);
}

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      forks_(other.forks_) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(forks_, other.forks_);
  return *this;
}

}  // namespace rowstream
