// The cases of NCCL M2N's basic matrix (github.com/NVIDIA/nccl-extensions,
// nccl_m2n/tests) as generic jobs, and what that library excludes: 4-D tensors,
// two sharded axes, uneven shards.
//
// Its README counts 226 cases. The header beside it (at commit 44d2de0) lists
// 209, which are all here:
//
//   full_replication             3   element sizes
//   full_sharding               12   4 pairs of dims x 3 element sizes
//   2d_placement                48   3 meshes x 16 (4 pairs of dims x 4 orders)
//   uneven_ratio                32   2 ratios x 16
//   tensor_size_sensitivity     48   3 shapes x 16
//   nd_tensors                  13   2 shapes x 7 pairs of dims, less one
//   1d_full_sharding             3   element sizes
//   1d_2d_placement             12   3 meshes x 4 orders
//   1d_uneven_ratio              8   2 ratios x 4
//   1d_tensor_size_sensitivity  12   3 shapes x 4
//   cross_dim_regression         6
//   and of groups that test that library's streams, graphs, staging and
//   communicators, what they move: staging_slot_pressure 1, graph_capture 2,
//   window_null 1, tiny_contribution 1, stream_churn 1, stream_ordering 1,
//   split_* 2, pack_* 3
//
// The README's own listing starts full_sharding at case 5 and 2d_placement at
// case 25: five element types where the header has three, so 2 + 8 + 2 more
// cases in the groups that sweep them. The five that are then missing are
// nowhere to be read; here they are the small cross_dim_regression cases in the
// other direction.
//
// Every case runs at the smallest world it fits, as that library's --list says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "tests/property/chain.h"
#include "tests/property/draw.h"
#include "tests/property/generic_side.h"
#include "tests/property/oracle.h"
#include "tests/sanitizers.h"

namespace refit {
namespace {

// A sanitizer makes the largest tensors too slow: they shrink by 8 per extent.
constexpr int64_t kLargeExtentDivisor = kSanitized ? 8 : 1;

// Which axis of a side's mesh shards. A mesh is `outer` x the rest of the
// side's ranks.
enum class Order : uint8_t { kReplicated, kShardOuter, kShardInner };

struct MatrixSide {
  Order order = Order::kShardInner;
  int64_t outer = 1;
  int64_t dim = 0;
  int64_t share = 1;  // of the world's ranks, in proportion to the other side's
};

struct MatrixCase {
  std::string group;
  std::vector<int64_t> shape;
  std::string dtype = "bf16";
  MatrixSide source;
  MatrixSide destination;
  int64_t world_min = 4;
  bool reversed = false;  // ranks run backwards over the meshes
};

// A side at a world size.
struct SizedSide {
  int64_t ranks = 0;
  int64_t inner = 0;
  int64_t shards = 1;

  int64_t ShardOf(const MatrixSide& side, int64_t position) const {
    switch (side.order) {
      case Order::kReplicated:
        return 0;
      case Order::kShardOuter:
        return position / inner;
      case Order::kShardInner:
        return position % inner;
    }
    return 0;
  }
};

// The side's mesh in a world; nullopt if its ranks do not form one.
std::optional<SizedSide> SizeSide(const MatrixCase& c, const MatrixSide& side,
                                  int64_t world) {
  SizedSide sized;
  sized.ranks = world * side.share / (c.source.share + c.destination.share);
  if (sized.ranks == 0 || sized.ranks % side.outer != 0) return std::nullopt;
  sized.inner = sized.ranks / side.outer;
  sized.shards = side.order == Order::kShardOuter   ? side.outer
                 : side.order == Order::kShardInner ? sized.inner
                                                    : 1;
  return sized;
}

// The smallest world in which both sides form their meshes and all shards are
// even. Four of the 1d_uneven_ratio cases shard 16384 elements by a multiple of
// three in every world, so that NCCL M2N always skips them: these are uneven in
// the smallest world that forms their meshes.
int64_t SmallestWorld(const MatrixCase& c) {
  constexpr int64_t kWorldMax = 4096;
  const int64_t step = c.source.share + c.destination.share;
  const auto is_even = [&](const MatrixSide& side, const SizedSide& sized) {
    return c.shape[side.dim] % sized.shards == 0;
  };
  int64_t smallest = 0;
  for (int64_t world = (c.world_min + step - 1) / step * step;
       world <= kWorldMax; world += step) {
    const std::optional<SizedSide> source = SizeSide(c, c.source, world);
    const std::optional<SizedSide> destination =
        SizeSide(c, c.destination, world);
    if (!source.has_value() || !destination.has_value()) continue;
    if (smallest == 0) smallest = world;
    if (is_even(c.source, *source) && is_even(c.destination, *destination)) {
      return world;
    }
  }
  return smallest;
}

std::string NameOf(const MatrixCase& c) {
  const auto side = [](const MatrixSide& s) {
    const std::string_view order = s.order == Order::kReplicated   ? "repl"
                                   : s.order == Order::kShardOuter ? "sr"
                                                                   : "rs";
    return absl::StrFormat("%d %s dim %d share %d", s.outer, order, s.dim,
                           s.share);
  };
  return absl::StrFormat("%s [%s] %s: %s -> %s%s", c.group,
                         absl::StrJoin(c.shape, "x"), c.dtype, side(c.source),
                         side(c.destination), c.reversed ? " reversed" : "");
}

// --- the matrix ------------------------------------------------------------

using Pair = std::pair<int64_t, int64_t>;
const std::vector<Pair> kDims = {{0, 0}, {0, 1}, {1, 0}, {1, 1}};
const std::vector<Pair> kMeshes = {{2, 4}, {4, 2}, {2, 2}};
const std::vector<Pair> kRatios = {{3, 1}, {1, 3}};
const std::vector<std::pair<Order, Order>> kOrders = {
    {Order::kShardOuter, Order::kShardOuter},
    {Order::kShardInner, Order::kShardInner},
    {Order::kShardOuter, Order::kShardInner},
    {Order::kShardInner, Order::kShardOuter}};

class Matrix {
 public:
  Matrix() {
    AddElementTypes({"fp32", "bf16", "uint8"});
    for (const Pair& mesh : kMeshes) {
      AddOrders("2d_placement", {200, 200}, kDims, mesh, {1, 1});
      AddOrders("1d_2d_placement", {8192}, {{0, 0}}, mesh, {1, 1});
    }
    for (const Pair& ratio : kRatios) {
      AddOrders("uneven_ratio", {240, 240}, kDims, {2, 2}, ratio);
      AddOrders("1d_uneven_ratio", {16384}, {{0, 0}}, {2, 2}, ratio);
    }
    for (const Pair& shape :
         std::vector<Pair>{{576, 576}, {3072, 6144}, {3072, 3072}}) {
      AddOrders("tensor_size_sensitivity", {shape.first, shape.second}, kDims,
                {4, 4}, {1, 1});
    }
    for (const int64_t size : {16384, 1048576, 4194304}) {
      AddOrders("1d_tensor_size_sensitivity", {size}, {{0, 0}}, {4, 4}, {1, 1});
    }
    AddNdTensors();
    AddCrossDims();
    AddSpecialGroups();
    published_ = cases_.size();
    AddElementTypes({"fp16", "int8"});
    AddCrossDimsBackwards();
  }

  const std::vector<MatrixCase>& cases() const { return cases_; }
  size_t published() const { return published_; }  // they come first

 private:
  MatrixCase& Add(std::string group, std::vector<int64_t> shape, Pair dims) {
    MatrixCase& c = cases_.emplace_back();
    c.group = std::move(group);
    c.shape = std::move(shape);
    c.source.dim = dims.first;
    c.destination.dim = dims.second;
    return c;
  }

  void AddReplicated(std::string group, std::vector<int64_t> shape,
                     std::string dtype) {
    MatrixCase& c = Add(std::move(group), std::move(shape), {0, 0});
    c.dtype = std::move(dtype);
    c.source.order = c.destination.order = Order::kReplicated;
  }

  void AddElementTypes(const std::vector<std::string>& dtypes) {
    for (const std::string& dtype : dtypes) {
      AddReplicated("full_replication", {200, 200}, dtype);
      for (const Pair& dims : kDims) {
        Add("full_sharding", {200, 200}, dims).dtype = dtype;
      }
      Add("1d_full_sharding", {8192}, {0, 0}).dtype = dtype;
    }
  }

  void AddOrders(const std::string& group, const std::vector<int64_t>& shape,
                 const std::vector<Pair>& dims, Pair outer, Pair share) {
    for (const Pair& d : dims) {
      for (const auto& [source, destination] : kOrders) {
        MatrixCase& c = Add(group, shape, d);
        c.source = {source, outer.first, d.first, share.first};
        c.destination = {destination, outer.second, d.second, share.second};
      }
    }
  }

  void AddNdTensors() {
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{64, 128, 128}, {128, 64, 64}}) {
      for (const Pair& dims : std::vector<Pair>{
               {0, 0}, {0, 1}, {0, 2}, {2, 0}, {1, 0}, {1, 1}, {1, 2}}) {
        // This one is among the cross-dim cases.
        if (shape[0] == 64 && dims == Pair{0, 1}) continue;
        Add("nd_tensors", shape, dims);
      }
    }
  }

  void AddCrossDims() {
    AddOrders("cross_dim_regression", {200, 200}, {{0, 1}}, {2, 4}, {1, 1});
    for (size_t i = cases_.size() - 4; i < cases_.size(); ++i) {
      cases_[i].world_min = 8;
    }
    Add("cross_dim_regression", {64, 128, 128}, {0, 1}).world_min = 8;
    // DeepSeek-V3's experts on 256 ranks. Of its 3.8e9 elements it keeps the
    // dimensions' order and shards; the full size is compiled and proved below.
    MatrixCase& c = Add("cross_dim_regression", {256, 14, 64}, {0, 2});
    c.source.outer = 8;
    c.destination.outer = 4;
    c.world_min = 256;
  }

  void AddCrossDimsBackwards() {
    AddOrders("cross_dim_regression", {200, 200}, {{1, 0}}, {4, 2}, {1, 1});
    Add("cross_dim_regression", {64, 128, 128}, {1, 0}).world_min = 8;
  }

  void AddSpecialGroups() {
    Add("staging_slot_pressure", {64, 128, 128}, {0, 2});
    for (const char* group : {"graph_capture", "graph_capture", "stream_churn",
                              "stream_ordering"}) {
      Add(group, {64, 64}, {0, 0}).dtype = "fp32";
    }
    AddReplicated("tiny_contribution", {4}, "uint8");
    AddReplicated("split_tiny_contribution", {4}, "uint8");
    MatrixCase& reverse = Add("split_reverse_mesh", {4096}, {0, 0});
    reverse.dtype = "uint8";
    reverse.reversed = true;
    for (const auto& [group, dtype] :
         {std::pair("window_null", "uint8"), std::pair("pack_lsa_hput", "bf16"),
          std::pair("pack_lsa_hput", "uint8")}) {
      MatrixCase& pair = Add(group, {4096}, {0, 0});
      pair.dtype = dtype;
      pair.world_min = 2;
    }
    Add("pack_signal_bank", {4}, {0, 0});
  }

  std::vector<MatrixCase> cases_;
  size_t published_ = 0;
};

// --- running a case --------------------------------------------------------

// The tensor's bytes, all different from their neighbours.
std::vector<std::byte> LogicalBytes(const MatrixCase& c) {
  std::vector<std::byte> bytes(Product(c.shape) * ElementBytes(c.dtype));
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    const uint64_t word = Mix(at);
    std::memcpy(bytes.data() + at, &word,
                std::min(sizeof(word), bytes.size() - at));
  }
  return bytes;
}

// Shard `index` of `count` of dimension `dim`, as torch.chunk cuts it.
TensorBytes Slice(const MatrixCase& c, const std::vector<std::byte>& bytes,
                  int64_t dim, int64_t count, int64_t index) {
  const int64_t extent = c.shape[dim];
  const int64_t share = (extent + count - 1) / count;
  const int64_t begin = std::min(index * share, extent);
  const int64_t end = std::min(begin + share, extent);
  TensorBytes slice = {
      .name = "tensor", .dtype = c.dtype, .shape = c.shape, .bytes = {}};
  slice.shape[dim] = end - begin;
  int64_t rows = 1;
  for (int64_t d = 0; d < dim; ++d) rows *= c.shape[d];
  const int64_t row_bytes = static_cast<int64_t>(bytes.size()) / rows;
  const int64_t step_bytes = row_bytes / extent;
  const int64_t part_bytes = (end - begin) * step_bytes;
  slice.bytes.resize(rows * part_bytes);
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(slice.bytes.data() + row * part_bytes,
                bytes.data() + row * row_bytes + begin * step_bytes,
                part_bytes);
  }
  return slice;
}

std::string SideText(const MatrixCase& c, const MatrixSide& side,
                     const SizedSide& sized) {
  std::string axes =
      absl::StrFormat("\"outer\": %d, \"inner\": %d", side.outer, sized.inner);
  const std::string shard = absl::StrFormat("\"Shard(%d)\"", side.dim);
  std::string placements;
  switch (side.order) {
    case Order::kReplicated:
      placements = "\"Replicate\", \"Replicate\"";
      break;
    case Order::kShardOuter:
      placements = shard + ", \"Replicate\"";
      break;
    case Order::kShardInner:
      placements = "\"Replicate\", " + shard;
      break;
  }
  if (side.outer == 1) {  // a mesh of one axis
    axes = absl::StrFormat("\"rank\": %d", sized.ranks);
    placements = side.order == Order::kReplicated ? "\"Replicate\"" : shard;
  }
  std::vector<int64_t> ranks(sized.ranks);
  std::iota(ranks.begin(), ranks.end(), 0);
  if (c.reversed) std::reverse(ranks.begin(), ranks.end());
  return absl::StrFormat(
      "{\"layout\": \"generic\", \"meshes\": {\"main\": {\"axes\": {%s}, "
      "\"ranks\": [%s]}}, \"tensors\": [{\"match\": \"tensor\", \"mesh\": "
      "\"main\", \"placements\": [%s]}]}",
      axes, absl::StrJoin(ranks, ", "), placements);
}

std::string JobText(const MatrixCase& c, const SizedSide& source,
                    const SizedSide& destination) {
  return absl::StrFormat(
      "{\"model\": {\"parameters\": [{\"name\": \"tensor\", \"shape\": [%s], "
      "\"dtype\": \"%s\"}]},\n\"source\": %s,\n\"destination\": "
      "%s,\n\"options\": {\"bucket_bytes\": 4194304}}\n",
      absl::StrJoin(c.shape, ", "), c.dtype, SideText(c, c.source, source),
      SideText(c, c.destination, destination));
}

std::string RunCase(MatrixCase c) {
  for (int64_t& extent : c.shape) {
    if (extent > 1024) extent /= kLargeExtentDivisor;
  }
  const int64_t world = SmallestWorld(c);
  const SizedSide source = SizeSide(c, c.source, world).value();
  const SizedSide destination = SizeSide(c, c.destination, world).value();
  ChainCase chain;
  chain.job = JobText(c, source, destination);
  const std::vector<std::byte> bytes = LogicalBytes(c);
  for (const auto& [side, sized, ranks] :
       {std::tuple(&c.source, &source, &chain.sources),
        std::tuple(&c.destination, &destination, &chain.destinations)}) {
    for (int64_t rank = 0; rank < sized->ranks; ++rank) {
      const int64_t position = c.reversed ? sized->ranks - 1 - rank : rank;
      ranks->push_back({Slice(c, bytes, side->dim, sized->shards,
                              sized->ShardOf(*side, position))});
    }
  }
  return RunChain(chain);
}

TEST(M2nMatrixTest, HasTheCasesThatAreCounted) {
  const Matrix matrix;
  EXPECT_EQ(matrix.published(), 209u);
  EXPECT_EQ(matrix.cases().size(), 226u);
}

TEST(M2nMatrixTest, WorldsAreTheSmallestThatFit) {
  const Matrix matrix;
  // The first of each group, as the README lists them.
  for (const auto& [group, world] :
       {std::pair("full_replication", 4), std::pair("full_sharding", 4),
        std::pair("2d_placement", 8), std::pair("uneven_ratio", 8),
        std::pair("tensor_size_sensitivity", 8)}) {
    const auto first =
        std::find_if(matrix.cases().begin(), matrix.cases().end(),
                     [group = std::string(group)](const MatrixCase& c) {
                       return c.group == group;
                     });
    ASSERT_NE(first, matrix.cases().end());
    EXPECT_EQ(SmallestWorld(*first), world) << NameOf(*first);
  }
}

// A ninth of the matrix each, so that they can run side by side.
constexpr size_t kParts = 9;
class M2nMatrixPartTest : public ::testing::TestWithParam<size_t> {};

TEST_P(M2nMatrixPartTest, EveryDestinationByteIsRight) {
  const Matrix matrix;
  size_t runs = 0;
  for (size_t i = GetParam(); i < matrix.cases().size(); i += kParts) {
    EXPECT_EQ(RunCase(matrix.cases()[i]), "")
        << "case " << i << ": " << NameOf(matrix.cases()[i]);
    ++runs;
  }
  EXPECT_EQ(runs, (226 - GetParam() + kParts - 1) / kParts);
}

INSTANTIATE_TEST_SUITE_P(Parts, M2nMatrixPartTest,
                         ::testing::Range(size_t{0}, kParts));

TEST(M2nMatrixTest, MoreElementsThanAnInt32CountsCompileAndAreProved) {
  const MatrixCase c = {.group = "cross_dim_regression",
                        .shape = {256, 7168, 2048},
                        .source = {.outer = 8, .dim = 0},
                        .destination = {.outer = 4, .dim = 2},
                        .world_min = 256};
  EXPECT_EQ(CompileChain(JobText(c, SizeSide(c, c.source, 256).value(),
                                 SizeSide(c, c.destination, 256).value())),
            "");
}

// --- what the library excludes ---------------------------------------------

GenericPlacement ShardOf(int64_t dim) {
  return {.kind = GenericPlacement::Kind::kShard, .dim = dim};
}

// All that two axes can do to a tensor of `dims` dimensions.
std::vector<std::vector<GenericPlacement>> PlacementPairs(int64_t dims) {
  std::vector<GenericPlacement> choices = {GenericPlacement{}};
  for (int64_t dim = 0; dim < dims; ++dim) choices.push_back(ShardOf(dim));
  choices.push_back({.kind = GenericPlacement::Kind::kStridedShard,
                     .dim = 0,
                     .split_factor = 3});
  std::vector<std::vector<GenericPlacement>> pairs;
  for (const GenericPlacement& first : choices) {
    for (const GenericPlacement& second : choices) {
      pairs.push_back({first, second});
    }
  }
  return pairs;
}

// Runs `shape` from every pair of placements on a 2 x 3 mesh to three pairs on
// a 3 x 2 mesh.
void RunPlacementPairs(const std::vector<int64_t>& shape) {
  const std::vector<LogicalTensor> tensors = {
      {.name = "tensor", .shape = shape, .dtype = "int16"}};
  const std::vector<std::vector<GenericPlacement>> pairs =
      PlacementPairs(static_cast<int64_t>(shape.size()));
  const auto side = [](std::vector<int64_t> sizes,
                       std::vector<GenericPlacement> placements) {
    std::vector<int64_t> ranks(Product(sizes));
    std::iota(ranks.begin(), ranks.end(), 0);
    return GenericSide{
        .meshes = {{.name = "main", .sizes = std::move(sizes), .ranks = ranks}},
        .rules = {{.match = "tensor",
                   .placements = std::move(placements),
                   .rename = "",
                   .dtype = ""}},
        .dtype = ""};
  };
  for (size_t i = 0; i < pairs.size(); ++i) {
    for (size_t step = 1; step <= 3; ++step) {
      const GenericSide source = side({2, 3}, pairs[i]);
      const GenericSide destination =
          side({3, 2}, pairs[(i * 5 + step * 7) % pairs.size()]);
      ChainCase chain;
      chain.job = absl::StrFormat(
          "{\"model\": {\"parameters\": [{\"name\": \"tensor\", \"shape\": "
          "[%s], \"dtype\": \"int16\"}]},\n\"source\": %s,\n\"destination\": "
          "%s}\n",
          absl::StrJoin(shape, ", "), refit::SideText(source),
          refit::SideText(destination));
      FillTensors(i, LayOutSide(source, tensors),
                  LayOutSide(destination, tensors), {false}, chain);
      EXPECT_EQ(RunChain(chain), "") << chain.job;
    }
  }
}

TEST(M2nExcludedTest, FourDimensionalTensorsAreMoved) {
  RunPlacementPairs({12, 6, 6, 4});
}

TEST(M2nExcludedTest, UnevenAndEmptyShardsOfFourDimensionsAreMoved) {
  RunPlacementPairs({5, 7, 1, 3});
}

TEST(M2nExcludedTest, UnevenShardsOfMatricesAreMoved) {
  RunPlacementPairs({23, 11});
}

TEST(M2nExcludedTest, TwoShardedAxesOfAVectorAreMoved) {
  RunPlacementPairs({25});
}

}  // namespace
}  // namespace refit
