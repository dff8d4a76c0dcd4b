// Every way to copy, made ready to be timed and checked byte by byte.
#include <algorithm>
#include <cstring>
#include <memory>

#include "kernels/copy_shape.hpp"
#include "kernels/fill.cuh"
#include "kernels/kv_copy.hpp"
#include "kernels/problem.hpp"
#include "sim/core/error.hpp"

namespace pdsim::kernels {
namespace {

constexpr unsigned char kUntouched = 0xee;

void fill_bytes(const GpuArray<unsigned char>& to, std::uint64_t seed) {
  fill(reinterpret_cast<bf16*>(to.data()), to.size() / sizeof(bf16), seed, 1.f, nullptr);
}

/// A copy by multiprocessors.
struct KernelCopy {
  CopyShape shape;
  std::vector<std::int32_t> from_pages, to_pages;
  GpuArray<std::int32_t> from_table, to_table;
  GpuArray<unsigned char> from, to;
  KvCopy copy;
  unsigned blocks;

  KernelCopy(Copy kind, std::int64_t run_bytes, std::int64_t runs, std::int64_t sms, std::uint64_t seed)
      : shape(copy_shape(kind, run_bytes, runs)),
        from_pages(page_table(shape.pages, 2 * shape.pages, seed)),
        to_pages(page_table(shape.pages, 2 * shape.pages, ~seed)),
        from_table(from_pages),
        to_table(to_pages),
        from(static_cast<std::size_t>(shape.from_bytes())),
        to(static_cast<std::size_t>(shape.to_bytes())),
        copy(shape.copy(from.data(), from_table.data(), to.data(), to_table.data())),
        blocks(static_cast<unsigned>(sms)) {
    fill_bytes(from, seed);
  }

  /// The share of the target's bytes that are not what they should be: those of the runs what the source
  /// holds, all others untouched. The runs' places are proved on the emulator, their transport here.
  double error() {
    PDSIM_CUDA(cudaMemset(to.data(), kUntouched, to.size()));
    launch_kv_copy(copy, blocks, nullptr);
    PDSIM_CUDA(cudaDeviceSynchronize());
    std::vector<unsigned char> source = from.to_host(), got = to.to_host();
    std::vector<unsigned char> expected(got.size(), kUntouched);
    const KvCopy here = shape.copy(source.data(), from_pages.data(), expected.data(), to_pages.data());
    for (std::uint32_t i = 0; i < here.runs(); ++i) {
      const KvRun run = here.run(i);
      std::memcpy(run.to, run.from, static_cast<std::size_t>(run.bytes));
    }
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < got.size(); ++i) wrong += got[i] != expected[i];
    return static_cast<double>(wrong) / static_cast<double>(got.size());
  }
};

/// Memory of the second GPU.
struct PeerMemory {
  unsigned char* data = nullptr;
  int here = 0;

  explicit PeerMemory(std::size_t bytes) {
    int count = 0, able = 0;
    PDSIM_CUDA(cudaGetDevice(&here));
    PDSIM_CUDA(cudaGetDeviceCount(&count));
    if (count > 1) PDSIM_CUDA(cudaDeviceCanAccessPeer(&able, here, other()));
    if (able == 0) throw InputError("peer", "no second GPU that this one reaches");
    const cudaError_t status = cudaDeviceEnablePeerAccess(other(), 0);
    if (status != cudaErrorPeerAccessAlreadyEnabled) PDSIM_CUDA(status);
    cudaGetLastError();
    PDSIM_CUDA(cudaSetDevice(other()));
    void* p = nullptr;
    const cudaError_t allocated = cudaMalloc(&p, bytes);
    PDSIM_CUDA(cudaSetDevice(here));
    if (allocated == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw GpuMemoryShort(std::to_string(bytes >> 20) + " MiB are not free on the second GPU");
    }
    PDSIM_CUDA(allocated);
    data = static_cast<unsigned char*>(p);
  }
  ~PeerMemory() {
    cudaSetDevice(other());
    cudaFree(data);
    cudaSetDevice(here);
  }
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  int other() const { return here == 0 ? 1 : 0; }
};

/// A copy by the copy engines: `runs` descriptors from shuffled places to places in order, so that no driver
/// can join them.
struct EngineCopy {
  Copy kind;
  CopyMemory& memory;
  std::vector<std::int32_t> order;
  Descriptors forth, back;  ///< back: the other direction of memcpy_both
  std::unique_ptr<PeerMemory> peer;
  GpuEvent begun, returned;
  std::size_t total;

  EngineCopy(Copy kind_of, std::int64_t run_bytes, std::int64_t runs, CopyMemory& shared, std::uint64_t seed)
      : kind(kind_of), memory(shared), total(static_cast<std::size_t>(run_bytes * runs)) {
    if (total > memory.to.size())
      throw InputError("runs", "more bytes in all than copies are given memory for");
    if (kind == Copy::peer) peer = std::make_unique<PeerMemory>(total);
    order = page_table(static_cast<std::int32_t>(runs), static_cast<std::int32_t>(runs), seed);
    const auto size = static_cast<std::size_t>(run_bytes);
    for (std::size_t i = 0; i < order.size(); ++i) {
      const std::size_t shuffled = static_cast<std::size_t>(order[i]) * size, in_order = i * size;
      add(forth, target() + in_order, source() + shuffled, size);
      if (kind == Copy::memcpy_both)
        add(back, memory.host_out.data() + in_order, memory.from.data() + shuffled, size);
    }
  }

  static void add(Descriptors& to, unsigned char* target, const unsigned char* source, std::size_t bytes) {
    to.to.push_back(target);
    to.from.push_back(source);
    to.bytes.push_back(bytes);
  }

  bool from_host() const {
    return kind == Copy::batch_h2d || kind == Copy::memcpy_h2d || kind == Copy::memcpy_both;
  }
  bool to_host() const { return kind == Copy::batch_d2h || kind == Copy::memcpy_d2h; }
  unsigned char* source() const { return from_host() ? memory.host_in.data() : memory.from.data(); }
  unsigned char* target() const {
    if (peer) return peer->data;
    return to_host() ? memory.host_out.data() : memory.to.data();
  }

  static void one_by_one(const Descriptors& copies, Stream stream) {
    for (std::size_t i = 0; i < copies.to.size(); ++i)
      PDSIM_CUDA(cudaMemcpyAsync(copies.to[i], copies.from[i], copies.bytes[i], cudaMemcpyDefault, stream));
  }

  void run(Stream stream) const {
    switch (kind) {
      case Copy::memcpy_h2d:
      case Copy::memcpy_d2h:
        return one_by_one(forth, stream);
      case Copy::memcpy_both: {  // turn about, so that neither direction waits for the posting of the other
        begun.record(stream);
        begun.hold(memory.beside.get());
        for (std::size_t i = 0; i < forth.to.size(); ++i) {
          PDSIM_CUDA(cudaMemcpyAsync(forth.to[i], forth.from[i], forth.bytes[i], cudaMemcpyDefault, stream));
          PDSIM_CUDA(cudaMemcpyAsync(back.to[i], back.from[i], back.bytes[i], cudaMemcpyDefault,
                                     memory.beside.get()));
        }
        returned.record(memory.beside.get());
        return returned.hold(stream);
      }
      default:
        return batch_copy(forth, stream);
    }
  }

  /// Descriptors whose bytes did not arrive.
  double error() const {
    GpuStream stream;
    PDSIM_CUDA(cudaMemset(target(), kUntouched, total));
    if (kind == Copy::memcpy_both) PDSIM_CUDA(cudaMemset(memory.host_out.data(), kUntouched, total));
    PDSIM_CUDA(cudaDeviceSynchronize());
    run(stream.get());
    stream.wait();
    int wrong = not_arrived(target(), source());
    if (kind == Copy::memcpy_both) wrong += not_arrived(memory.host_out.data(), memory.from.data());
    return wrong;
  }

  int not_arrived(const unsigned char* at, const unsigned char* of) const {
    std::vector<unsigned char> got(total), sent(total);
    PDSIM_CUDA(cudaMemcpy(got.data(), at, total, cudaMemcpyDefault));
    PDSIM_CUDA(cudaMemcpy(sent.data(), of, total, cudaMemcpyDefault));
    const std::size_t size = total / order.size();
    int wrong = 0;
    for (std::size_t i = 0; i < order.size(); ++i)
      wrong += std::memcmp(&got[i * size], &sent[static_cast<std::size_t>(order[i]) * size], size) != 0;
    return wrong;
  }
};

}  // namespace

CopyMemory::CopyMemory(std::size_t bytes) : host_in(bytes), host_out(bytes), from(bytes), to(bytes) {
  fill_bytes(from, 1);
  PDSIM_CUDA(cudaMemcpy(host_in.data(), from.data(), from.size(), cudaMemcpyDeviceToHost));
  fill_bytes(from, 2);
  PDSIM_CUDA(cudaDeviceSynchronize());
}

Problem copy_problem(Copy copy, std::int64_t run_bytes, std::int64_t runs, std::int64_t sms,
                     CopyMemory& memory, std::uint64_t seed) {
  Problem problem;
  problem.kernel = name(copy);
  if (on_multiprocessors(copy)) {
    const auto state = std::make_shared<KernelCopy>(copy, run_bytes, runs, sms, seed);
    problem.run = [state](Stream stream) { launch_kv_copy(state->copy, state->blocks, stream); };
    problem.error = [state] { return state->error(); };
  } else {
    const auto state = std::make_shared<EngineCopy>(copy, run_bytes, runs, memory, seed);
    problem.run = [state](Stream stream) { state->run(stream); };
    problem.error = [state] { return state->error(); };
    problem.posting = Harness::Posting::counted;
  }
  return problem;
}

}  // namespace pdsim::kernels
