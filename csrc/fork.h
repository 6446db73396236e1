// Tells a forked child from the process that opened a table: threads, rings and
// bounce memory exist only in the parent, so every object remembers the
// generation it was made in.
#pragma once

namespace rowstream {

// grows by one in the child of each fork of this process
unsigned fork_generation() noexcept;

}  // namespace rowstream
