// Flat buffers of the generic layout against whole buffers written out element
// by element.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "compiler/layout/common/cut.h"
#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

class Draw {
 public:
  explicit Draw(uint32_t seed) : random_(seed) {}
  int64_t Between(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

 private:
  std::mt19937 random_;
};

MeshSpec Row(int64_t ranks) {
  MeshSpec mesh;
  mesh.name = "row";
  mesh.axes = {"dp"};
  mesh.shape = {ranks};
  mesh.ranks.resize(ranks);
  std::iota(mesh.ranks.begin(), mesh.ranks.end(), 0);
  return mesh;
}

FlatBufferSpec MakeFlat(std::string name, int64_t length,
                        std::vector<FlatEntry> entries) {
  FlatBufferSpec flat;
  flat.name = std::move(name);
  flat.mesh = "row";
  flat.placements = {{.kind = Placement::Kind::kShard, .dim = 0, .place = {}}};
  flat.length = length;
  flat.entries = std::move(entries);
  return flat;
}

FlatEntry At(std::string param, int64_t offset) {
  FlatEntry entry;
  entry.param = std::move(param);
  entry.offset = offset;
  return entry;
}

SideSpec MakeSideOf(std::vector<FlatBufferSpec> flat_buffers,
                    int64_t ranks = 2) {
  SideSpec side = MakeSide(LayoutKind::kGeneric);
  side.generic.meshes = {Row(ranks)};
  side.generic.flat_buffers = std::move(flat_buffers);
  return side;
}

Model TwoParams() {
  Model model;
  model.params.push_back(
      {.name = "a", .index = {}, .shape = {3, 4}, .dtype = DType::kBf16});
  model.params.push_back(
      {.name = "b", .index = {}, .shape = {5}, .dtype = DType::kBf16});
  return model;
}

TEST(BoxesOfElementsTest, AreTheElementsInOrder) {
  Draw draw(7);
  for (int trial = 0; trial < 2000; ++trial) {
    Dims shape;
    for (int64_t dim = draw.Between(0, 4); dim > 0; --dim) {
      shape.push_back(draw.Between(1, 5));
    }
    const int64_t size = Product(shape);
    const int64_t begin = draw.Between(0, size);
    const Range range = {begin, draw.Between(begin, size)};
    std::vector<int64_t> found;
    const std::vector<Box> boxes = BoxesOfElements(shape, range);
    EXPECT_LE(boxes.size(), std::max<size_t>(1, 2 * shape.size()));
    for (const Box& box : boxes) {
      for (int64_t i = 0; i < box.Volume(); ++i) {
        int64_t rest = i, element = 0, scale = 1;
        for (size_t dim = shape.size(); dim-- > 0;) {
          element += (box.lo[dim] + rest % box.extent(dim)) * scale;
          rest /= box.extent(dim);
          scale *= shape[dim];
        }
        found.push_back(element);
      }
    }
    std::vector<int64_t> wanted(range.size());
    std::iota(wanted.begin(), wanted.end(), range.begin);
    EXPECT_EQ(found, wanted) << trial;
  }
}

// A row that is cut, whole rows, another row that is cut.
TEST(FlatBuffersTest, RangesBeginAndEndInsideOfRows) {
  const std::vector<Tensors> ranks = LayOutAndExpand(
      TwoParams(),
      MakeSideOf({MakeFlat("flat", 18, {At("b", 13), At("a", 0)})}, 4),
      fb::Side::kDestination);
  ASSERT_EQ(ranks.size(), 4);
  EXPECT_EQ(ranks[0].at("flat").cells, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(ranks[1].at("flat").cells, (std::vector<int64_t>{5, 6, 7, 8, 9}));
  EXPECT_EQ(ranks[2].at("flat").cells,
            (std::vector<int64_t>{10, 11, Tensor::kFill, 12, 13}));
  EXPECT_EQ(ranks[3].at("flat").cells, (std::vector<int64_t>{14, 15, 16}));
}

TEST(FlatBuffersTest, GapsOfASourceAreNobodys) {
  const std::vector<Tensors> ranks = LayOutAndExpand(
      TwoParams(),
      MakeSideOf({MakeFlat("flat", 20, {At("a", 1), At("b", 14)})}, 1),
      fb::Side::kSource);
  ASSERT_EQ(ranks.size(), 1);
  EXPECT_EQ(ranks[0].at("flat").cells[0], Tensor::kNothing);
  EXPECT_EQ(ranks[0].at("flat").cells[13], Tensor::kNothing);
  EXPECT_EQ(ranks[0].at("flat").cells[19], Tensor::kNothing);
}

TEST(FlatBuffersTest, RandomBuffersHoldTheirElements) {
  Draw draw(20260302);
  for (int trial = 0; trial < 300; ++trial) {
    SCOPED_TRACE(trial);
    const int64_t layers = draw.Between(1, 3);
    const int64_t experts = draw.Between(1, 3);
    Model model;
    for (const char* name : {"m.{0}.a", "m.{0}.b", "m.{0}.e.{1}", "m.{0}.c"}) {
      Param param = {.name = name,
                     .index = {Consecutive(2, layers)},
                     .shape = {},
                     .dtype = DType::kBf16};
      if (param.name.ends_with("{1}")) {
        param.index.push_back(Consecutive(0, experts));
      }
      for (int64_t dim = draw.Between(0, 3); dim > 0; --dim) {
        param.shape.push_back(draw.Between(1, 4));
      }
      model.params.push_back(std::move(param));
    }
    const Tensors checkpoint = Checkpoint(model);

    // What a layer's buffer holds, by the params' names, in random order, with
    // gaps between them; a matrix in two parts.
    std::vector<std::string> names = {"a", "b", "c"};
    for (int64_t e = 0; e < experts; ++e)
      names.push_back("e." + std::to_string(e));
    for (size_t i = names.size(); i-- > 1;) {
      std::swap(names[i], names[draw.Between(0, static_cast<int64_t>(i))]);
    }
    std::vector<FlatEntry> entries;
    std::vector<std::vector<int64_t>> whole(layers);
    const auto put = [&](const std::string& name, int64_t begin, int64_t end) {
      const int64_t gap = draw.Between(0, 1) * draw.Between(0, 5);
      entries.push_back(
          At("m.{layer}." + name, static_cast<int64_t>(whole[0].size()) + gap));
      for (int64_t layer = 0; layer < layers; ++layer) {
        whole[layer].resize(whole[layer].size() + gap, Tensor::kFill);
        const std::vector<int64_t>& cells =
            checkpoint.at("m." + std::to_string(2 + layer) + "." + name).cells;
        whole[layer].insert(whole[layer].end(), cells.begin() + begin,
                            cells.begin() + end);
      }
    };
    for (const std::string& name : names) {
      const Tensor& tensor = checkpoint.at("m.2." + name);
      const auto size = static_cast<int64_t>(tensor.cells.size());
      if (tensor.shape.empty() || draw.Between(0, 2) > 0) {
        put(name, 0, size);
        continue;
      }
      const int64_t rows = tensor.shape[0];
      const int64_t cut = draw.Between(0, rows);
      put(name, cut * size / rows, size);
      entries.back().rows = RangeSpec{.begin = cut, .end = rows, .place = {}};
      put(name, 0, cut * size / rows);
      entries.back().rows = RangeSpec{.begin = 0, .end = cut, .place = {}};
    }
    const int64_t tail = draw.Between(0, 4);
    for (std::vector<int64_t>& cells : whole) {
      cells.resize(cells.size() + tail, Tensor::kFill);
    }
    const auto length = static_cast<int64_t>(whole[0].size());
    std::shuffle(entries.begin(), entries.end(), std::mt19937(trial));

    FlatBufferSpec flat = MakeFlat("g.{layer}", length, entries);
    flat.layers = RangeSpec{.begin = 2, .end = 2 + layers, .place = {}};
    const int64_t ranks = draw.Between(1, 5);
    std::vector<Range> ranges;
    const bool is_uneven = draw.Between(0, 1) == 1;
    if (is_uneven) flat.placements.clear();
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t each = (length + ranks - 1) / ranks;
      int64_t begin = std::min(rank * each, length);
      int64_t end = std::min(begin + each, length);
      if (is_uneven) {
        begin = draw.Between(0, length);
        end = draw.Between(begin, length);
        flat.ranges.push_back({.begin = begin, .end = end, .place = {}});
      }
      ranges.push_back({begin, end});
    }
    const std::vector<Tensors> found = LayOutAndExpand(
        model, MakeSideOf({flat}, ranks), fb::Side::kDestination);
    ASSERT_EQ(found.size(), ranks);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Tensors wanted;
      for (int64_t layer = 0; layer < layers; ++layer) {
        wanted["g." + std::to_string(2 + layer)] = {
            .shape = {ranges[rank].size()},
            .cells = {whole[layer].begin() + ranges[rank].begin,
                      whole[layer].begin() + ranges[rank].end}};
      }
      ExpectSameTensors(found[rank], wanted);
    }
  }
}

// The buffers of all layers are one stack, their common params one fragment.
TEST(FlatBuffersTest, LayersAreOneStack) {
  const Model model = MakeModel({.layers = 30});
  FlatBufferSpec flat =
      MakeFlat("g.{layer}", 36 * 2,
               {At("model.layers.{layer}.mlp.up_proj.weight", 0),
                At("model.layers.{layer}.mlp.gate_proj.weight", 36)});
  flat.layers = RangeSpec{.begin = 0, .end = 30, .place = {}};
  SideSpec side = MakeSideOf({flat}, 2);
  TensorRule rest;
  rest.match = "*";
  rest.mesh = "row";
  rest.placements = {Placement{}};
  side.generic.tensors = {rest};
  BufferTable buffers;
  Diagnostics diagnostics;
  LayOut({.model = model,
          .side = side,
          .which = fb::Side::kSource,
          .buffers = buffers,
          .diagnostics = diagnostics});
  ASSERT_TRUE(diagnostics.ok()) << diagnostics.Render();
  int64_t flats = 0;
  for (const Buffer& buffer : buffers.all()) {
    if (!buffer.name.starts_with("g.")) continue;
    ++flats;
    EXPECT_EQ(buffer.index[0].extent(), 30);
    EXPECT_EQ(buffer.fragments.size(), 1);
  }
  EXPECT_EQ(flats, 2);
}

// Rules place what no flat buffer holds.
TEST(FlatBuffersTest, RulesPlaceTheRest) {
  const Model model = MakeModel({.layers = 3, .experts = 3});
  const std::string expert = "model.layers.1.mlp.experts.2.up_proj.weight";
  const Tensors checkpoint = Checkpoint(model);
  const auto size = static_cast<int64_t>(checkpoint.at(expert).cells.size());
  SideSpec side = MakeSideOf({MakeFlat("flat", size, {At(expert, 0)})}, 1);
  TensorRule rest;
  rest.match = "*";
  rest.mesh = "row";
  rest.placements = {Placement{}};
  side.generic.tensors = {rest};
  const std::vector<Tensors> ranks =
      LayOutAndExpand(model, side, fb::Side::kDestination);
  ASSERT_EQ(ranks.size(), 1);
  Tensors wanted = checkpoint;
  wanted.erase(expert);
  wanted["flat"] = {.shape = {size}, .cells = checkpoint.at(expert).cells};
  ExpectSameTensors(ranks[0], wanted);

  side.generic.tensors.insert(side.generic.tensors.begin(), rest);
  side.generic.tensors[0].match = expert;
  EXPECT_NE(LayOutErrors(model, side)
                .find("flat buffers and earlier rules place every parameter "
                      "that \"" +
                      expert + "\" matches"),
            std::string::npos);
}

TEST(FlatBuffersTest, EntriesThatDoNotFitAreNamed) {
  const Model model = TwoParams();
  const auto errors = [&](std::vector<FlatBufferSpec> flat_buffers) {
    return LayOutErrors(model, MakeSideOf(std::move(flat_buffers)));
  };
  const auto expect = [&](const std::string& found, const char* wanted) {
    EXPECT_NE(found.find(wanted), std::string::npos) << found;
  };
  EXPECT_EQ(errors({MakeFlat("f", 17, {At("a", 0), At("b", 12)})}), "");
  expect(errors({MakeFlat("f", 17, {At("c", 0)})}), "\"c\" is no parameter");
  expect(errors({MakeFlat("f", 16, {At("a", 0), At("b", 12)})}),
         "\"b\" ends at element 17; wanted at most 16, the length of flat "
         "buffer \"f\"");
  expect(errors({MakeFlat("f", 17, {At("a", 0), At("b", 11)})}),
         "\"b\" begins at element 11 of flat buffer \"f\", inside of \"a\", "
         "which ends at 12");
  expect(errors({MakeFlat("f", 12, {At("a", 0)})}),
         "no rule of destination.tensors matches parameter \"b\"");

  FlatBufferSpec rows = MakeFlat("f", 17, {At("a", 0), At("b", 12)});
  rows.entries[0].rows = RangeSpec{.begin = 1, .end = 4, .place = {}};
  expect(errors({rows}), "rows end at 4 but \"a\" has 3 rows");

  FlatBufferSpec dims = MakeFlat("f", 17, {At("a", 0), At("b", 12)});
  dims.placements[0].dim = 1;
  expect(errors({dims}), "shard dim is 1 but a flat buffer has one dim, 0");

  const FlatBufferSpec both = MakeFlat("f", 17, {At("a", 0), At("b", 12)});
  expect(errors({both, both}),
         "flat buffer \"f\" is also the tensor of \"f\" on rank 0");
  FlatBufferSpec wide = MakeFlat("g", 12, {At("a", 0)});
  wide.dtype = DType::kFp32;
  expect(errors({both, wide}),
         "\"a\" stands in flat buffers of bf16 and of fp32; wanted one dtype");
}

TEST(FlatBuffersTest, LayersOfOneBufferAreEqual) {
  Model model = TwoParams();
  model.params[0].name = "m.0.w";
  model.params[1].name = "m.1.w";
  FlatBufferSpec flat = MakeFlat("f.{layer}", 20, {At("m.{layer}.w", 0)});
  flat.layers = RangeSpec{.begin = 0, .end = 2, .place = {}};
  EXPECT_NE(LayOutErrors(model, MakeSideOf({flat}))
                .find("\"m.1.w\" has another shape than in layer 0; wanted "
                      "equal layers in one flat buffer"),
            std::string::npos);
}

}  // namespace
}  // namespace refit
