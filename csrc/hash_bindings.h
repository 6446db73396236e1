// The n-gram hash as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace rowstream {

void bind_hash(nanobind::module_& m);

}  // namespace rowstream
