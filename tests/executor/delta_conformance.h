// What every Device must do with copies of what has changed, held against plain
// loops over elements. A test file instantiates the suite as it does
// DeviceConformance.
//
// A device may store elements that did not change beside those that did, as it
// loads and stores several at a time. What it counts and marks must be what it
// stored.
#ifndef REFIT_TESTS_EXECUTOR_DELTA_CONFORMANCE_H_
#define REFIT_TESTS_EXECUTOR_DELTA_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "tests/executor/device_conformance.h"
#include "tests/sanitizers.h"

namespace refit {

class DeltaConformance : public DeviceConformance {
 protected:
  struct Case {
    CopyKind kind = CopyKind::kChanged;
    bool marks = false;  // of a kChanged
    uint32_t bytes_per_mark = 16;
    DType from_dtype = DType::kBf16;
    DType to_dtype = DType::kBf16;
    Shape from;
    Shape to;
    double share = 0;  // of elements that changed, or are marked
  };

  // Elements `from` or `to` of a random copy: `loops` extents, outermost first,
  // the outermost over tensors. Neighbours of the innermost loop are adjacent
  // or not.
  static Shape RandomShape(std::mt19937_64& random, uint64_t first_tensor,
                           const std::vector<uint64_t>& extents, size_t size,
                           bool adjacent) {
    Shape shape;
    shape.first_tensor = first_tensor;
    shape.byte_offset = random() % 40 * size;
    uint64_t stride = adjacent ? size : 2 * size;
    for (size_t d = extents.size(); d-- > 0;) {
      const bool is_tensors = d == 0 && extents.size() > 1;
      shape.loops.insert(shape.loops.begin(),
                         {extents[d], is_tensors ? uint64_t{1} : uint64_t{0},
                          is_tensors ? uint64_t{0} : stride});
      stride = (stride * extents[d] / size + random() % 5) * size;
    }
    return shape;
  }

  static uint64_t BytesOf(const Shape& shape, size_t size) {
    uint64_t bytes = shape.byte_offset + size;
    for (const Loop& loop : shape.loops) {
      bytes += (loop.extent - 1) * loop.byte_stride;
    }
    return bytes;
  }

  static bool BitAt(const Bytes& words, uint64_t bit) {
    return (std::to_integer<int>(words[bit / 8]) >> (bit % 8) & 1) != 0;
  }
  static void SetBit(Bytes& words, uint64_t bit) {
    words[bit / 8] |= std::byte(1 << (bit % 8));
  }

  // Runs the copy over random tensors and compares all memory with what it may
  // be.
  void CheckDelta(const Case& of, std::mt19937_64& random) {
    SCOPED_TRACE(testing::Message()
                 << "kind " << static_cast<int>(of.kind)
                 << (of.marks ? " that marks" : "") << ", bytes of a mark "
                 << of.bytes_per_mark << ", dtype "
                 << static_cast<int>(of.from_dtype) << " to "
                 << static_cast<int>(of.to_dtype) << ", from byte "
                 << of.from.byte_offset << " to byte " << of.to.byte_offset
                 << ", elements " << of.from.elements() << ", share "
                 << of.share);
    const size_t from_size = DTypeBytes(of.from_dtype);
    const size_t to_size = DTypeBytes(of.to_dtype);
    const uint64_t tensors =
        of.from.loops.size() > 1 ? of.from.loops[0].extent : 1;
    const uint64_t guard = 48;
    const uint64_t from_bytes = BytesOf(of.from, from_size) + guard;
    const uint64_t to_bytes = BytesOf(of.to, to_size) + guard;
    const uint64_t marks_bytes = (from_bytes / of.bytes_per_mark / 32 + 2) * 4;
    // The tensors, then the receiver's, shadows, marks, counts.
    std::vector<Bytes> before;
    for (uint64_t i = 0; i < tensors; ++i) {
      before.push_back(RandomBytes(from_bytes));
    }
    for (uint64_t i = 0; i < tensors; ++i) {
      before.push_back(RandomBytes(to_bytes));
    }
    const uint64_t shadows = 2 * tensors;
    for (uint64_t i = 0; i < tensors; ++i) before.push_back(before[i]);
    const uint64_t marks = 3 * tensors;
    before.resize(marks + tensors, Bytes(marks_bytes));
    DeltaCounts counts = {.elements = 7, .bytes = 11};
    Bytes counts_bytes(sizeof(counts));
    std::memcpy(counts_bytes.data(), &counts, sizeof(counts));
    before.push_back(counts_bytes);
    // What the copies in front of this one marked, also beside its elements.
    if (of.kind == CopyKind::kChanged) {
      for (uint64_t i = 0; i < tensors; ++i) {
        for (uint64_t bit = 0; bit < 8 * marks_bytes; bit += 1 + random() % 9) {
          SetBit(before[marks + i], bit);
        }
      }
    }

    const uint64_t elements = of.from.elements();
    std::vector<bool> changed(elements);
    std::vector<Bytes> values;  // that the receiver is to hold
    std::bernoulli_distribution changes(of.share);
    for (uint64_t i = 0; i < elements; ++i) {
      const auto [tensor, offset] = AddressOf(of.from, i);
      changed[i] = changes(random);
      if (changed[i] && of.kind == CopyKind::kMarked) {
        SetBit(before[marks + tensor], offset / of.bytes_per_mark);
      } else if (changed[i]) {
        before[shadows + tensor][offset + random() % from_size] ^=
            std::byte(1 << (random() % 8));
      }
      Bytes value(to_size);
      if (of.from_dtype == of.to_dtype) {
        std::memcpy(value.data(), &before[tensor][offset], to_size);
      } else {
        FindCast(of.from_dtype, of.to_dtype)(value.data(),
                                             &before[tensor][offset], 1);
      }
      // Whatever is stored shows.
      const auto [to_tensor, to_offset] = AddressOf(of.to, i);
      for (size_t b = 0; b < to_size; ++b) {
        before[to_tensor][to_offset + b] = ~value[b];
      }
      values.push_back(std::move(value));
    }
    if (of.kind == CopyKind::kMarked) {
      for (uint64_t i = 0; i < elements; ++i) {
        // Bits of several elements.
        const auto [tensor, offset] = AddressOf(of.from, i);
        changed[i] = BitAt(before[marks + tensor], offset / of.bytes_per_mark);
      }
    }

    CopyBatch batch =
        BatchOf(of.kind, of.from, of.from_dtype, of.to, of.to_dtype);
    batch.delta = {.shadow_entries = shadows,
                   .marks_entries = marks,
                   .bytes_per_mark = of.bytes_per_mark,
                   .marks = of.marks,
                   .counts_entry = before.size() - 1};
    const std::vector<Bytes> after = RunBatch(batch, before);

    std::vector<Bytes> expected = before;
    uint64_t found = 0;
    uint64_t stored = 0;
    for (uint64_t i = 0; i < elements; ++i) {
      const auto [tensor, offset] = AddressOf(of.from, i);
      const auto [to_tensor, to_offset] = AddressOf(of.to, i);
      const bool is_stored = std::memcmp(&after[to_tensor][to_offset],
                                         values[i].data(), to_size) == 0;
      found += changed[i];
      stored += is_stored;
      if (changed[i] || of.kind == CopyKind::kKept) {
        EXPECT_TRUE(is_stored) << "element " << i;
      }
      if (is_stored) {
        std::memcpy(&expected[to_tensor][to_offset], values[i].data(), to_size);
      }
      if (is_stored && of.marks) {
        for (uint64_t bit = offset / of.bytes_per_mark;
             bit <= (offset + from_size - 1) / of.bytes_per_mark; ++bit) {
          SetBit(expected[marks + tensor], bit);
        }
      } else if (of.kind == CopyKind::kKept ||
                 (of.kind == CopyKind::kChanged && !of.marks)) {
        std::memcpy(&expected[shadows + tensor][offset],
                    &before[tensor][offset], from_size);
      }
    }
    if (found == 0 && of.kind != CopyKind::kKept) {
      EXPECT_EQ(stored, 0);
    }
    std::memcpy(&counts, after.back().data(), sizeof(counts));
    if (of.kind == CopyKind::kKept) {
      EXPECT_EQ(counts.elements, 7);
    } else if (of.kind == CopyKind::kChanged ||
               of.bytes_per_mark == from_size) {
      EXPECT_EQ(counts.elements, 7 + found);
    }
    EXPECT_EQ(counts.bytes, 11 + stored * to_size);
    for (size_t entry = 0; entry + 1 < before.size(); ++entry) {
      EXPECT_EQ(after[entry], expected[entry]) << "entry " << entry;
    }
  }

  // What the entries of the table hold behind the batch.
  std::vector<Bytes> RunBatch(const CopyBatch& batch,
                              const std::vector<Bytes>& before) {
    std::vector<std::unique_ptr<DeviceMemory>> memory;
    std::vector<std::byte*> table;
    for (const Bytes& bytes : before) {
      const size_t entry = memory.size();
      const bool is_shadow = entry >= batch.delta.shadow_entries &&
                             entry < batch.delta.marks_entries;
      memory.push_back(Upload(bytes, is_shadow && entry % 2 == 1));
      table.push_back(memory.back()->data());
    }
    auto prepared = device_->Prepare(table, {batch});
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    EXPECT_TRUE((*prepared)->Enqueue(0, kStream).ok());
    EXPECT_TRUE(device_->Synchronize(kStream).ok());
    std::vector<Bytes> after;
    for (const auto& entry : memory) after.push_back(Download(*entry));
    return after;
  }

  // Elements of a row that has several of a GPU's tiles, unless sanitized.
  static constexpr int kLongRow = kSanitized ? 4096 : 20000;

  // Rows of two tensors of bf16, from element `first` on and `gap` elements
  // apart, some 30,000 in all.
  static Case RowsOf(uint64_t columns, uint64_t first, uint64_t gap) {
    const uint64_t rows = (kSanitized ? 3000 : 30000) / columns + 2;
    Case of;
    of.from.byte_offset = 2 * first;
    of.from.loops = {
        {2, 1, 0}, {rows, 0, 2 * (columns + gap)}, {columns, 0, 2}};
    of.to.first_tensor = 2;
    of.to.loops = {{2, 1, 0}, {rows, 0, 2 * columns}, {columns, 0, 2}};
    return of;
  }

  // All kinds and ways to mark, of one pair of dtypes.
  void CheckDTypes(DType from, DType to) {
    std::mt19937_64 random(static_cast<uint64_t>(from) * 100 +
                           static_cast<uint64_t>(to));
    const auto from_size = static_cast<uint32_t>(DTypeBytes(from));
    const size_t to_size = DTypeBytes(to);
    for (int round = 0; round < 12; ++round) {
      std::vector<uint64_t> extents;
      if (round % 3 > 0) extents.push_back(1 + random() % 3);
      if (round % 3 > 1) extents.push_back(1 + random() % 7);
      extents.push_back(1 + random() % (round < 6 ? 90 : 3000));
      const bool adjacent = random() % 4 != 0;
      const uint64_t tensors = extents.size() > 1 ? extents[0] : 1;
      Case of;
      of.from_dtype = from;
      of.to_dtype = to;
      of.from = RandomShape(random, 0, extents, from_size, adjacent);
      of.to = RandomShape(random, tensors, extents, to_size,
                          adjacent || random() % 2 == 0);
      const double shares[] = {0, 0.004, 0.3, 1};
      of.share = shares[random() % 4];
      of.kind = CopyKind::kKept;
      CheckDelta(of, random);
      of.kind = CopyKind::kChanged;
      CheckDelta(of, random);
      of.marks = true;
      CheckDelta(of, random);
      of.marks = false;
      of.kind = CopyKind::kMarked;
      CheckDelta(of, random);
      of.bytes_per_mark = from_size;
      CheckDelta(of, random);
    }
  }
};

TEST_P(DeltaConformance, ElementsOfEachSize) {
  for (const DType dtype :
       {DType::kUint8, DType::kFp8E4m3, DType::kBool, DType::kInt16,
        DType::kBf16, DType::kFp16, DType::kInt32, DType::kFp32, DType::kInt64,
        DType::kFp64}) {
    CheckDTypes(dtype, dtype);
  }
}

TEST_P(DeltaConformance, Casts) {
  const DType floats[] = {DType::kBf16, DType::kFp16, DType::kFp32};
  for (const DType from : floats) {
    for (const DType to : floats) {
      if (from != to) CheckDTypes(from, to);
    }
  }
}

// Slices as tensor parallelism cuts them: rows that hold whole words of marks,
// begin inside one, or hold no whole number of them. A tile of a GPU has
// several rows, or a row several tiles.
TEST_P(DeltaConformance, MarkedRows) {
  std::mt19937_64 random(11);
  for (const uint64_t columns : {32, 384, 416, 392, 2048, kLongRow}) {
    for (const uint64_t first : {0, 32, 8}) {
      for (const uint64_t gap : {0, 384, 8}) {
        for (const double share : {0.0, 0.001, 0.2, 1.0}) {
          Case of = RowsOf(columns, first, gap);
          of.kind = CopyKind::kMarked;
          of.bytes_per_mark = 2;
          of.share = share;
          CheckDelta(of, random);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Found by a snapshot. Of the units of 16 bytes 1, 15, 39 and 83 % hold a
// change, and all.
TEST_P(DeltaConformance, ChangedRows) {
  std::mt19937_64 random(12);
  for (const uint64_t columns : {384, 392, 2048, kLongRow}) {
    for (const uint64_t gap : {0, 8}) {
      for (const double share : {0.0, 0.001, 0.02, 0.06, 0.2, 1.0}) {
        for (const bool marks : {false, true}) {
          Case of = RowsOf(columns, /*first=*/0, gap);
          of.kind = CopyKind::kChanged;
          of.marks = marks;
          of.share = share;
          CheckDelta(of, random);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Each element alone, at each distance from a border of 64 bytes.
TEST_P(DeltaConformance, OneChangeAnywhere) {
  for (const DType dtype : {DType::kUint8, DType::kBf16, DType::kInt64}) {
    const size_t size = DTypeBytes(dtype);
    for (uint64_t begin = 0; begin < 16; begin += 3) {
      const uint64_t elements = 150 / size;
      for (uint64_t one = 0; one < elements; ++one) {
        std::vector<Bytes> before = {
            RandomBytes((begin + elements) * size),
            {},
            {},
            Bytes((begin + elements) * size / 128 * 4 + 8),
            Bytes(sizeof(DeltaCounts))};
        before[1] = before[0];
        before[2] = before[0];
        for (const int entry : {1, 2}) {
          before[entry][(begin + one) * size] ^= std::byte{1};
        }
        Shape shape;
        shape.byte_offset = begin * size;
        shape.loops = {{elements, 0, size}};
        Shape to = shape;
        to.first_tensor = 1;
        CopyBatch batch = BatchOf(CopyKind::kChanged, shape, dtype, to, dtype);
        batch.delta = {.shadow_entries = 2,
                       .marks_entries = 3,
                       .bytes_per_mark = 16,
                       .marks = false,
                       .counts_entry = 4};
        const std::vector<Bytes> after = RunBatch(batch, before);
        ASSERT_EQ(after[1], before[0]) << "element " << one;
        ASSERT_EQ(after[2], before[0]) << "element " << one;
        DeltaCounts counts;
        std::memcpy(&counts, after[4].data(), sizeof(counts));
        ASSERT_EQ(counts.elements, 1);
      }
    }
  }
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_DELTA_CONFORMANCE_H_
