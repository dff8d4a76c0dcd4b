// The instances of the prefill kernel for the GPU.
#include <string>

#include "kernels/prefill.cuh"
#include "sim/core/error.hpp"

namespace pdsim::kernels {

void launch_prefill(const PrefillArgs& args, PrefillTiling tiling, Stream stream) {
  if (args.kv.kv_heads < 1 || args.heads % args.kv.kv_heads != 0) {
    throw InputError("prefill", std::to_string(args.heads) + " heads with " +
                                    std::to_string(args.kv.kv_heads) + " KV heads; expected a multiple");
  }
  const bool wide = tiling == PrefillTiling::rows32;
  switch (args.kv.head_dim) {
    case 64:
      return wide ? run_prefill<64, 32>(args, stream) : run_prefill<64, 16>(args, stream);
    case 128:
      return wide ? run_prefill<128, 32>(args, stream) : run_prefill<128, 16>(args, stream);
    default:
      throw InputError("prefill", "head_dim " + std::to_string(args.kv.head_dim) + "; expected 64 or 128");
  }
}

}  // namespace pdsim::kernels
