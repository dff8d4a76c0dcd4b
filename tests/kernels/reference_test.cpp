// Theory: attention over one key is its value; over equal scores the mean of the values; over two keys whose
// scores differ by d, weights 1 / (1 + e^-d) and 1 / (1 + e^d). Query i of n new tokens sees the L - n + i +
// 1 first tokens of its request, wherever their pages lie.
#include "kernels/reference.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "kernels/ragged_batch.hpp"
#include "sim/core/error.hpp"

namespace pdsim::kernels {
namespace {

template <class Element>
std::vector<double> attention(const RaggedBatch<Element>& batch) {
  return reference_attention(batch.kv(), batch.q, batch.q_start, batch.shape.heads, batch.scale);
}

// The element of K or V of a token of a request.
template <class Element>
double stored(const RaggedBatch<Element>& batch, const std::vector<Element>& pool, int request, int token,
              int head, int column) {
  const PagedKv<Element> kv = batch.kv();
  return to_float(pool[static_cast<std::size_t>(kv.row(kv.slot(request, token), head) + column)]);
}

TEST(Reference, OneKeyGivesItsValue) {
  const auto batch = random_batch<bf16>({{{1, 1}, {1, 1}}, 2, 1, 64, 16}, 1);
  const std::vector<double> out = attention(batch);
  ASSERT_EQ(out.size(), 2u * 2 * 64);
  for (int request = 0; request < 2; ++request) {
    for (int head = 0; head < 2; ++head) {
      for (int d = 0; d < 64; ++d) {
        EXPECT_NEAR(out[static_cast<std::size_t>((request * 2 + head) * 64 + d)],
                    stored(batch, batch.v, request, 0, 0, d), 1e-12);
      }
    }
  }
}

TEST(Reference, EqualScoresGiveTheMeanOfWhatIsVisible) {
  auto batch = random_batch<bf16>({{{3, 20}}, 1, 1, 64, 8}, 2);
  std::fill(batch.q.begin(), batch.q.end(), bf16{0});
  const std::vector<double> out = attention(batch);
  for (int i = 0; i < 3; ++i) {
    for (int d = 0; d < 64; ++d) {
      double sum = 0;
      for (int token = 0; token < 18 + i; ++token) sum += stored(batch, batch.v, 0, token, 0, d);
      EXPECT_NEAR(out[static_cast<std::size_t>(i * 64 + d)], sum / (18 + i), 1e-12);
    }
  }
}

TEST(Reference, TwoKeysShareByTheLogistic) {
  const auto batch = random_batch<fp8>({{{1, 2}}, 4, 2, 64, 16}, 3);
  ASSERT_NE(batch.k_scale, 1);
  ASSERT_NE(batch.v_scale, 1);
  const std::vector<double> out = attention(batch);
  for (int head = 0; head < 4; ++head) {
    double difference = 0;
    for (int d = 0; d < 64; ++d) {
      difference += double{to_float(batch.q[static_cast<std::size_t>(head * 64 + d)])} *
                    (stored(batch, batch.k, 0, 0, head / 2, d) - stored(batch, batch.k, 0, 1, head / 2, d));
    }
    const double weight = 1 / (1 + std::exp(-difference * batch.scale * double{batch.k_scale}));
    for (int d = 0; d < 64; ++d) {
      const double expected = weight * stored(batch, batch.v, 0, 0, head / 2, d) +
                              (1 - weight) * stored(batch, batch.v, 0, 1, head / 2, d);
      EXPECT_NEAR(out[static_cast<std::size_t>(head * 64 + d)], expected * double{batch.v_scale}, 1e-12);
    }
  }
}

TEST(Reference, ErrorsAreRelativeToTheTypicalSize) {
  const std::vector<double> reference = {3, -4};  // root mean square sqrt(12.5)
  const auto error = [&](float a, float b) {
    return largest_error(std::vector<bf16>{to_bf16(a), to_bf16(b)}, reference);
  };
  EXPECT_EQ(error(3, -4), 0);
  EXPECT_NEAR(error(3, -3), 1 / (4 + std::sqrt(12.5)), 1e-12);
  EXPECT_NEAR(error(4, -4), 1 / (3 + std::sqrt(12.5)), 1e-12);
  EXPECT_TRUE(std::isinf(error(3, std::numeric_limits<float>::quiet_NaN())));
}

TEST(RaggedBatch, EveryTokenHasAPlaceOfItsOwnAndTheRestIsNan) {
  const RaggedShape shape{{{2, 37}, {0, 0}, {1, 16}, {5, 5}}, 4, 2, 64, 16};
  const auto batch = random_batch<bf16>(shape, 4);
  EXPECT_EQ(batch.q_start, (std::vector<std::int32_t>{0, 2, 2, 3, 8}));
  EXPECT_EQ(batch.lengths, (std::vector<std::int32_t>{37, 0, 16, 5}));
  EXPECT_EQ(batch.q.size(), 8u * 4 * 64);

  const PagedKv<bf16> kv = batch.kv();
  std::set<std::int32_t> slots;
  for (std::size_t request = 0; request < 4; ++request) {
    for (std::int32_t token = 0; token < batch.lengths[request]; ++token) {
      EXPECT_TRUE(slots.insert(kv.slot(static_cast<std::int32_t>(request), token)).second);
    }
  }
  const std::size_t row = 2 * 64;
  for (const auto* pool : {&batch.k, &batch.v}) {
    ASSERT_EQ(pool->size() % (16 * row), 0u);
    for (std::size_t i = 0; i < pool->size(); ++i) {
      const bool owned = slots.count(static_cast<std::int32_t>(i / row)) > 0;
      ASSERT_EQ(std::isnan(to_float((*pool)[i])), !owned) << i;
    }
  }
  EXPECT_FALSE(std::is_sorted(batch.pages.begin(), batch.pages.begin() + 3)) << "pages in no order";
}

TEST(RaggedBatch, FollowsFromItsSeed) {
  const RaggedShape shape{{{1, 9}}, 1, 1, 64, 16};
  const auto values = [&](std::uint64_t seed) {
    std::vector<float> result;
    for (const bf16 x : random_batch<bf16>(shape, seed).q) result.push_back(to_float(x));
    return result;
  };
  EXPECT_EQ(values(5), values(5));
  EXPECT_NE(values(5), values(6));
}

TEST(RaggedBatch, RefusesWhatIsNoBatch) {
  const auto refused = [](const RaggedShape& shape) {
    try {
      random_batch<bf16>(shape, 0);
    } catch (const InputError&) {
      return true;
    }
    return false;
  };
  EXPECT_FALSE(refused({{{1, 1}}, 4, 2, 64, 16}));
  EXPECT_TRUE(refused({{{1, 1}}, 3, 2, 64, 16}));
  EXPECT_TRUE(refused({{{1, 1}}, 2, 2, 64, 24}));
  EXPECT_TRUE(refused({{{2, 1}}, 2, 2, 64, 16}));
}

}  // namespace
}  // namespace pdsim::kernels
