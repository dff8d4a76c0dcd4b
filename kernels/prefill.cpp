#include "kernels/prefill.hpp"

#include <algorithm>

namespace pdsim::kernels {

PrefillTiling choose_tiling(std::span<const std::int32_t> q_start, std::int32_t heads,
                            std::int32_t multiprocessors) {
  constexpr std::int32_t kRows = tile_rows(PrefillTiling::rows32);
  std::int64_t tiles = 0;
  for (std::size_t r = 1; r < q_start.size(); ++r) tiles += (q_start[r] - q_start[r - 1] + kRows - 1) / kRows;
  return tiles * heads >= 2 * std::int64_t{multiprocessors} ? PrefillTiling::rows32 : PrefillTiling::rows16;
}

std::vector<PrefillTile> prefill_tiles(std::span<const std::int32_t> q_start,
                                       std::span<const std::int32_t> lengths, PrefillTiling tiling) {
  struct Sized {
    std::int32_t keys;
    PrefillTile tile;
  };
  std::vector<Sized> sized;
  for (std::size_t r = 0; r < lengths.size(); ++r) {
    const std::int32_t fresh = q_start[r + 1] - q_start[r];
    for (std::int32_t row = 0; row < fresh; row += tile_rows(tiling)) {
      const std::int32_t end = std::min(fresh, row + tile_rows(tiling));
      sized.push_back({lengths[r] - fresh + end, {static_cast<std::int32_t>(r), row}});
    }
  }
  std::stable_sort(sized.begin(), sized.end(),
                   [](const Sized& a, const Sized& b) { return a.keys > b.keys; });

  std::vector<PrefillTile> tiles;
  tiles.reserve(sized.size());
  for (const Sized& s : sized) tiles.push_back(s.tile);
  return tiles;
}

std::int64_t visible_pairs(std::span<const std::int32_t> q_start, std::span<const std::int32_t> lengths) {
  std::int64_t pairs = 0;
  for (std::size_t r = 0; r < lengths.size(); ++r) {
    const std::int64_t fresh = q_start[r + 1] - q_start[r];
    pairs += fresh * (lengths[r] - fresh) + fresh * (fresh + 1) / 2;
  }
  return pairs;
}

double prefill_flops(std::int64_t visible_pairs, std::int32_t heads, std::int32_t head_dim) {
  return 4.0 * head_dim * heads * static_cast<double>(visible_pairs);
}

}  // namespace pdsim::kernels
