// The attention kernels, made ready to be timed. Two checks go before: the whole of a small ragged batch
// whose free pages are NaN, and at the very shape that is timed a few heads of a few queries.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <tuple>

#include "kernels/copy_shape.hpp"
#include "kernels/decode.hpp"
#include "kernels/fill.cuh"
#include "kernels/mla_decode.hpp"
#include "kernels/mla_reference.hpp"
#include "kernels/prefill.hpp"
#include "kernels/problem.hpp"
#include "kernels/ragged_batch.hpp"
#include "kernels/reference.hpp"
#include "sim/core/error.hpp"

namespace pdsim::kernels {
namespace {

constexpr std::int32_t kPageTokens = 16, kPageShift = 4;
constexpr float kQueryScale = 4;       // a deviation of 2.3: some keys matter much more than others
constexpr double kTolerance = 0x1p-7;  // that of the tests on the emulator

std::int32_t as_int(std::int64_t x) {
  return static_cast<std::int32_t>(x);
}

int multiprocessors() {
  int device = 0, count = 0;
  PDSIM_CUDA(cudaGetDevice(&device));
  PDSIM_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

/// A kernel's input on the GPU: from a small batch of the host's, or as noise of any size.
template <class Element>
struct OnGpu {
  std::int32_t requests = 0, heads = 1, width = 0;
  std::vector<std::int32_t> q_start, lengths, pages;
  std::uint64_t seed = 0;
  GpuArray<bf16> q, out;
  GpuArray<Element> k, v;
  GpuArray<std::int32_t> q_start_at, pages_at, lengths_at;
  PagedKv<Element> kv;  ///< its pointers are the GPU's
  float scale = 1;

  /// `width_of` columns of output.
  OnGpu(const RaggedBatch<Element>& batch, std::int32_t width_of)
      : requests(as_int(static_cast<std::int64_t>(batch.lengths.size()))),
        heads(batch.shape.heads),
        width(width_of),
        q_start(batch.q_start),
        lengths(batch.lengths),
        pages(batch.pages),
        q(batch.q),
        out(batch.q.size() / static_cast<std::size_t>(batch.shape.head_dim) *
            static_cast<std::size_t>(width_of)),
        k(batch.k),
        v(batch.v),
        q_start_at(q_start),
        pages_at(pages),
        lengths_at(lengths),
        kv(batch.kv()),
        scale(static_cast<float>(batch.scale)) {
    point();
  }

  /// `fresh` new tokens of each of `count` requests of `length` tokens; `width` columns of the output.
  /// Without values where the width is not that of the keys: MLA's are its keys.
  OnGpu(std::int32_t count, std::int32_t fresh, std::int32_t length, std::int32_t heads_of,
        std::int32_t kv_heads, std::int32_t head_dim, std::int32_t width_of, std::uint64_t seed_of)
      : requests(count),
        heads(heads_of),
        width(width_of),
        lengths(static_cast<std::size_t>(count), length),
        seed(seed_of) {
    const std::int32_t max_pages = (length + kPageTokens - 1) / kPageTokens;
    for (std::int32_t r = 0; r <= count; ++r) q_start.push_back(r * fresh);
    pages = page_table(count * max_pages, count * max_pages, seed);
    const auto tokens = static_cast<std::size_t>(count) * static_cast<std::size_t>(max_pages * kPageTokens);
    const auto queries =
        static_cast<std::size_t>(count) * static_cast<std::size_t>(fresh) * static_cast<std::size_t>(heads);
    q = GpuArray<bf16>(queries * static_cast<std::size_t>(head_dim));
    out = GpuArray<bf16>(queries * static_cast<std::size_t>(width));
    k = GpuArray<Element>(tokens * static_cast<std::size_t>(kv_heads * head_dim));
    fill(q.data(), q.size(), query_seed(), kQueryScale, nullptr);
    fill(k.data(), k.size(), seed, 1.f, nullptr);
    if (width == head_dim) {
      v = GpuArray<Element>(k.size());
      fill(v.data(), v.size(), ~seed, 1.f, nullptr);
    }
    PDSIM_CUDA(cudaDeviceSynchronize());
    q_start_at = GpuArray<std::int32_t>(q_start);
    pages_at = GpuArray<std::int32_t>(pages);
    lengths_at = GpuArray<std::int32_t>(lengths);
    kv.max_pages = max_pages;
    kv.page_shift = kPageShift;
    kv.kv_heads = kv_heads;
    kv.head_dim = head_dim;
    scale = 1 / std::sqrt(static_cast<float>(head_dim));
    point();
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

  void point() {
    kv.k = k.data();
    kv.v = v.data();
    kv.pages = pages_at.data();
    kv.lengths = lengths_at.data();
  }

  std::uint64_t query_seed() const { return seed ^ 0x7175657279u; }

  /// NaN everywhere: what is not computed shows. Blocks.
  void spoil() const {
    PDSIM_CUDA(cudaMemset(out.data(), 0xff, out.size() * sizeof(bf16)));
    PDSIM_CUDA(cudaDeviceSynchronize());
  }

  /// One head of one query of noise input, as the GPU has it and as it should be. The query sees the first
  /// `visible` tokens of its request.
  double error_at(std::int32_t request, std::int32_t query, std::int32_t head, std::int32_t visible) const {
    const std::int64_t row = std::int64_t{query} * heads + head;
    const auto dim = static_cast<std::size_t>(kv.head_dim);
    std::vector<bf16> one(dim), got(static_cast<std::size_t>(width));
    for (std::size_t d = 0; d < dim; ++d)
      one[d] = noise_as<bf16>(query_seed(), static_cast<std::uint64_t>(row) * dim + d, kQueryScale);
    PDSIM_CUDA(
        cudaMemcpy(got.data(), out.data() + row * width, got.size() * sizeof(bf16), cudaMemcpyDeviceToHost));

    // The request's keys and values of one KV head, alone in pages in order.
    PagedKv<Element> there = kv;
    there.pages = pages.data();
    std::vector<Element> keys, values;
    for (std::int32_t position = 0; position < visible; ++position) {
      const auto at =
          static_cast<std::uint64_t>(there.row(there.slot(request, position), head / (heads / kv.kv_heads)));
      for (std::uint64_t d = 0; d < dim; ++d) {
        keys.push_back(noise_as<Element>(seed, at + d, 1.f));
        if (v.size() > 0) values.push_back(noise_as<Element>(~seed, at + d, 1.f));
      }
    }
    std::vector<std::int32_t> in_order(static_cast<std::size_t>(kv.max_pages));
    for (std::size_t i = 0; i < in_order.size(); ++i) in_order[i] = static_cast<std::int32_t>(i);
    PagedKv<Element> alone = kv;
    alone.k = keys.data();
    alone.v = values.data();
    alone.pages = in_order.data();
    alone.lengths = &visible;
    alone.kv_heads = 1;
    const std::int32_t start[] = {0, 1};
    if constexpr (std::is_same_v<Element, bf16>) {
      if (v.size() == 0) return largest_error(got, reference_mla(alone, one, 1, double{scale}));
    }
    return largest_error(got, reference_attention(alone, one, start, 1, double{scale}));
  }

  /// The last head of the last query, which sees all its request has, and the first head of the first query.
  double noise_error() const {
    const std::int32_t length = lengths.front(), fresh = q_start[1];
    return std::max(error_at(requests - 1, requests * fresh - 1, heads - 1, length),
                    error_at(0, 0, 0, length - fresh + 1));
  }
};

/// What the combine step needs, and the arguments that go with it.
struct Split {
  std::int32_t splits = 1;
  GpuArray<float> part_out;
  GpuArray<PartState> part_state;
  DecodeOutput to;

  template <class Element>
  Split(const OnGpu<Element>& in, std::int32_t blocks_per_chunk, std::int32_t slots,
        std::int32_t least_chunk) {
    const DecodeSplit split =
        choose_split({in.lengths, blocks_per_chunk, 1 << in.kv.page_shift, slots, least_chunk});
    splits = split.splits;
    if (splits > 1) {
      const auto parts = static_cast<std::size_t>(in.requests) * static_cast<std::size_t>(in.heads * splits);
      part_out = GpuArray<float>(parts * static_cast<std::size_t>(in.width));
      part_state = GpuArray<PartState>(parts);
    }
    to = {in.out.data(), part_out.data(), part_state.data(), in.requests,
          in.heads,      splits,          split.chunk_tokens};
  }
};

/// Of ordinary attention.
template <class Element>
std::vector<double> attention_of(const RaggedBatch<Element>& batch) {
  return reference_attention(batch.kv(), batch.q, batch.q_start, batch.shape.heads, batch.scale);
}

/// Of one tiling, so that the small batch that is checked goes through the kernel that is timed.
template <PrefillTiling tiling>
struct Prefill {
  using Element = bf16;
  OnGpu<bf16> in;
  std::vector<PrefillTile> order;
  GpuArray<PrefillTile> tiles;

  template <class... Input>
  explicit Prefill(const Input&... input)
      : in(input...), order(prefill_tiles(in.q_start, in.lengths, tiling)), tiles(order) {}

  void run(Stream stream) const {
    launch_prefill({in.q.data(), in.out.data(), in.kv, in.q_start_at.data(), tiles.data(),
                    as_int(static_cast<std::int64_t>(order.size())), in.heads, in.scale},
                   tiling, stream);
  }
  static std::string choice() { return "rows" + std::to_string(static_cast<int>(tiling)); }
  static std::vector<double> reference(const RaggedBatch<bf16>& batch) { return attention_of(batch); }
};

template <class Kv>
struct Decode {
  using Element = Kv;
  OnGpu<Kv> in;
  Split split;

  template <class... Input>
  explicit Decode(const Input&... input)
      : in(input...),
        split(in, in.kv.kv_heads, decode_slots(in.kv.head_dim, static_cast<std::int32_t>(sizeof(Kv))),
              kLeastChunk) {}

  void run(Stream stream) const { launch_decode({in.q.data(), in.kv, split.to, in.scale}, stream); }
  std::string choice() const { return "splits " + std::to_string(split.splits); }
  static std::vector<double> reference(const RaggedBatch<Kv>& batch) { return attention_of(batch); }
};

struct MlaDecode {
  using Element = bf16;
  OnGpu<bf16> in;
  Split split;

  template <class... Input>
  explicit MlaDecode(const Input&... input)
      : in(input...), split(in, in.heads / kMlaHeads, mla_decode_slots(), kMlaLeastChunk) {}

  void run(Stream stream) const { launch_mla_decode({in.q.data(), in.kv, split.to, in.scale}, stream); }
  std::string choice() const { return "splits " + std::to_string(split.splits); }
  static std::vector<double> reference(const RaggedBatch<bf16>& batch) {
    return reference_mla(batch.kv(), batch.q, batch.shape.heads, batch.scale);
  }
};

/// The output of a kernel on a whole small batch against the reference, computed once a shape: it is float64.
template <class Kernel>
double ragged_error(const RaggedShape& shape, std::int32_t width, std::uint64_t seed) {
  static std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, double> known;
  const std::tuple key{shape.heads, shape.kv_heads, shape.head_dim};
  if (const auto at = known.find(key); at != known.end()) return at->second;
  const auto batch = random_batch<typename Kernel::Element>(shape, seed);
  const Kernel kernel(batch, width);
  kernel.in.spoil();
  kernel.run(nullptr);
  PDSIM_CUDA(cudaDeviceSynchronize());
  return known[key] = largest_error(kernel.in.out.to_host(), Kernel::reference(batch));
}

template <class Kernel>
Problem ready(const std::shared_ptr<const Kernel>& kernel, const char* name, const RaggedShape& small,
              std::uint64_t seed) {
  Problem problem;
  problem.kernel = name;
  problem.choice = kernel->choice();
  problem.tolerance = kTolerance;
  problem.run = [kernel](Stream stream) { kernel->run(stream); };
  problem.error = [kernel, small, seed] {
    kernel->in.spoil();
    kernel->run(nullptr);
    PDSIM_CUDA(cudaDeviceSynchronize());
    return std::max(kernel->in.noise_error(), ragged_error<Kernel>(small, kernel->in.width, seed));
  };
  return problem;
}

/// The requests, with as many queries a KV head as the shape that is timed, but at most two KV heads: the
/// reference is float64, on the host.
RaggedShape few_heads(std::vector<RaggedShape::Request> requests, std::int32_t heads, std::int32_t kv_heads,
                      std::int32_t head_dim) {
  const std::int32_t some = std::min(kv_heads, 2);
  return {std::move(requests), heads / kv_heads * some, some, head_dim};
}

template <PrefillTiling tiling>
Problem prefill_in(const Point& p, std::uint64_t seed) {
  const std::int32_t fresh = as_int(p.at("tokens")), length = fresh + as_int(p.at("prefix"));
  const std::int32_t heads = as_int(p.at("heads")), kv_heads = as_int(p.at("kv_heads")),
                     dim = as_int(p.at("head_dim"));
  const RaggedShape small = few_heads({{1, 1}, {70, 150}, {33, 33}, {1, 100}, {0, 20}}, heads, kv_heads, dim);
  return ready<Prefill<tiling>>(std::make_shared<Prefill<tiling>>(as_int(p.at("requests")), fresh, length,
                                                                  heads, kv_heads, dim, dim, seed),
                                "pdsim-prefill", small, seed);
}

Problem prefill_problem(const Point& p, std::uint64_t seed) {
  std::vector<std::int32_t> q_start(1);
  for (std::int64_t i = 0; i < p.at("requests"); ++i)
    q_start.push_back(q_start.back() + as_int(p.at("tokens")));
  return choose_tiling(q_start, as_int(p.at("heads")), multiprocessors()) == PrefillTiling::rows32
             ? prefill_in<PrefillTiling::rows32>(p, seed)
             : prefill_in<PrefillTiling::rows16>(p, seed);
}

template <class Element>
Problem decode_problem(const Point& p, std::uint64_t seed) {
  const std::int32_t heads = as_int(p.at("heads")), kv_heads = as_int(p.at("kv_heads")),
                     dim = as_int(p.at("head_dim"));
  const RaggedShape small = few_heads({{1, 1}, {1, 16}, {1, 17}, {1, 333}}, heads, kv_heads, dim);
  return ready<Decode<Element>>(
      std::make_shared<Decode<Element>>(as_int(p.at("batch")), 1, as_int(p.at("context")), heads, kv_heads,
                                        dim, dim, seed),
      "pdsim-decode", small, seed);
}

Problem mla_problem(const Point& p, std::uint64_t seed) {
  const std::int32_t heads = as_int(p.at("heads"));
  const RaggedShape small{{{1, 1}, {1, 16}, {1, 17}, {1, 333}}, heads, 1, kMlaRow};
  return ready<MlaDecode>(std::make_shared<MlaDecode>(as_int(p.at("batch")), 1, as_int(p.at("context")),
                                                      heads, 1, kMlaRow, kMlaLatent, seed),
                          "pdsim-mla-decode", small, seed);
}

}  // namespace

Problem attention_problem(const Point& point, std::uint64_t seed) {
  switch (point.op) {
    case Op::attention_prefill:
      return prefill_problem(point, seed);
    case Op::attention_decode:
      return point.format == Format::fp8 ? decode_problem<fp8>(point, seed)
                                         : decode_problem<bf16>(point, seed);
    case Op::mla_decode:
      return mla_problem(point, seed);
    default:
      throw InputError("attention", std::string(name(point.op)) + "; expected an attention operation");
  }
}

}  // namespace pdsim::kernels
