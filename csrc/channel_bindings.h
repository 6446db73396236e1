// Arenas, channels and loops as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

namespace rowstream {

void bind_channels(nanobind::module_& m);

}  // namespace rowstream
