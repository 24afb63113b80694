/* A whole refit in one process, in C, without a GPU: each rank of a plan is a
 * thread, and its tensors are in host memory.
 *
 *   cc worker_threads.c $(pkg-config --cflags --libs refit) -lpthread
 *   ./a.out plan.refit
 *
 * examples/worker.c is a process with a GPU of its own. */
#include <pthread.h>
#include <refit/refit.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kRefits = 2 };

typedef struct Worker {
  refit_executor* executor;
  refit_tensor* tensors;
  size_t count;
} Worker;

static void Check(refit_status* status) {
  if (status == NULL) return;
  fprintf(stderr, "worker: %s\n", refit_status_message(status));
  exit(1);
}

static void* Allocate(size_t bytes) {
  void* memory = calloc(1, bytes > 0 ? bytes : 1);
  if (memory == NULL) abort();
  return memory;
}

/* A real worker gives tensors of its own. */
static void AddTensor(const refit_tensor* tensor, void* context) {
  Worker* worker = context;
  const size_t shape_bytes = tensor->dimensions * sizeof(*tensor->shape);
  worker->tensors =
      realloc(worker->tensors, (worker->count + 1) * sizeof(*worker->tensors));
  if (worker->tensors == NULL) abort();
  refit_tensor* mine = &worker->tensors[worker->count++];
  *mine = *tensor; /* its strings are the visitor's, so they are copied */
  mine->name = strcpy(Allocate(strlen(tensor->name) + 1), tensor->name);
  mine->shape = shape_bytes == 0
                    ? NULL
                    : memcpy(Allocate(shape_bytes), tensor->shape, shape_bytes);
  mine->data = Allocate(tensor->size_bytes);
}

static void* Work(void* argument) {
  Worker* worker = argument;
  refit_run_options run = {sizeof(run), 30000, NULL, 0};
  Check(refit_executor_connect(worker->executor, 0));
  Check(
      refit_executor_bind(worker->executor, worker->tensors, worker->count, 0));
  for (int refit = 0; refit < kRefits; ++refit) {
    /* A trainer makes its step here, and an engine generates. Then: */
    Check(refit_executor_run(worker->executor, NULL, &run));
    Check(refit_executor_wait(worker->executor));
  }
  return NULL;
}

int main(int argc, char** argv) {
  refit_plan* plan;
  refit_device* device;
  refit_local_fabric* fabric;
  if (argc != 2) return 2;
  Check(refit_plan_open(argv[1], &plan));
  const int32_t ranks = refit_plan_world_size(plan);
  Check(refit_device_create_host(&device));
  Check(refit_local_fabric_create(ranks, &fabric));

  Worker* workers = Allocate((size_t)ranks * sizeof(*workers));
  pthread_t* threads = Allocate((size_t)ranks * sizeof(*threads));
  for (int32_t rank = 0; rank < ranks; ++rank) {
    refit_executor_options options = {.struct_size = sizeof(options)};
    options.plan = plan;
    options.device = device;
    options.fabric = fabric;
    options.rank = rank;
    Check(refit_executor_create(&options, &workers[rank].executor));
    Check(refit_plan_visit_tensors(plan, rank, AddTensor, &workers[rank]));
  }
  for (int32_t rank = 0; rank < ranks; ++rank) {
    if (pthread_create(&threads[rank], NULL, Work, &workers[rank]) != 0) {
      abort();
    }
  }
  for (int32_t rank = 0; rank < ranks; ++rank) {
    pthread_join(threads[rank], NULL);
    refit_executor_free(workers[rank].executor);
  }
  printf("%d refits of %d ranks\n", kRefits, (int)ranks);
  return 0;
}
