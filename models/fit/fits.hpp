// The fit of each family of operations, in the order in which they depend on each other: latent attention
// takes the projections of its modules off by the gemm curves, moe and collectives stand alone. Each adds
// its curves to the profile; a family without rows adds none.
#pragma once

#include "models/fit/least_squares.hpp"
#include "models/hardware.hpp"
#include "models/kernel_table.hpp"
#include "models/profile.hpp"

namespace pdsim {

void fit_gemm(Profile& profile, const KernelTable& table, const Gpu& gpu);
void fit_attention(Profile& profile, const KernelTable& table, const Gpu& gpu);
void fit_moe(Profile& profile, const KernelTable& table, const Gpu& gpu);
void fit_collectives(Profile& profile, const KernelTable& table, const Gpu& gpu);
void fit_copies(Profile& profile, const KernelTable& table);

/// Starting points: what the data sheet promises, less a quarter.
Coefficients start_of(const Gpu& gpu, Dtype dtype, double launch_ns);

/// The coefficients that every family may fit, and their bounds.
inline const Free kLaunch{&Coefficients::launch_ns, 500, 1e6};
inline const Free kFlops{&Coefficients::flops_per_ns, 1e4, 2e7};
inline const Free kBytes{&Coefficients::bytes_per_ns, 10, 1e5};
inline const Free kOverlap{&Coefficients::overlap, 0, 1};
inline const Free kElement{&Coefficients::element_ns, 1e-6, 1};

}  // namespace pdsim
