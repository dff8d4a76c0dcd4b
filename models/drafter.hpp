// Who drafts tokens for speculative decoding, as a model of its own: what one pass of it runs, and what it
// holds in memory beside the model that it drafts for.
//
// A pass is a forward pass of `model` over the batch, LM head included. vLLM's proposers (v1/spec_decode)
// run the first over every token of the step, which also writes the drafter's KV, and each further draft
// over one token a sequence.
#pragma once

#include "models/model.hpp"

namespace pdsim {

struct Drafter {
  ModelSpec model;        ///< the layers of one pass
  Dtype weights{};        ///< as in operators()
  std::int32_t held = 1;  ///< such sets of layers in memory, each with its KV; a pass runs one
  bool ends = false;      ///< embeddings and LM head are its own, not the target's
};

/// The model's multi-token-prediction layers (DeepSeek-V3, arXiv 2412.19437, 2.2): each a layer as its last
/// one, behind a projection of the last hidden state and the next token's embedding to one vector, in the
/// model's own weight format. Drafts beyond their number reuse them. Requires mtp_layers > 0.
Drafter mtp_drafter(const ModelSpec& model, Dtype weights);

/// An EAGLE head (arXiv 2401.15077; EAGLE-3, arXiv 2503.01840): one dense layer with the target's attention,
/// in 16 bits, behind a projection of `joins` vectors. As wide as the target's dense layers; where it has
/// none, as what a token meets of its experts.
Drafter eagle_drafter(const ModelSpec& model, std::int32_t joins);

/// The parallelism that a drafter has: the target's, on the last pipeline stage.
Parallelism drafter_parallelism(Parallelism target);

/// The target's footprint and the drafter's, of `own` (footprint() of its model, at its `ends`), in one GPU
/// that has both: weights and KV add, activations take turns.
Footprint with_drafter(Footprint target, const Footprint& own, std::int32_t held);

}  // namespace pdsim
