#include "models/drafter.hpp"

#include <algorithm>

#include "sim/core/error.hpp"

namespace pdsim {

namespace {

// The last layer whose attention sees all tokens, as drafters' do; else the last.
Layer last_full(const ModelSpec& model) {
  const auto full = std::find_if(model.layers.rbegin(), model.layers.rend(), [](const Layer& layer) {
    return layer.attention == LayerAttention::full || layer.attention == LayerAttention::mla ||
           layer.attention == LayerAttention::dsa;
  });
  Layer layer = full != model.layers.rend() ? *full : model.layers.back();
  layer.indexer = layer.attention == LayerAttention::dsa;
  return layer;
}

}  // namespace

Drafter mtp_drafter(const ModelSpec& model, Dtype weights) {
  PDSIM_CHECK(model.mtp_layers > 0, "a model without multi-token-prediction layers");
  Layer layer = last_full(model);
  layer.joins = 2;
  Drafter drafter{model, weights, model.mtp_layers};
  drafter.model.name += " (mtp)";
  drafter.model.layers = {layer};
  return drafter;
}

Drafter eagle_drafter(const ModelSpec& model, std::int32_t joins) {
  Layer layer = last_full(model);
  layer.joins = joins;
  layer.moe = false;
  layer.intermediate = 0;
  for (const Layer& each : model.layers) layer.intermediate = std::max(layer.intermediate, each.intermediate);
  if (layer.intermediate == 0)
    layer.intermediate = model.topk * model.moe_intermediate + model.shared_intermediate;
  Drafter drafter{model, model.dtype};
  drafter.model.name += " (eagle)";
  drafter.model.layers = {layer};
  return drafter;
}

Parallelism drafter_parallelism(Parallelism target) {
  target.pipeline = 1;
  return target;
}

Footprint with_drafter(Footprint target, const Footprint& own, std::int32_t held) {
  target.weight_bytes += held * own.weight_bytes;
  target.kv_bytes_per_token += held * own.kv_bytes_per_token;
  target.window_bytes_per_sequence += held * own.window_bytes_per_sequence;
  target.state_bytes_per_sequence += held * own.state_bytes_per_sequence;
  target.kv_regions += held * own.kv_regions;
  target.window_regions += held * own.window_regions;
  target.activation_bytes = std::max(target.activation_bytes, own.activation_bytes);
  if (target.kv_regions != 0) target.region_bytes_per_token = target.kv_bytes_per_token / target.kv_regions;
  return target;
}

}  // namespace pdsim
