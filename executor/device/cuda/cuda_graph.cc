#include "executor/device/cuda/cuda_graph.h"

#include <cuda_runtime_api.h>

#include "executor/device/cuda/cuda_status.h"
#include "executor/device/cuda/scoped_device.h"

namespace refit {
namespace {

class CudaGraph : public DeviceGraph {
 public:
  CudaGraph(int device, cudaGraphExec_t graph)
      : device_(device), graph_(graph) {}
  ~CudaGraph() override {
    const ScopedDevice current(device_);
    cudaGraphExecDestroy(graph_);
  }
  absl::Status Launch(Stream stream) override {
    const ScopedDevice current(device_);
    return CudaStatus(
        cudaGraphLaunch(graph_, static_cast<cudaStream_t>(stream)),
        "cudaGraphLaunch");
  }

 private:
  const int device_;
  const cudaGraphExec_t graph_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceGraph>> RecordCudaGraph(
    int device, Stream stream,
    const std::function<absl::Status(Stream)>& enqueue) {
  const auto captured = static_cast<cudaStream_t>(stream);
  absl::Status status = CudaStatus(
      cudaStreamBeginCapture(captured, cudaStreamCaptureModeThreadLocal),
      "cudaStreamBeginCapture");
  if (!status.ok()) return status;
  status = enqueue(stream);
  cudaGraph_t graph = nullptr;
  // In any case, else the stream would be captured for ever.
  status.Update(CudaStatus(cudaStreamEndCapture(captured, &graph),
                           "cudaStreamEndCapture"));
  cudaGraphExec_t launched = nullptr;
  if (status.ok()) {
    status = CudaStatus(cudaGraphInstantiate(&launched, graph, 0),
                        "cudaGraphInstantiate");
  }
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (!status.ok()) return status;
  auto recorded = std::make_unique<CudaGraph>(device, launched);
  // The first launch would do it otherwise.
  status = CudaStatus(cudaGraphUpload(launched, captured), "cudaGraphUpload");
  if (!status.ok()) return status;
  return recorded;
}

}  // namespace refit
