/* A worker's life: one process of a job, with one GPU, in C.
 *
 *   torchrun --nproc-per-node 8 --no-python worker plan.refit
 *
 * SLURM and Open MPI start it as well; see docs/operations.md. Its "model" is
 * memory for what the plan says of its rank: a real worker gives its own. */
#include <cuda_runtime_api.h>
#include <refit/refit.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kTensorsMax = 100000, kShapeMax = 8, kRefits = 10 };

typedef struct Model {
  refit_tensor tensors[kTensorsMax];
  uint64_t shapes[kTensorsMax][kShapeMax];
  size_t count;
} Model;

static void Check(refit_status* status) {
  if (status == NULL) return;
  fprintf(stderr, "worker: %s\n", refit_status_message(status));
  exit(1);
}

static void AddTensor(const refit_tensor* tensor, void* context) {
  Model* model = context;
  refit_tensor* mine = &model->tensors[model->count];
  uint64_t* shape = model->shapes[model->count++];
  if (model->count == kTensorsMax || tensor->dimensions > kShapeMax) abort();
  *mine = *tensor; /* its strings are the visitor's, so they are copied */
  mine->name = strcpy(malloc(strlen(tensor->name) + 1), tensor->name);
  mine->shape =
      memcpy(shape, tensor->shape, tensor->dimensions * sizeof(*shape));
  if (cudaMalloc(&mine->data, tensor->size_bytes) != cudaSuccess) abort();
}

int main(int argc, char** argv) {
  static Model model;
  refit_plan* plan;
  refit_rendezvous* rendezvous;
  refit_device* device;
  refit_executor* executor;
  refit_executor_options options = {.struct_size = sizeof(options)};
  /* Post-hooks that this worker does, by name and function: none, since it
   * derives nothing from its weights. Refit does the arithmetic ones; a plan
   * that asks for others is refused at bind. */
  refit_bind_options bind = {sizeof(bind), 0, NULL, 0};
  refit_run_options run = {sizeof(run), 30000, NULL, 0};
  int32_t gpu;
  cudaStream_t stream;
  if (argc != 2) return 2;

  Check(refit_plan_open(argv[1], &plan));
  Check(refit_rendezvous_from_environment(&rendezvous));
  Check(refit_local_rank_from_environment(&gpu));
  Check(refit_device_create_cuda(gpu, &device));
  options.plan = plan;
  options.device = device;
  options.rendezvous = rendezvous;
  options.rank = refit_rendezvous_rank(rendezvous);
  Check(refit_executor_create(&options, &executor));

  if (cudaSetDevice(gpu) != cudaSuccess) return 1;
  if (cudaStreamCreate(&stream) != cudaSuccess) return 1;
  Check(refit_plan_visit_tensors(plan, options.rank, AddTensor, &model));
  Check(refit_executor_connect(executor, 0));
  Check(refit_executor_bind_with(executor, model.tensors, model.count, &bind));

  for (int refit = 0; refit < kRefits; ++refit) {
    /* A trainer makes its step here, and an engine generates. Then: */
    Check(refit_executor_run(executor, stream, &run));
    Check(refit_executor_wait(executor));
  }
  refit_executor_free(executor);
  return 0;
}
