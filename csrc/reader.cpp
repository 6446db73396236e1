#include "reader.h"

#include <stdexcept>
#include <system_error>

#include "failure.h"
#include "inline_reader.h"
#include "pool.h"
#include "ring.h"

namespace rowstream {

ReaderChoice make_reader(const ReaderOptions& options, bool on_tmpfs) {
  const auto pool = [&](std::string note) {
    return ReaderChoice{std::make_unique<Pool>(), std::move(note)};
  };
  const auto in_caller = [](std::string note) {
    return ReaderChoice{std::make_unique<InlineReader>(), std::move(note)};
  };
  if (options.name == "pool") return pool("asked for");
  if (options.name == "inline") return in_caller("asked for");
  if (options.name != "auto" && options.name != "uring") {
    throw std::invalid_argument("reader is one of auto, uring, pool, inline; got " + options.name);
  }
  const bool asked = options.name == "uring";
  // A ring never completes a read of tmpfs inline: each would be punted to a
  // kernel worker, three times the CPU of a pread; and there is nothing to wait
  // for that a second thread could do meanwhile.
  if (on_tmpfs && !asked) return in_caller("the table is on tmpfs");
  try {
    auto ring = std::make_unique<Ring>(options.depth, options.bounce, options.files);
    std::string note = asked ? "asked for" : "io_uring is allowed here";
    if (!ring->note().empty()) note += "; " + ring->note();
    return {std::move(ring), std::move(note)};
  } catch (const std::system_error& error) {
    // EPERM (seccomp, sysctl), ENOSYS (old kernel), ENOMEM (small locked-memory
    // limit)
    const std::string why = std::string("io_uring refused: ") + error.code().message();
    if (asked) throw Unavailable("reader uring: " + why + "; auto would choose pool");
    return pool(why);
  }
}

}  // namespace rowstream
