// The files of a table and where its rows lie in them: what every backend is
// opened with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "extent.h"
#include "file.h"

namespace rowstream {

struct PlaneSpec {
  uint32_t row_bytes;
  std::vector<Extent> extents;
};

struct Source {
  // Opens the files. Throws ReadFailure, and std::invalid_argument where planes
  // differ in rows or an extent ends past its file.
  Source(const std::vector<std::string>& paths, std::vector<PlaneSpec> specs, bool direct,
         uint32_t block = 0);

  int64_t num_rows() const { return planes.front().num_rows(); }
  std::vector<FileState> states() const;
  // throws ReadFailure where a file is not what it was at the opening
  void check_unchanged() const;
  // whether some rows lie in several places
  bool has_copies() const;

  std::vector<Plane> planes;
  std::vector<uint32_t> starts;  // where a plane's bytes begin in an output row
  uint32_t row_bytes = 0;        // of all planes, one after the other
  std::vector<TableFile> files;
};

}  // namespace rowstream
