// The n-gram hash of qwen4_exp: token ids in, row ids out. Constants come from
// the family that derived and checked them; this is arithmetic alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rowstream {

class NgramHash {
 public:
  struct Constants {
    unsigned ngram_size;
    unsigned heads_per_ngram;
    int64_t vocab_size;
    int64_t eos;
    std::vector<int64_t> multipliers;  // [ngram_size]
    std::vector<int64_t> sizes;        // [heads]
    std::vector<int64_t> offsets;      // [heads]
  };

  explicit NgramHash(Constants constants);  // throws std::invalid_argument

  unsigned heads() const { return static_cast<unsigned>(constants_.sizes.size()); }
  unsigned context_size() const { return constants_.ngram_size - 1; }

  // context: the context_size() ids before the first token. row_ids: [count,
  // heads]. Throws std::invalid_argument for an id outside [0, vocab_size): a
  // larger one would overflow the product, a negative one is somebody's
  // placeholder.
  void rows(const int64_t* context, const int64_t* tokens, size_t count, int64_t* row_ids) const;

 private:
  Constants constants_;
};

}  // namespace rowstream
