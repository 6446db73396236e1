#include "mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "failure.h"

namespace rowstream {

Mapping::Mapping(const TableFile& file) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_ = (static_cast<size_t>(file.identity().size) + page - 1) / page * page;
  void* at = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (at == MAP_FAILED) throw ReadFailure(errno, file.path());
  data_ = static_cast<const std::byte*>(at);
  // read-ahead would fetch hundreds of kilobytes for a row of 160 bytes
  if (madvise(at, size_, MADV_RANDOM) != 0) {
    const int code = errno;
    munmap(at, size_);
    throw ReadFailure(code, file.path());
  }
  // One touch must not map 2 MiB of page cache. Refused (EINVAL) where the kernel has no such
  // pages.
  (void)madvise(at, size_, MADV_NOHUGEPAGE);
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}

}  // namespace rowstream
