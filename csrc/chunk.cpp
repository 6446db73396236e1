#include "chunk.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace rowstream {
namespace {

// What memory must be aligned to for direct reads, which is less than offsets for most devices.
// By hand as in file.cpp; the offset is the kernel's.
uint32_t memory_alignment(int fd, uint32_t otherwise) {
  constexpr unsigned kStatxDioAlign = 0x2000;
  constexpr size_t kDioMemAlignAt = 152;
  std::array<unsigned char, 256> buffer{};
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, buffer.data()) != 0) {
    return otherwise;
  }
  uint32_t mask = 0;
  uint32_t align = 0;
  std::memcpy(&mask, buffer.data(), sizeof mask);
  std::memcpy(&align, buffer.data() + kDioMemAlignAt, sizeof align);
  return (mask & kStatxDioAlign) != 0 && align > 0 ? align : otherwise;
}

}  // namespace

std::vector<Chunk> cut(const Source& source, const Plane& plane, int64_t first, int64_t count,
                       std::byte* into, bool in_place) {
  std::vector<uint32_t> memory_alignments;
  for (const TableFile& file : source.files) {
    memory_alignments.push_back(file.direct() ? memory_alignment(file.fd(), file.alignment())
                                              : uint32_t{1});
  }
  std::vector<Chunk> chunks;
  for (const Extent& extent : plane.extents()) {
    const int64_t from = std::max(first, extent.first_row);
    const int64_t to = std::min(first + count, extent.first_row + extent.num_rows);
    if (from >= to) continue;
    const TableFile& file = source.files[extent.file];
    const uint64_t align = file.alignment();
    const auto bytes_of = [&](int64_t rows) {
      return static_cast<uint64_t>(rows) * plane.row_bytes();
    };
    const uint64_t begin = extent.offset + bytes_of(from - extent.first_row);
    const uint64_t end = extent.offset + bytes_of(to - extent.first_row);
    std::byte* const base = into + bytes_of(from - first);
    for (uint64_t at = begin; at < end;) {
      const uint64_t until = std::min(end, (at / Chunk::kMaxBytes + 1) * Chunk::kMaxBytes);
      const uint64_t read_from = at / align * align;
      const uint64_t read_to = (until + align - 1) / align * align;
      std::byte* const to_memory = base + (at - begin);
      const bool whole = read_from == at && read_to == until;
      const bool aligned =
          reinterpret_cast<uintptr_t>(to_memory) % memory_alignments[extent.file] == 0;
      chunks.push_back({extent.file, static_cast<uint32_t>(align),
                        static_cast<uint32_t>(read_to - read_from), read_from, at,
                        static_cast<uint32_t>(until - at), to_memory,
                        whole && aligned && (in_place || align == 1)});
      at = until;
    }
  }
  return chunks;
}

}  // namespace rowstream
