// How many rows in a row are read: in parts of one read each, cut where the blocks of their file
// are. Pure arithmetic but for one question to the file system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "source.h"

namespace rowstream {

// One read at most of a file, and the rows' bytes in it.
struct Chunk {
  // a multiple of every block that direct reads ask for
  static constexpr uint64_t kMaxBytes = uint64_t{1} << 20;

  uint32_t file;
  uint32_t align;   // of the read's offset and length
  uint32_t length;  // of the read
  uint64_t offset;
  uint64_t wanted_at;  // in the file
  uint32_t wanted;
  std::byte* into;
  bool in_place;  // read straight to `into`: nothing but wanted bytes, and aligned
};

// Rows [first, first + count) of a plane, one after the other at `into`.
std::vector<Chunk> cut(const Source& source, const Plane& plane, int64_t first, int64_t count,
                       std::byte* into, bool in_place);

}  // namespace rowstream
