// Params whose shape has a dimension of the tensor as several, in layouts that
// cut the tensor as it is stored.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "compiler/layout/common/cut.h"
#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

// Two layers of 3 heads of 4 rows, and of 2 experts of 5 x 6.
Model TwoSplitParams() {
  Model model;
  model.params.push_back({.name = "layers.{0}.query",
                          .index = {Consecutive(0, 2)},
                          .shape = {3, 2, 2, 5},
                          .dtype = DType::kBf16,
                          .split = Split::kRowsInHeadPairs});
  model.params.push_back({.name = "layers.{0}.experts",
                          .index = {Consecutive(0, 2)},
                          .shape = {2, 5, 3, 2},
                          .dtype = DType::kBf16,
                          .split = Split::kLastInPairs});
  return model;
}

MeshSpec Ranks(int64_t count) {
  MeshSpec mesh = {
      .name = "m", .axes = {"x"}, .shape = {count}, .ranks = {}, .place = {}};
  mesh.ranks.resize(count);
  std::iota(mesh.ranks.begin(), mesh.ranks.end(), 0);
  return mesh;
}

TensorRule Rule(std::string match, Placement placement) {
  TensorRule rule;
  rule.match = std::move(match);
  rule.mesh = "m";
  rule.placements = {placement};
  return rule;
}

TEST(SplitParamTest, HasTheStoredShape) {
  const Model model = TwoSplitParams();
  EXPECT_EQ(model.params[0].StoredShape(), (Dims{12, 5}));
  EXPECT_EQ(model.params[1].StoredShape(), (Dims{2, 5, 6}));
  EXPECT_EQ(Checkpoint(model).at("layers.1.query").shape,
            (std::vector<int64_t>{12, 5}));
}

TEST(SplitParamTest, FsdpCutsRowsWhereTorchDoes) {
  const Model model = TwoSplitParams();
  const Tensor query = Checkpoint(model).at("layers.1.query");
  for (int64_t count = 1; count <= 13; ++count) {
    SideSpec side = MakeSide(LayoutKind::kFsdp);
    side.data_parallel = Given(count);
    const std::vector<Tensors> ranks =
        LayOutAndExpand(model, side, fb::Side::kSource);
    ASSERT_EQ(ranks.size(), count);
    for (int64_t rank = 0; rank < count; ++rank) {
      const Range rows = ChunkShard(12, count, rank);
      EXPECT_EQ(ranks[rank].at("layers.1.query"),
                Rows(query, rows.begin, rows.end))
          << rank << " of " << count;
    }
  }
}

TEST(SplitParamTest, PlacementsCutTheStoredDimensions) {
  using enum Placement::Kind;
  const Model model = TwoSplitParams();
  const Tensors hf = Checkpoint(model);
  const Tensor& query = hf.at("layers.1.query");
  SideSpec side = MakeSide(LayoutKind::kGeneric);
  side.generic.meshes = {Ranks(2)};
  side.generic.tensors = {
      Rule("*query",
           {.kind = kStridedShard, .dim = 0, .split_factor = 4, .place = {}}),
      Rule("*", {.kind = kShard, .dim = 2, .place = {}})};
  std::vector<Tensors> ranks =
      LayOutAndExpand(model, side, fb::Side::kDestination);
  // Four chunks of 3 rows, of each 2 to the first rank.
  EXPECT_EQ(ranks[1].at("layers.1.query"),
            Concat({Rows(query, 2, 3), Rows(query, 5, 6), Rows(query, 8, 9),
                    Rows(query, 11, 12)}));
  const Tensor& experts = hf.at("layers.1.experts");
  Tensor columns = {.shape = {2, 5, 3}, .cells = {}};
  for (size_t cell = 0; cell < experts.cells.size(); ++cell) {
    if (cell % 6 >= 3) columns.cells.push_back(experts.cells[cell]);
  }
  EXPECT_EQ(ranks[1].at("layers.1.experts"), columns);

  side.generic.tensors = {Rule("*", {.kind = kShard, .dim = 1, .place = {}})};
  ranks = LayOutAndExpand(model, side, fb::Side::kDestination);
  EXPECT_EQ(ranks[1].at("layers.1.query"), Columns(query, 3, 5));
}

TEST(SplitParamTest, FlatBuffersCountTheStoredRows) {
  const Model model = TwoSplitParams();
  const Tensor query = Checkpoint(model).at("layers.1.query");
  FlatBufferSpec flat;
  flat.name = "flat";
  flat.mesh = "m";
  flat.placements = {{.kind = Placement::Kind::kShard, .dim = 0, .place = {}}};
  flat.length = 40;
  FlatEntry entry;
  entry.param = "layers.1.query";
  entry.rows = RangeSpec{.begin = 3, .end = 11, .place = {}};
  flat.entries = {entry};
  SideSpec side = MakeSide(LayoutKind::kGeneric);
  side.generic.meshes = {Ranks(3)};
  side.generic.flat_buffers = {flat};
  side.generic.tensors = {Rule("*", {})};
  const std::vector<Tensors> ranks =
      LayOutAndExpand(model, side, fb::Side::kDestination);
  std::vector<int64_t> cells;
  for (const Tensors& rank : ranks) {
    const std::vector<int64_t>& of_rank = rank.at("flat").cells;
    cells.insert(cells.end(), of_rank.begin(), of_rank.end());
  }
  EXPECT_EQ(cells, Rows(query, 3, 11).cells);

  side.generic.flat_buffers[0].entries[0].rows->end = 13;
  EXPECT_EQ(LayOutErrors(model, side),
            "rows end at 13 but \"layers.1.query\" has 12 rows\n");
}

}  // namespace
}  // namespace refit
