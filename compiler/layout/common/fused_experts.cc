#include "compiler/layout/common/fused_experts.h"

#include <utility>

namespace refit {
namespace {

// `box` of the param, of which one index per dimension is `stride` elements of
// a tensor that begins with it.
Part BoxPart(const Param& param, Box box, Dims stride, int64_t offset = 0) {
  return {.role = param.role,
          .box = std::move(box),
          .offset = offset,
          .stride = std::move(stride)};
}

// A tensor a layer, experts first, of a param whose dimension `dim` has the
// gates' outputs before the ups'; its other one has the inputs.
TensorSpec StackedHalves(const Param& param, size_t dim, std::string name,
                         Range experts, EvenPart part, bool gate_first) {
  const int64_t half = param.shape[dim] / 2;
  const int64_t in = param.shape[3 - dim];
  const Range out = EvenShard(half, part.count, part.index);
  TensorSpec spec = {.name = std::move(name),
                     .shape = {experts.size(), 2 * out.size(), in},
                     .parts = {}};
  for (const bool gate : {true, false}) {
    Box box = {.lo = {experts.begin, 0, 0}, .hi = {experts.end, in, in}};
    box.lo[dim] = out.begin + (gate ? 0 : half);
    box.hi[dim] = box.lo[dim] + out.size();
    Dims stride = {2 * out.size() * in, 1, 1};
    stride[dim] = in;
    spec.parts.push_back(BoxPart(param, std::move(box), std::move(stride),
                                 gate == gate_first ? 0 : out.size() * in));
  }
  return spec;
}

}  // namespace

TensorSpec GateUpOfExperts(const Param& param, Range experts, EvenPart part) {
  const int64_t in = param.shape[1];
  const Range out = EvenShard(param.shape[2], part.count, part.index);
  const int64_t tensor = 2 * out.size() * in;
  TensorSpec spec = {.name = {}, .shape = {2 * out.size(), in}, .parts = {}};
  for (int64_t half = 0; half < 2; ++half) {
    spec.parts.push_back(BoxPart(param,
                                 {.lo = {experts.begin, 0, out.begin, half},
                                  .hi = {experts.end, in, out.end, half + 1}},
                                 {tensor, 1, in, 0}, half * out.size() * in));
  }
  return spec;
}

TensorSpec GateUpBiasOfExperts(const Param& param, Range experts,
                               EvenPart part) {
  const Range out = EvenShard(param.shape[1], part.count, part.index);
  TensorSpec spec = {.name = {}, .shape = {2 * out.size()}, .parts = {}};
  for (int64_t half = 0; half < 2; ++half) {
    spec.parts.push_back(BoxPart(param,
                                 {.lo = {experts.begin, out.begin, half},
                                  .hi = {experts.end, out.end, half + 1}},
                                 {2 * out.size(), 1, 0}, half * out.size()));
  }
  return spec;
}

TensorSpec DownOfExperts(const Param& param, Range experts, EvenPart part) {
  TensorSpec spec = StackedDown(param, {}, experts, part);
  spec.shape.erase(spec.shape.begin());
  return spec;
}

TensorSpec DownBiasOfExperts(const Param& param, Range experts) {
  TensorSpec spec = StackedDownBias(param, {}, experts);
  spec.shape.erase(spec.shape.begin());
  return spec;
}

TensorSpec StackedGateUp(const Param& param, std::string name, Range experts,
                         EvenPart part) {
  const int64_t in = param.shape[1];
  const Range out = EvenShard(param.shape[2], part.count, part.index);
  return {.name = std::move(name),
          .shape = {experts.size(), 2 * out.size(), in},
          .parts = {BoxPart(param,
                            {.lo = {experts.begin, 0, out.begin, 0},
                             .hi = {experts.end, in, out.end, 2}},
                            {2 * out.size() * in, 1, 2 * in, in})}};
}

TensorSpec StackedGateUpBias(const Param& param, std::string name,
                             Range experts, EvenPart part) {
  const Range out = EvenShard(param.shape[1], part.count, part.index);
  return {.name = std::move(name),
          .shape = {experts.size(), 2 * out.size()},
          .parts = {BoxPart(param,
                            {.lo = {experts.begin, out.begin, 0},
                             .hi = {experts.end, out.end, 2}},
                            {2 * out.size(), 2, 1})}};
}

TensorSpec StackedDown(const Param& param, std::string name, Range experts,
                       EvenPart part) {
  const Range in = EvenShard(param.shape[1], part.count, part.index);
  const int64_t out = param.shape[2];
  return {.name = std::move(name),
          .shape = {experts.size(), out, in.size()},
          .parts = {BoxPart(param,
                            {.lo = {experts.begin, in.begin, 0},
                             .hi = {experts.end, in.end, out}},
                            {out * in.size(), 1, in.size()})}};
}

TensorSpec StackedDownBias(const Param& param, std::string name,
                           Range experts) {
  const int64_t out = param.shape[1];
  return {.name = std::move(name),
          .shape = {experts.size(), out},
          .parts = {BoxPart(
              param, {.lo = {experts.begin, 0}, .hi = {experts.end, out}},
              {out, 1})}};
}

TensorSpec StackedGateThenUp(const Param& param, std::string name,
                             Range experts, EvenPart part, bool gate_first) {
  return StackedHalves(param, 2, std::move(name), experts, part, gate_first);
}

TensorSpec StackedGateAndUpRows(const Param& param, std::string name,
                                Range experts, EvenPart part, bool gate_first) {
  return StackedHalves(param, 1, std::move(name), experts, part, gate_first);
}

TensorSpec StackedDownColumns(const Param& param, std::string name,
                              Range experts, EvenPart part) {
  const int64_t out = param.shape[1];
  const Range in = EvenShard(param.shape[2], part.count, part.index);
  return {.name = std::move(name),
          .shape = {experts.size(), out, in.size()},
          .parts = {BoxPart(param,
                            {.lo = {experts.begin, 0, in.begin},
                             .hi = {experts.end, out, in.end}},
                            {out * in.size(), in.size(), 1})}};
}

}  // namespace refit
