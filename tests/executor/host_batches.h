// Batches of copies and quantizations, made by hand and done on the host.
#ifndef REFIT_TESTS_EXECUTOR_HOST_BATCHES_H_
#define REFIT_TESTS_EXECUTOR_HOST_BATCHES_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "plan/schedule/tensor_box.h"
#include "refit/device.h"
#include "refit/host_device.h"

namespace refit {

using HostTensors = std::vector<std::vector<std::byte>>;

// What all tensors, one for each entry of the table, hold after the batches.
inline HostTensors AfterBatches(HostTensors tensors,
                                const std::vector<CopyBatch>& batches) {
  std::vector<std::byte*> table;
  for (auto& tensor : tensors) table.push_back(tensor.data());
  HostDevice device;
  auto prepared = device.Prepare(table, batches);
  EXPECT_TRUE(prepared.ok()) << prepared.status();
  for (size_t b = 0; b < batches.size(); ++b) {
    EXPECT_TRUE((*prepared)->Enqueue(b, nullptr).ok());
  }
  return tensors;
}

// Loops of one iteration, as no plan has them.
inline void DropLoopsOfOne(TensorBox& box) {
  const auto left =
      std::remove_if(box.loops.begin(), box.loops.end(),
                     [](const BoxLoop& loop) { return loop.extent == 1; });
  box.loops.erase(left, box.loops.end());
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_HOST_BATCHES_H_
