#include "resident.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>

#include "failure.h"
#include "fork.h"

namespace rowstream {
namespace {

constexpr size_t kLoadBytes = size_t{8} << 20;
constexpr size_t kPollRows = 65'536;

// all of it or ReadFailure
void read_fully(const TableFile& file, uint64_t offset, std::byte* into, size_t bytes) {
  size_t got = 0;
  while (got < bytes) {
    const ssize_t n = pread(file.fd(), into + got, bytes - got, static_cast<off_t>(offset + got));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw ReadFailure(n < 0 ? errno : 0, file.path(), offset, bytes, got);
    got += static_cast<size_t>(n);
  }
}

}  // namespace

Mapping::Mapping(const TableFile& file) : size_(static_cast<size_t>(file.identity().size)) {
  void* at = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (at == MAP_FAILED) throw ReadFailure(errno, file.path());
  data_ = static_cast<const std::byte*>(at);
  // read-ahead would fetch hundreds of kilobytes for a row of 160 bytes
  if (madvise(at, size_, MADV_RANDOM) != 0) {
    const int code = errno;
    munmap(at, size_);
    throw ReadFailure(code, file.path());
  }
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}

ResidentTable::ResidentTable(const std::vector<std::string>& paths, std::vector<PlaneSpec> planes,
                             Kind kind, Poll poll)
    : kind_(kind),
      planes_(make_planes(std::move(planes))),
      row_bytes_(total_row_bytes(planes_)),
      forks_(fork_generation()) {
  for (const std::string& path : paths) files_.emplace_back(path, /*direct=*/false);
  check_extents(planes_, files_);
  if (kind_ == Kind::kMapped) {
    mappings_.reserve(files_.size());
    for (const TableFile& file : files_) mappings_.emplace_back(file);
  } else {
    load(poll);
  }
}

void ResidentTable::load(Poll poll) {
  for (const TableFile& file : files_) posix_fadvise(file.fd(), 0, 0, POSIX_FADV_SEQUENTIAL);
  for (const Plane& plane : planes_) {
    Pages& pages = loaded_.emplace_back(static_cast<size_t>(plane.num_rows()) * plane.row_bytes(),
                                        "rowstream table");
    for (const Extent& extent : plane.extents()) {
      const TableFile& file = files_[extent.file];
      std::byte* into = pages.data() + static_cast<size_t>(extent.first_row) * plane.row_bytes();
      const size_t bytes = static_cast<size_t>(extent.num_rows) * plane.row_bytes();
      for (size_t at = 0; at < bytes; at += kLoadBytes) {
        const size_t part = std::min(kLoadBytes, bytes - at);
        read_fully(file, extent.offset + at, into + at, part);
        // the copy is ours now; the page cache need not hold a second one
        posix_fadvise(file.fd(), static_cast<off_t>(extent.offset + at), static_cast<off_t>(part),
                      POSIX_FADV_DONTNEED);
        if (poll()) throw Interrupted();
      }
    }
  }
}

size_t ResidentTable::memory_bytes() const {
  size_t bytes = 0;
  for (const Pages& pages : loaded_) bytes += pages.size();
  return bytes;
}

const std::byte* ResidentTable::address(size_t plane, int64_t row) const {
  if (kind_ == Kind::kLoaded) {
    return loaded_[plane].data() + static_cast<size_t>(row) * planes_[plane].row_bytes();
  }
  const Location at = planes_[plane].locate(row);
  return mappings_[at.file].data() + at.offset;
}

void ResidentTable::gather(const Batch& batch, std::byte* out, Poll poll) {
  if (forks_ != fork_generation()) throw ForkedError("table was opened before fork");
  const std::shared_lock lock(mutex_);
  if (closed_) throw ClosedError("table is closed");
  const auto began = std::chrono::steady_clock::now();
  const size_t rows = batch.tokens * batch.heads;
  check_row_ids({batch.row_ids, rows}, num_rows());
  uint64_t missing = 0;
  for (size_t i = 0; i < rows; ++i, out += row_bytes_) {
    if (i % kPollRows == kPollRows - 1 && poll()) throw Interrupted();
    const int64_t row = batch.row_ids[i];
    // checked again: the caller's array may have changed since
    if (row < 0 || row >= num_rows()) {
      std::memset(out, 0, row_bytes_);
      ++missing;
      continue;
    }
    size_t start = 0;
    for (size_t plane = 0; plane < planes_.size(); ++plane) {
      std::memcpy(out + start, address(plane, row), planes_[plane].row_bytes());
      start += planes_[plane].row_bytes();
    }
  }
  counters_.gathers += 1;
  counters_.rows += rows;
  counters_.missing_rows += missing;
  counters_.gather_ns += static_cast<uint64_t>((std::chrono::steady_clock::now() - began).count());
}

void ResidentTable::close() {
  if (forks_ != fork_generation()) return;
  const std::unique_lock lock(mutex_);
  closed_ = true;
  mappings_.clear();
  loaded_.clear();
  files_.clear();
}

}  // namespace rowstream
