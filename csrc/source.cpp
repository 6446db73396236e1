#include "source.h"

#include <algorithm>
#include <stdexcept>

namespace rowstream {
namespace {

// a file's index and an offset share one 64-bit sort key (plan.h)
constexpr size_t kMaxFiles = (1u << 16) - 1;

void check_extents(const std::vector<Extent>& extents, uint32_t row_bytes,
                   const std::vector<TableFile>& files) {
  for (const Extent& extent : extents) {
    if (extent.file >= files.size()) {
      throw std::invalid_argument("extent names file " + std::to_string(extent.file) +
                                  ", table has " + std::to_string(files.size()));
    }
    const TableFile& file = files[extent.file];
    const uint64_t end = extent.offset + static_cast<uint64_t>(extent.num_rows) * row_bytes;
    if (end > static_cast<uint64_t>(file.identity().size)) {
      throw std::invalid_argument(file.path() + ": rows need " + std::to_string(end) +
                                  " bytes, file has " + std::to_string(file.identity().size));
    }
  }
}

}  // namespace

Source::Source(const std::vector<std::string>& paths, std::vector<PlaneSpec> specs, bool direct,
               uint32_t block) {
  if (specs.empty()) throw std::invalid_argument("a table has no planes");
  if (paths.size() > kMaxFiles) throw std::invalid_argument("a table has more than 65535 files");
  for (PlaneSpec& spec : specs) {
    planes.emplace_back(spec.row_bytes, std::move(spec.extents));
    starts.push_back(row_bytes);
    row_bytes += spec.row_bytes;
    if (planes.back().num_rows() != num_rows()) {
      throw std::invalid_argument(
          "planes differ in rows: " + std::to_string(planes.back().num_rows()) + " and " +
          std::to_string(num_rows()));
    }
  }
  files.reserve(paths.size());
  for (const std::string& path : paths) files.emplace_back(path, direct, block);
  for (const Plane& plane : planes) {
    check_extents(plane.extents(), plane.row_bytes(), files);
    for (const auto& copies : plane.copies()) check_extents(copies, plane.row_bytes(), files);
  }
}

std::vector<FileState> Source::states() const {
  std::vector<FileState> states;
  for (const TableFile& file : files) states.push_back(file.state());
  return states;
}

bool Source::has_copies() const {
  return std::any_of(planes.begin(), planes.end(),
                     [](const Plane& plane) { return plane.has_copies(); });
}

void Source::check_unchanged() const {
  for (const TableFile& file : files) file.check_unchanged();
}

}  // namespace rowstream
