// What the core throws when a read fails; the bindings turn it into
// rowstream.ReadError.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <system_error>

namespace rowstream {

// `code` is an errno, `reason` what strerror says unless there is something
// better to say.
struct ReadFailure : std::system_error {
  ReadFailure(int code, std::string path_, uint64_t offset_ = 0, uint64_t needed_ = 0,
              uint64_t got_ = 0, std::string reason_ = {})
      : std::system_error(code, std::system_category(), path_),
        path(std::move(path_)),
        reason(std::move(reason_)),
        offset(offset_),
        needed(needed_),
        got(got_) {}

  std::string path;
  std::string reason;
  uint64_t offset;
  uint64_t needed;
  uint64_t got;
};

// "no answer for 0.5 s"
inline std::string no_answer_for(double seconds) {
  char text[64];
  std::snprintf(text, sizeof text, "no answer for %g s", seconds);
  return text;
}

// the object was closed, or opened before a fork; the bindings pick the Python
// type
struct ClosedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct ForkedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// an explicit wish that cannot be met here (reader="uring" without io_uring)
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// the poll callback asked to stop; whoever set it knows why
struct Interrupted : std::exception {};

}  // namespace rowstream
