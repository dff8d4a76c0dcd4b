// The instances of the decode kernel for the GPU.
#include "kernels/decode.cuh"
#include "kernels/occupancy.cuh"

namespace pdsim::kernels {
namespace {

template <class T>
void launch_any(const DecodeArgs<T>& args, Stream stream) {
  check_decode(args.to, args.kv.kv_heads, args.kv.head_dim, args.kv.page_shift);
  return args.kv.head_dim == 64 ? run_decode<T, 64>(args, stream) : run_decode<T, 128>(args, stream);
}

template <class T, int D>
std::int32_t slots() {
  return slots_of(decode<T, D>, kDecodeWarps * 32, DecodeShape<T, D>::kSharedBytes);
}

}  // namespace

void launch_decode(const DecodeArgs<bf16>& args, Stream stream) {
  launch_any(args, stream);
}
void launch_decode(const DecodeArgs<fp8>& args, Stream stream) {
  launch_any(args, stream);
}

std::int32_t decode_slots(std::int32_t head_dim, std::int32_t element_bytes) {
  if (element_bytes == 1) return head_dim == 64 ? slots<fp8, 64>() : slots<fp8, 128>();
  return head_dim == 64 ? slots<bf16, 64>() : slots<bf16, 128>();
}

}  // namespace pdsim::kernels
