// The loader and the memory of a loaded table, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include "load.h"
#include "resident.h"

namespace rowstream {

// calls a Python callable with bytes done and bytes in all; None: nothing is called
Loader::Progress progress_of(const nanobind::object& callable);

void bind_memory(nanobind::module_& m, nanobind::class_<ResidentTable>& resident);
void bind_loader(nanobind::module_& m);

}  // namespace rowstream
