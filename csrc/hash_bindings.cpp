#include "hash_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "hash.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace rowstream {
namespace {

using Tokens = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowIdsOut = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_hash(nb::module_& m) {
  nb::class_<NgramHash>(m, "NgramHash", "The n-gram hash of qwen4_exp.")
      .def(
          "__init__",
          [](NgramHash* self, unsigned ngram_size, unsigned heads_per_ngram, int64_t vocab_size,
             int64_t eos, std::vector<int64_t> multipliers, std::vector<int64_t> sizes,
             std::vector<int64_t> offsets) {
            new (self) NgramHash({ngram_size, heads_per_ngram, vocab_size, eos,
                                  std::move(multipliers), std::move(sizes), std::move(offsets)});
          },
          nb::kw_only(), "ngram_size"_a, "heads_per_ngram"_a, "vocab_size"_a, "eos"_a,
          "multipliers"_a, "sizes"_a, "offsets"_a)
      .def(
          "rows",
          [](const NgramHash& self, const Tokens& context, const Tokens& tokens,
             const RowIdsOut& out) {
            if (context.shape(0) != self.context_size()) {
              throw std::invalid_argument("context has " + std::to_string(context.shape(0)) +
                                          " ids, needs " + std::to_string(self.context_size()));
            }
            if (out.shape(0) != tokens.shape(0) || out.shape(1) != self.heads()) {
              throw std::invalid_argument("out needs shape [" + std::to_string(tokens.shape(0)) +
                                          ", " + std::to_string(self.heads()) + "]");
            }
            const nb::gil_scoped_release release;
            self.rows(context.data(), tokens.data(), tokens.shape(0), out.data());
          },
          "context"_a.noconvert(), "tokens"_a.noconvert(), "out"_a.noconvert(),
          "Fill out int64 [n, heads] with the row ids of tokens int64 [n].");
}

}  // namespace rowstream
