#include "resident_set.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>

namespace rowstream {

uint64_t resident_bytes(std::span<const AddressRange> ranges) {
  const std::unique_ptr<FILE, int (*)(FILE*)> smaps(fopen("/proc/self/smaps", "re"), fclose);
  if (!smaps) return 0;
  uint64_t total = 0;
  bool ours = false;
  bool at_start = true;  // a path may be longer than the buffer
  std::array<char, 512> line;
  while (fgets(line.data(), line.size(), smaps.get()) != nullptr) {
    uintptr_t begin = 0;
    uint64_t kib = 0;
    const bool field = line[0] >= 'A' && line[0] <= 'Z';
    if (at_start && !field && sscanf(line.data(), "%" SCNxPTR "-", &begin) == 1) {
      ours = std::any_of(ranges.begin(), ranges.end(), [begin](const AddressRange& range) {
        return range.contains(reinterpret_cast<const void*>(begin));
      });
    } else if (at_start && ours && sscanf(line.data(), "Rss: %" SCNu64 " kB", &kib) == 1) {
      total += kib * 1024;
    }
    at_start = std::strchr(line.data(), '\n') != nullptr;
  }
  return total;
}

FilePages::FilePages()
    : fd_(open("/proc/self/statm", O_RDONLY | O_CLOEXEC)), page_bytes_(sysconf(_SC_PAGESIZE)) {}

FilePages::~FilePages() {
  if (fd_ >= 0) close(fd_);
}

int64_t FilePages::bytes() const {
  std::array<char, 128> text{};
  if (fd_ < 0 || pread(fd_, text.data(), text.size() - 1, 0) <= 0) return 0;
  int64_t shared = 0;
  (void)sscanf(text.data(), "%*d %*d %" SCNd64, &shared);
  return shared * page_bytes_;
}

}  // namespace rowstream
