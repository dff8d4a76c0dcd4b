// The instance of the MLA decode kernel for the GPU.
#include "kernels/mla_decode.cuh"

#include "kernels/occupancy.cuh"

namespace pdsim::kernels {

void launch_mla_decode(const MlaDecodeArgs& args, Stream stream) {
  check_mla_decode(args);
  run_mla_decode(args, stream);
}

std::int32_t mla_decode_slots() {
  return slots_of(mla_decode, MlaShape::kThreads, MlaShape::kSharedBytes);
}

}  // namespace pdsim::kernels
