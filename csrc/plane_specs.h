// Planes as Python gives them: (row_bytes, [(file, offset, first_row, num_rows), ...]) each. For
// bindings alone.
#pragma once

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "source.h"

namespace rowstream {

using ExtentTuple = std::tuple<uint32_t, uint64_t, int64_t, int64_t>;
using PlaneTuple = std::pair<uint32_t, std::vector<ExtentTuple>>;

inline std::vector<PlaneSpec> plane_specs(const std::vector<PlaneTuple>& planes) {
  std::vector<PlaneSpec> specs;
  for (const auto& [row_bytes, extents] : planes) {
    PlaneSpec spec{row_bytes, {}};
    for (const auto& [file, offset, first_row, num_rows] : extents) {
      spec.extents.push_back({file, offset, first_row, num_rows});
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

}  // namespace rowstream
