#include "hash.h"

#include <stdexcept>
#include <string>

namespace rowstream {
namespace {

void check_ids(const int64_t* ids, size_t count, int64_t vocab_size, const char* what) {
  for (size_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size) {
      throw std::invalid_argument(std::string(what) + " id " + std::to_string(ids[i]) +
                                  " at position " + std::to_string(i) + " is outside [0, " +
                                  std::to_string(vocab_size) + ")");
    }
  }
}

}  // namespace

NgramHash::NgramHash(Constants constants) : constants_(std::move(constants)) {
  const Constants& c = constants_;
  const size_t heads = size_t{c.ngram_size > 0 ? c.ngram_size - 1 : 0} * c.heads_per_ngram;
  if (heads == 0 || c.multipliers.size() != c.ngram_size || c.sizes.size() != heads ||
      c.offsets.size() != heads) {
    throw std::invalid_argument(
        "hash constants do not fit: " + std::to_string(c.multipliers.size()) + " multipliers, " +
        std::to_string(c.sizes.size()) + " sizes, " + std::to_string(c.offsets.size()) +
        " offsets");
  }
  for (const int64_t size : c.sizes) {
    if (size <= 0) throw std::invalid_argument("a head has no rows");
  }
  if (c.eos < 0 || c.eos >= c.vocab_size) {
    throw std::invalid_argument("eos " + std::to_string(c.eos) + " is outside the vocabulary");
  }
}

void NgramHash::rows(const int64_t* context, const int64_t* tokens, size_t count,
                     int64_t* row_ids) const {
  const Constants& c = constants_;
  const size_t before = context_size();
  check_ids(context, before, c.vocab_size, "context");
  check_ids(tokens, count, c.vocab_size, "token");
  for (size_t position = 0; position < count; ++position) {
    uint64_t mixed =
        static_cast<uint64_t>(tokens[position]) * static_cast<uint64_t>(c.multipliers[0]);
    // from the nearest earlier eos going back, everything reads as eos
    bool cut = false;
    size_t head = 0;
    for (size_t shift = 1; shift < c.ngram_size; ++shift) {
      const int64_t token =
          shift <= position ? tokens[position - shift] : context[before + position - shift];
      cut = cut || token == c.eos;
      mixed ^=
          static_cast<uint64_t>(cut ? c.eos : token) * static_cast<uint64_t>(c.multipliers[shift]);
      for (unsigned k = 0; k < c.heads_per_ngram; ++k, ++head) {
        // ids below the vocabulary keep every product, and so their xor, below
        // 2^63
        *row_ids++ =
            static_cast<int64_t>(mixed % static_cast<uint64_t>(c.sizes[head])) + c.offsets[head];
      }
    }
  }
}

}  // namespace rowstream
