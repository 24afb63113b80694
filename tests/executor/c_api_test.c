/* The C API from C: all ranks of a plan as threads, and what every function
 * says when it is used wrongly.
 *
 * usage: c_api_test STAGED.refit DIRECT.refit MARKED.refit
 *
 * REFIT_NCCL_LIBRARY names the fake libnccl, so that ranks can meet without a
 * GPU. What refits do is tested in C++; here it is what C adds: arguments,
 * sizes, ownership, and that values arrive. The plans are of 2 + 2 ranks: see
 * write_reshard_plans.cc. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "refit/refit.h"

enum {
  kRanks = 4,
  kSources = 2,
  kLayers = 2,
  kRows = 8, /* of the whole matrix of a layer */
  kColumns =
      8, /* a source holds half of the rows, a destination half of these */
  kElements = kRows * kColumns / 2, /* of a tensor */
  kTensorBytes = 2 * kElements,
  kRankBytes = kLayers * kTensorBytes, /* each sends or receives all it has */
  kTimeoutMs = 60000
};

static const char* staged_path;
static const char* direct_path;
static const char* marked_path; /* staged, with options.delta "bitmap" */
static int failures;
static pthread_mutex_t failures_mutex = PTHREAD_MUTEX_INITIALIZER;

static void Fail(int line, const char* what, const char* got) {
  pthread_mutex_lock(&failures_mutex);
  fprintf(stderr, "%s:%d: %s, got \"%s\"\n", __FILE__, line, what, got);
  ++failures;
  pthread_mutex_unlock(&failures_mutex);
}

#define EXPECT(condition)                             \
  do {                                                \
    if (!(condition)) Fail(__LINE__, #condition, ""); \
  } while (0)

/* Frees `status`. */
static void ExpectOk(int line, refit_status* status) {
  if (status != NULL)
    Fail(line, "wanted success", refit_status_message(status));
  refit_status_free(status);
}
#define OK(call) ExpectOk(__LINE__, call)

/* Frees `status`, whose message should contain `text`. */
static void ExpectError(int line, refit_status* status, refit_code code,
                        const char* text) {
  const char* message = refit_status_message(status);
  if (refit_status_code(status) != code || strstr(message, text) == NULL) {
    char what[512];
    snprintf(what, sizeof(what), "wanted code %d (is %d), \"%s\"", (int)code,
             (int)refit_status_code(status), text);
    Fail(line, what, message);
  }
  refit_status_free(status);
}
#define ERROR(call, code, text) ExpectError(__LINE__, call, code, text)
#define INVALID(call, text) ERROR(call, REFIT_INVALID_ARGUMENT, text)

/* One rank and its tensors. */
typedef struct Rank {
  int32_t rank;
  refit_executor* executor;
  uint16_t weights[kLayers][kElements];
  char names[kLayers][64];
  uint64_t shape[2];
  refit_tensor tensors[kLayers];
  const void* addresses[kLayers];
  int32_t publish_returns; /* of the last rank's post-hook */
  int published;
} Rank;

static int IsSource(const Rank* rank) { return rank->rank < kSources; }

static void InitRank(Rank* rank, int32_t number) {
  rank->rank = number;
  rank->publish_returns = 0;
  rank->published = 0;
  rank->shape[0] = IsSource(rank) ? kRows / 2 : kRows;
  rank->shape[1] = IsSource(rank) ? kColumns : kColumns / 2;
  for (int layer = 0; layer < kLayers; ++layer) {
    snprintf(rank->names[layer], sizeof(rank->names[layer]),
             "%s.layers.%d.weight", IsSource(rank) ? "decoder" : "model",
             layer);
    refit_tensor* tensor = &rank->tensors[layer];
    memset(tensor, 0, sizeof(*tensor));
    tensor->struct_size = sizeof(*tensor);
    tensor->name = rank->names[layer];
    tensor->data = rank->weights[layer];
    tensor->size_bytes = kTensorBytes;
    tensor->shape = rank->shape;
    tensor->dimensions = 2;
    tensor->dtype = REFIT_DTYPE_BF16;
    rank->addresses[layer] = tensor->data;
  }
}

/* Where this rank's element `i` of a layer is in the whole matrix. */
static int ElementOf(const Rank* rank, int i) {
  if (IsSource(rank)) return rank->rank * kElements + i;
  const int row = i / (kColumns / 2);
  const int column = i % (kColumns / 2);
  return row * kColumns + (rank->rank - kSources) * (kColumns / 2) + column;
}

static uint16_t ValueOf(int layer, int element) {
  return (uint16_t)(0x3c00 + layer * kRows * kColumns + element);
}

static void FillWeights(Rank* ranks) {
  for (int r = 0; r < kRanks; ++r) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int i = 0; i < kElements; ++i) {
        ranks[r].weights[layer][i] =
            IsSource(&ranks[r]) ? ValueOf(layer, ElementOf(&ranks[r], i)) : 0;
      }
    }
  }
}

static void ExpectWeights(const Rank* ranks) {
  for (int r = kSources; r < kRanks; ++r) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int i = 0; i < kElements; ++i) {
        EXPECT(ranks[r].weights[layer][i] ==
               ValueOf(layer, ElementOf(&ranks[r], i)));
      }
    }
  }
  /* One of them, said outright: row 5, column 6 of layer 1. */
  EXPECT(ranks[3].weights[1][5 * 4 + 2] == 0x3c00 + 64 + 5 * 8 + 6);
}

/* Calls `body` for each rank, each on a thread of its own. */
static void OnAllRanks(Rank* ranks, void* (*body)(void*)) {
  pthread_t threads[kRanks];
  for (int r = 0; r < kRanks; ++r) {
    if (pthread_create(&threads[r], NULL, body, &ranks[r]) != 0) abort();
  }
  for (int r = 0; r < kRanks; ++r) pthread_join(threads[r], NULL);
}

static int32_t Publish(const refit_post_hook* hook, const refit_tensor* tensor,
                       void* context) {
  Rank* rank = context;
  EXPECT(strcmp(hook->name, "publish") == 0);
  EXPECT(strcmp(hook->tensor, tensor->name) == 0);
  EXPECT(tensor->data == rank->weights[rank->published % kLayers]);
  EXPECT(tensor->size_bytes == kTensorBytes && tensor->dimensions == 2);
  if (rank->publish_returns == 0) ++rank->published;
  return rank->publish_returns;
}

/* add-one is left undone, for the weights to be what was sent. */
static refit_status* BindWithHooks(Rank* rank, const refit_tensor* tensors) {
  const refit_post_hook_performer hooks[] = {
      {sizeof(hooks[0]), "publish", Publish, rank},
      {sizeof(hooks[0]), "add-one", NULL, NULL}};
  const refit_bind_options options = {sizeof(options), kTimeoutMs, hooks, 2};
  return refit_executor_bind_with(rank->executor, tensors, kLayers, &options);
}

static void* ConnectAndBind(void* argument) {
  Rank* rank = argument;
  EXPECT(refit_executor_state(rank->executor) == REFIT_STATE_LOADED);
  OK(refit_executor_connect(rank->executor, kTimeoutMs));
  EXPECT(refit_executor_state(rank->executor) == REFIT_STATE_CONNECTED);
  OK(BindWithHooks(rank, rank->tensors));
  EXPECT(refit_executor_state(rank->executor) == REFIT_STATE_BOUND);
  return NULL;
}

static void* Refit(void* argument) {
  Rank* rank = argument;
  refit_run_options options = {sizeof(options), kTimeoutMs, rank->addresses,
                               kLayers, /*check=*/1};
  OK(refit_executor_run(rank->executor, NULL, &options));
  EXPECT(refit_executor_state(rank->executor) == REFIT_STATE_RUNNING);
  OK(refit_executor_wait(rank->executor));
  EXPECT(refit_executor_state(rank->executor) == REFIT_STATE_BOUND);
  return NULL;
}

/* Executors of all ranks in a fabric. What they are made of is freed here: they
 * keep it. */
static void CreateLocal(Rank* ranks, const char* path) {
  refit_plan* plan = NULL;
  refit_device* device = NULL;
  refit_local_fabric* fabric = NULL;
  OK(refit_plan_open(path, &plan));
  OK(refit_device_create_host(&device));
  OK(refit_local_fabric_create(kRanks, &fabric));
  for (int r = 0; r < kRanks; ++r) {
    InitRank(&ranks[r], r);
    refit_executor_options options = {sizeof(options), plan, device, NULL,
                                      fabric,          r,    0};
    OK(refit_executor_create(&options, &ranks[r].executor));
  }
  refit_local_fabric_free(fabric);
  refit_device_free(device);
  refit_plan_free(plan);
}

static void CloseAll(Rank* ranks) {
  for (int r = 0; r < kRanks; ++r) {
    refit_executor_close(ranks[r].executor);
    refit_executor_close(ranks[r].executor);
    EXPECT(refit_executor_state(ranks[r].executor) == REFIT_STATE_CLOSED);
    ERROR(refit_executor_connect(ranks[r].executor, 0),
          REFIT_FAILED_PRECONDITION, "Connect while closed");
    ERROR(refit_executor_run(ranks[r].executor, NULL, NULL),
          REFIT_FAILED_PRECONDITION, "Run while closed");
    refit_executor_free(ranks[r].executor);
  }
}

static void ExpectCounters(const Rank* rank) {
  refit_counters counters = {sizeof(counters)};
  OK(refit_executor_counters(rank->executor, &counters));
  EXPECT(counters.struct_size == sizeof(counters));
  EXPECT(counters.rounds == kLayers);
  const int source = IsSource(rank);
  EXPECT(counters.messages_sent == (source ? 2 * kLayers : 0));
  EXPECT(counters.messages_received == (source ? 0 : 2 * kLayers));
  EXPECT(counters.bytes_sent == (source ? kRankBytes : 0));
  EXPECT(counters.bytes_received == (source ? 0 : kRankBytes));
  EXPECT(counters.wire_seconds > 0);
  /* The plan's only route, by its only mechanism. */
  EXPECT(counters.peer_staged.bytes_sent == counters.bytes_sent);
  EXPECT(counters.peer_staged.bytes_received == counters.bytes_received);
  EXPECT(counters.peer_direct.bytes_sent == 0);
  EXPECT(counters.peer_direct.bytes_received == 0);
  EXPECT(counters.local_staged.bytes_sent == 0);
  EXPECT(counters.local_direct.bytes_sent == 0);
  EXPECT(counters.network_staged.bytes_sent == 0);
  EXPECT(counters.network_direct.bytes_sent == 0);
  EXPECT(counters.fused_elements == 0);
}

static void NotePostHook(const refit_post_hook* hook, void* context) {
  char* note = context;
  EXPECT(hook->struct_size == sizeof(*hook));
  strcat(note, hook->tensor);
  strcat(note, " ");
  strcat(note, hook->name);
  strcat(note, " ");
  strcat(note, hook->detail);
  sprintf(note + strlen(note), " %d %d\n", (int)hook->by_executor,
          (int)hook->refit);
}

/* The last rank's tensors have one. */
static void ExpectPostHooks(const Rank* ranks) {
  char notes[kRanks][256] = {"", "", "", ""};
  for (int r = 0; r < kRanks; ++r) {
    OK(refit_executor_visit_post_hooks(ranks[r].executor, NotePostHook,
                                       notes[r]));
    if (r < kRanks - 1) EXPECT(strcmp(notes[r], "") == 0);
  }
  EXPECT(strcmp(notes[kRanks - 1],
                "model.layers.0.weight add-one for the test 0 0\n"
                "model.layers.0.weight publish for the test 0 0\n"
                "model.layers.1.weight add-one for the test 0 0\n"
                "model.layers.1.weight publish for the test 0 0\n") == 0);
  INVALID(refit_executor_visit_post_hooks(NULL, NotePostHook, NULL),
          "executor is NULL");
  INVALID(refit_executor_visit_post_hooks(ranks[0].executor, NULL, NULL),
          "visit is NULL");
}

typedef struct Digests {
  int count;
  uint64_t elements;
  uint64_t sum;
} Digests;

static void AddDigest(const refit_param_digest* digest, void* context) {
  Digests* digests = context;
  char name[64];
  snprintf(name, sizeof(name), "model.layers.%d.weight", digests->count);
  EXPECT(digest->struct_size == sizeof(*digest));
  EXPECT(strcmp(digest->param, name) == 0);
  EXPECT(digest->dtype == REFIT_DTYPE_BF16);
  ++digests->count;
  digests->elements += digest->elements;
  digests->sum = refit_digest_add(digests->sum, digest->sum);
}

static Digests DigestAmong(const Rank* rank, const int32_t* among,
                           size_t count) {
  Digests digests = {0, 0, 0};
  refit_digest_options options = {sizeof(options), among, count};
  OK(refit_executor_visit_digest(rank->executor, NULL, &options, AddDigest,
                                 &digests));
  return digests;
}

/* Sources hold halves by rows, the destination ranks by columns. Rank 3's
 * post-hooks change what it holds, so that it is left out. */
static void ExpectDigests(const Rank* ranks) {
  const int32_t sources[] = {0, 1};
  for (int r = 0; r < kSources; ++r) {
    const Digests alone = DigestAmong(&ranks[r], NULL, 0);
    const Digests among = DigestAmong(&ranks[r], sources, 2);
    EXPECT(alone.count == kLayers);
    EXPECT(alone.elements == kLayers * kElements);
    EXPECT(alone.sum == among.sum && alone.sum != 0);
  }
  EXPECT(DigestAmong(&ranks[kSources], NULL, 0).elements ==
         kLayers * kElements);
  EXPECT(DigestAmong(&ranks[kRanks - 1], NULL, 0).count == 0);
  EXPECT(refit_digest_add(((uint64_t)1 << 61) - 2, 3) == 2);
  Digests none = {0, 0, 0};
  refit_digest_options options = {sizeof(options), NULL, 2};
  INVALID(refit_executor_visit_digest(ranks[0].executor, NULL, &options,
                                      AddDigest, &none),
          "among is NULL, among_count is 2");
  options.among = sources;
  INVALID(refit_executor_visit_digest(ranks[2].executor, NULL, &options,
                                      AddDigest, &none),
          "this rank has to be one of them");
  INVALID(
      refit_executor_visit_digest(ranks[0].executor, NULL, NULL, NULL, NULL),
      "visit is NULL");
}

static void CountNotice(const refit_notice* notice, void* context) {
  EXPECT(notice->struct_size == sizeof(*notice));
  ++*(int*)context;
}

static void TestRefitInAFabric(void) {
  Rank ranks[kRanks];
  CreateLocal(ranks, staged_path);
  OnAllRanks(ranks, ConnectAndBind);
  ExpectPostHooks(ranks);
  for (int refit = 0; refit < 2; ++refit) {
    FillWeights(ranks);
    OnAllRanks(ranks, Refit);
    ExpectWeights(ranks);
  }
  for (int r = 0; r < kRanks; ++r) ExpectCounters(&ranks[r]);
  ExpectDigests(ranks);
  int notices = 0;
  OK(refit_executor_visit_notices(ranks[0].executor, CountNotice, &notices));
  EXPECT(notices == 0);
  INVALID(refit_executor_visit_notices(ranks[0].executor, NULL, NULL),
          "visit is NULL");
  EXPECT(ranks[kRanks - 1].published == 2 * kLayers);
  EXPECT(ranks[0].published == 0);
  EXPECT(refit_executor_refits(ranks[kRanks - 1].executor) == 2);
  CloseAll(ranks);
}

static void* ConnectAndBindWithoutHooks(void* argument) {
  Rank* rank = argument;
  OK(refit_executor_connect(rank->executor, kTimeoutMs));
  if (rank->rank == kRanks - 1) {
    INVALID(
        refit_executor_bind_with(rank->executor, rank->tensors, kLayers, NULL),
        "not performed: post-hook \"publish\" of \"model.layers.0.weight\"");
  } else {
    ERROR(
        refit_executor_bind_with(rank->executor, rank->tensors, kLayers, NULL),
        REFIT_ABORTED, "rank 3");
  }
  return NULL;
}

static void TestBindRefusesHooksThatNobodyDoes(void) {
  Rank ranks[kRanks];
  CreateLocal(ranks, staged_path);
  OnAllRanks(ranks, ConnectAndBindWithoutHooks);
  const refit_post_hook_performer nameless = {sizeof(nameless), NULL, NULL,
                                              NULL};
  const refit_bind_options options = {sizeof(options), 0, &nameless, 1};
  const refit_bind_options missing = {sizeof(missing), 0, NULL, 1};
  INVALID(refit_executor_bind_with(ranks[0].executor, ranks[0].tensors, kLayers,
                                   &options),
          "hooks[0]: name is NULL");
  INVALID(refit_executor_bind_with(ranks[0].executor, ranks[0].tensors, kLayers,
                                   &missing),
          "hooks is NULL");
  const refit_post_hook_performer uneven[] = {
      {sizeof(uneven[0]), "publish", NULL, NULL},
      {sizeof(uneven[0]) - 8, "add-one", NULL, NULL}};
  const refit_bind_options of_two_sizes = {sizeof(of_two_sizes), 1000, uneven,
                                           2};
  INVALID(refit_executor_bind_with(ranks[0].executor, ranks[0].tensors, kLayers,
                                   &of_two_sizes),
          "hooks[1]: struct_size is 24, that of hooks[0] is 32");
  CloseAll(ranks);
}

static void* RefitThatFailsToPublish(void* argument) {
  Rank* rank = argument;
  const int fails = rank->publish_returns != 0;
  char text[256];
  sprintf(text,
          "rank %d: %spost-hook \"publish\" of \"model.layers.0.weight\" "
          "failed: its function returned 7",
          (int)rank->rank, fails ? "" : "rank 3 cannot go on: ");
  OK(refit_executor_run(rank->executor, NULL, NULL));
  ERROR(refit_executor_wait(rank->executor),
        fails ? REFIT_INTERNAL : REFIT_ABORTED, text);
  EXPECT(refit_executor_state(rank->executor) == REFIT_STATE_TORN);
  return NULL;
}

/* A function that fails, fails the wait of all ranks. */
static void TestFailingHook(void) {
  Rank ranks[kRanks];
  CreateLocal(ranks, staged_path);
  OnAllRanks(ranks, ConnectAndBind);
  ranks[kRanks - 1].publish_returns = 7;
  FillWeights(ranks);
  OnAllRanks(ranks, RefitThatFailsToPublish);
  ranks[kRanks - 1].publish_returns = 0;
  OnAllRanks(ranks, Refit);
  EXPECT(refit_executor_refits(ranks[kRanks - 1].executor) == 1);
  EXPECT(refit_executor_refits(ranks[0].executor) == 1);
  CloseAll(ranks);
}

static void* ConnectBindAndRefit(void* argument) {
  ConnectAndBind(argument);
  return Refit(argument);
}

static void CreateRanksThatMeet(Rank* ranks, const char* id, const char* path,
                                refit_transport transport) {
  for (int r = 0; r < kRanks; ++r) {
    refit_plan* plan = NULL;
    refit_device* device = NULL;
    refit_rendezvous* rendezvous = NULL;
    OK(refit_plan_open(path, &plan));
    OK(refit_device_create_host(&device));
    OK(refit_rendezvous_create_unique_id(id, r, kRanks, &rendezvous));
    EXPECT(refit_rendezvous_rank(rendezvous) == r);
    EXPECT(refit_rendezvous_world_size(rendezvous) == kRanks);
    refit_executor_options options = {
        sizeof(options), plan, device, rendezvous, NULL, r, 0};
    options.transport = transport;
    InitRank(&ranks[r], r);
    OK(refit_executor_create(&options, &ranks[r].executor));
    options.rank = (r + 1) % kRanks;
    refit_executor* wrong = ranks[r].executor;
    INVALID(refit_executor_create(&options, &wrong),
            "the rendezvous is of rank ");
    EXPECT(wrong == NULL);
    refit_rendezvous_free(rendezvous);
    refit_device_free(device);
    refit_plan_free(plan);
  }
}

/* UCX sends direct messages, too. */
static void TestRanksThatMeet(const char* path, refit_transport transport) {
  Rank ranks[kRanks];
  char id[REFIT_UNIQUE_ID_BYTES];
  OK(refit_unique_id_create(id));
  CreateRanksThatMeet(ranks, id, path, transport);
  FillWeights(ranks);
  OnAllRanks(ranks, ConnectBindAndRefit);
  ExpectWeights(ranks);
  for (int r = 0; r < kRanks; ++r) ExpectCounters(&ranks[r]);
  CloseAll(ranks);
}

static void TestUniqueId(void) {
  refit_rendezvous* rendezvous = NULL;
  char id[REFIT_UNIQUE_ID_BYTES];
  INVALID(refit_unique_id_create(NULL), "id is NULL");
  OK(refit_unique_id_create(id));
  INVALID(refit_rendezvous_create_unique_id(NULL, 0, 1, &rendezvous),
          "id is NULL");
  INVALID(refit_rendezvous_create_unique_id(id, 0, 1, NULL),
          "rendezvous is NULL");
  id[100] ^= 1;
  INVALID(refit_rendezvous_create_unique_id(id, 0, 1, &rendezvous),
          "a unique id of Refit that was damaged");
  memset(id, 7, sizeof(id));
  INVALID(refit_rendezvous_create_unique_id(id, 0, 1, &rendezvous),
          "not a unique id of Refit");
  EXPECT(rendezvous == NULL);
}

/* A thread that interrupts until it is over. */
typedef struct Interrupter {
  refit_executor* executor;
  pthread_mutex_t mutex;
  int over;
} Interrupter;

static void* Interrupt(void* argument) {
  Interrupter* interrupter = argument;
  for (int over = 0; !over;) {
    refit_executor_interrupt(interrupter->executor);
    pthread_mutex_lock(&interrupter->mutex);
    over = interrupter->over;
    pthread_mutex_unlock(&interrupter->mutex);
  }
  return NULL;
}

static void TestMeetingThatNobodyComesTo(void) {
  refit_plan* plan = NULL;
  refit_device* device = NULL;
  refit_rendezvous* rendezvous = NULL;
  refit_executor* executor = NULL;
  OK(refit_plan_open(staged_path, &plan));
  OK(refit_device_create_host(&device));
  char id[REFIT_UNIQUE_ID_BYTES];
  OK(refit_unique_id_create(id));
  OK(refit_rendezvous_create_unique_id(id, 0, kRanks, &rendezvous));
  refit_executor_options options = {
      sizeof(options), plan, device, rendezvous, NULL, 0, 0};
  OK(refit_executor_create(&options, &executor));
  ERROR(refit_executor_connect(executor, 50), REFIT_DEADLINE_EXCEEDED,
        "3 of 4 ranks did not come before the deadline, the first is rank 1");
  EXPECT(refit_executor_state(executor) == REFIT_STATE_LOADED);
  refit_executor_interrupt(executor); /* nothing waits */
  Interrupter interrupter = {.executor = executor};
  pthread_mutex_init(&interrupter.mutex, NULL);
  pthread_t thread;
  if (pthread_create(&thread, NULL, Interrupt, &interrupter) != 0) abort();
  ERROR(refit_executor_connect(executor, kTimeoutMs), REFIT_CANCELLED,
        "rank 0: interrupted");
  EXPECT(refit_executor_state(executor) == REFIT_STATE_LOADED);
  pthread_mutex_lock(&interrupter.mutex);
  interrupter.over = 1;
  pthread_mutex_unlock(&interrupter.mutex);
  pthread_join(thread, NULL);
  pthread_mutex_destroy(&interrupter.mutex);
  refit_executor_free(executor);
  refit_rendezvous_free(rendezvous);
  refit_device_free(device);
  refit_plan_free(plan);
}

static void TestLibrary(void) {
  EXPECT(strcmp(refit_version(), REFIT_VERSION_WANTED) == 0);
  EXPECT(refit_status_code(NULL) == REFIT_OK);
  EXPECT(strcmp(refit_status_message(NULL), "") == 0);
  EXPECT(strcmp(refit_state_name(REFIT_STATE_TORN), "torn") == 0);
  EXPECT(strcmp(refit_state_name(99), "unknown") == 0);
  refit_status_free(NULL);
  refit_plan_free(NULL);
  refit_device_free(NULL);
  refit_rendezvous_free(NULL);
  refit_local_fabric_free(NULL);
  refit_executor_free(NULL);
  refit_executor_close(NULL);
}

typedef struct LogOf {
  int lines;
  refit_log_level level;
  char last[256];
} LogOf;

static void KeepLine(refit_log_level level, const char* line, void* context) {
  LogOf* log = context;
  ++log->lines;
  log->level = level;
  snprintf(log->last, sizeof(log->last), "%s", line);
}

/* Of what is said once in a process. */
static void TestLog(void) {
  refit_rendezvous* rendezvous = NULL;
  LogOf log = {0};
  refit_set_log_function(KeepLine, &log);
  setenv("WORLD_SIZE", "4", 1);
  setenv("RANK", "3", 1);
  setenv("LOCAL_RANK", "1", 1);
  setenv("MASTER_ADDR", "trainer", 1);
  setenv("REFIT_SECRET", "swordfish", 1);
  OK(refit_rendezvous_from_environment(&rendezvous));
  refit_rendezvous_free(rendezvous);
  unsetenv("REFIT_SECRET");
  refit_set_log_function(NULL, NULL);
  EXPECT(log.lines == 1);
  EXPECT(log.level == REFIT_LOG_WARNING);
  EXPECT(strcmp(log.last,
                "REFIT_SECRET has 9 bytes; a secret of fewer than 16 random "
                "bytes can be guessed") == 0);
}

static char meeting[REFIT_UNIQUE_ID_BYTES]; /* of ranks that replace a plan */

/* With what is bound, and the hooks. */
static void* ReplaceThenRefit(void* argument) {
  Rank* rank = argument;
  refit_replacement next = {sizeof(next)};
  refit_plan* plan = NULL;
  refit_rendezvous* rendezvous = NULL;
  OK(refit_plan_open(direct_path, &plan));
  OK(refit_rendezvous_create_unique_id(meeting, rank->rank, kRanks,
                                       &rendezvous));
  next.plan = plan;
  next.rendezvous = rendezvous;
  next.rank = rank->rank;
  const int published = rank->published;
  OK(refit_executor_replace(rank->executor, &next, kTimeoutMs));
  refit_rendezvous_free(rendezvous);
  refit_plan_free(plan);
  EXPECT(refit_executor_state(rank->executor) == REFIT_STATE_BOUND);
  EXPECT(refit_executor_refits(rank->executor) == 0);
  Refit(rank);
  EXPECT(rank->published - published ==
         (rank->rank == kRanks - 1 ? kLayers : 0));
  return NULL;
}

static void TestReplace(void) {
  Rank ranks[kRanks];
  OK(refit_meeting_host(kRanks, meeting));
  CreateRanksThatMeet(ranks, meeting, staged_path, REFIT_TRANSPORT_DEFAULT);
  FillWeights(ranks);
  OnAllRanks(ranks, ConnectBindAndRefit);
  OK(refit_meeting_host(kRanks, meeting));
  FillWeights(ranks);
  OnAllRanks(ranks, ReplaceThenRefit);
  ExpectWeights(ranks);

  refit_replacement wrong = {sizeof(wrong)};
  INVALID(refit_executor_replace(ranks[0].executor, &wrong, kTimeoutMs),
          "plan is NULL");
  INVALID(refit_executor_replace(ranks[0].executor, NULL, kTimeoutMs),
          "replacement is NULL");
  refit_plan* plan = NULL;
  OK(refit_plan_open(direct_path, &plan));
  wrong.plan = plan;
  INVALID(refit_executor_replace(ranks[0].executor, &wrong, kTimeoutMs),
          "none is given");
  wrong.reserved = 1;
  INVALID(refit_executor_replace(ranks[0].executor, &wrong, kTimeoutMs),
          "reserved is not 0");
  refit_plan_free(plan);
  EXPECT(refit_executor_state(ranks[0].executor) == REFIT_STATE_BOUND);
  INVALID(refit_meeting_host(0, meeting), "world size 0 is not between 1 and ");
  CloseAll(ranks);
}

/* What a caller of 0.1 was compiled with must never change: 64-bit Linux. */
static void TestLayoutOfStructs(void) {
  EXPECT(sizeof(refit_replacement) == 40);
  EXPECT(sizeof(refit_tensor) == 56);
  EXPECT(offsetof(refit_tensor, dtype) == 48);
  EXPECT(offsetof(refit_executor_options, rank) == 40);
  EXPECT(offsetof(refit_executor_options, without_graph) == 48);
  EXPECT(offsetof(refit_executor_options, transport) == 60);
  EXPECT(sizeof(refit_executor_options) == 64);
  EXPECT(sizeof(refit_notice) == 24);
  EXPECT(offsetof(refit_notice, text) == 16);
  EXPECT(sizeof(refit_run_options) == 48);
  EXPECT(offsetof(refit_run_options, check) == 32);
  EXPECT(sizeof(refit_param_digest) == 40);
  EXPECT(offsetof(refit_param_digest, sum) == 24);
  EXPECT(sizeof(refit_digest_options) == 24);
  EXPECT(offsetof(refit_run_options, addresses) == 16);
  EXPECT(sizeof(refit_traffic) == 16);
  EXPECT(sizeof(refit_counters) == 176);
  EXPECT(offsetof(refit_counters, local_staged) == 72);
  EXPECT(sizeof(refit_post_hook) == 48);
  EXPECT(offsetof(refit_post_hook, refit) == 40);
  EXPECT(sizeof(refit_post_hook_performer) == 32);
  EXPECT(sizeof(refit_bind_options) == 48);
  EXPECT(offsetof(refit_bind_options, changes) == 32);
  EXPECT(offsetof(refit_run_options, dense) == 36);
  EXPECT(offsetof(refit_run_options, direct_multiprocessors) == 40);
  EXPECT(sizeof(refit_changes) == 24);
  EXPECT(sizeof(refit_delta_report) == 144);
  EXPECT(offsetof(refit_delta_report, agree_seconds) == 128);
  EXPECT(offsetof(refit_delta_report, find_seconds) == 88);
  EXPECT(sizeof(refit_marking_cast) == 56);
  EXPECT(offsetof(refit_delta_report, rung) == 12);
  EXPECT(offsetof(refit_delta_report, elements) == 40);
}

static void CountTensor(const refit_tensor* tensor, void* context) {
  int* count = context;
  char name[64];
  snprintf(name, sizeof(name), "model.layers.%d.weight", *count);
  EXPECT(strcmp(tensor->name, name) == 0);
  EXPECT(tensor->struct_size == sizeof(*tensor));
  EXPECT(tensor->data == NULL);
  EXPECT(tensor->size_bytes == kTensorBytes);
  EXPECT(tensor->dimensions == 2);
  EXPECT(tensor->shape[0] == kRows && tensor->shape[1] == kColumns / 2);
  EXPECT(tensor->dtype == REFIT_DTYPE_BF16);
  ++*count;
}

static void TestPlan(void) {
  refit_plan* plan = NULL;
  OK(refit_plan_open(staged_path, &plan));
  EXPECT(refit_plan_world_size(plan) == kRanks);
  EXPECT(refit_plan_source_ranks(plan) == kSources);
  EXPECT(strlen(refit_plan_digest(plan)) == 32);
  uint64_t staging_bytes = 0;
  OK(refit_plan_staging_bytes(plan, 0, &staging_bytes));
  EXPECT(staging_bytes == kTensorBytes); /* one layer at a time */
  INVALID(refit_plan_staging_bytes(plan, kRanks, &staging_bytes),
          "rank 4 is not one of the plan's 4 ranks");
  INVALID(refit_plan_staging_bytes(plan, -1, &staging_bytes),
          "rank -1 is not one of the plan's 4 ranks");
  INVALID(refit_plan_staging_bytes(NULL, 0, &staging_bytes), "plan is NULL");
  INVALID(refit_plan_staging_bytes(plan, 0, NULL), "staging_bytes is NULL");
  int count = 0;
  OK(refit_plan_visit_tensors(plan, 2, CountTensor, &count));
  EXPECT(count == kLayers);
  INVALID(refit_plan_visit_tensors(plan, 2, NULL, NULL), "visit is NULL");
  INVALID(refit_plan_visit_tensors(plan, 9, CountTensor, &count),
          "rank 9 is not one of the plan's 4 ranks");
  INVALID(refit_plan_visit_tensors(NULL, 0, CountTensor, &count),
          "plan is NULL");
  refit_plan* other = plan;
  ERROR(refit_plan_open("no-such-directory/plan.refit", &other),
        REFIT_NOT_FOUND, "no-such-directory/plan.refit");
  EXPECT(other == NULL);
  INVALID(refit_plan_open("/dev/null", &other), "");
  INVALID(refit_plan_open(NULL, &other), "path is NULL");
  INVALID(refit_plan_open(staged_path, NULL), "plan is NULL");
  refit_plan_free(plan);
}

static void TestDevices(void) {
  refit_device* device = NULL;
  INVALID(refit_device_create_host(NULL), "device is NULL");
  INVALID(refit_device_create_cuda(0, NULL), "device is NULL");
  refit_status* status = refit_device_create_cuda(-1, &device);
  EXPECT(refit_status_code(status) == REFIT_NOT_FOUND ||
         refit_status_code(status) == REFIT_UNIMPLEMENTED);
  EXPECT(strlen(refit_status_message(status)) > 0);
  EXPECT(device == NULL);
  refit_status_free(status);
}

static void TestRendezvous(void) {
  refit_rendezvous* rendezvous = NULL;
  int32_t local_rank = -1;
  INVALID(refit_rendezvous_from_environment(NULL), "rendezvous is NULL");
  INVALID(refit_local_rank_from_environment(NULL), "local_rank is NULL");
  setenv("WORLD_SIZE", "four", 1);
  setenv("RANK", "3", 1);
  setenv("LOCAL_RANK", "1", 1);
  setenv("MASTER_ADDR", "trainer", 1);
  INVALID(refit_rendezvous_from_environment(&rendezvous),
          "WORLD_SIZE is \"four\", it should be a number from 1 to ");
  EXPECT(rendezvous == NULL);
  setenv("WORLD_SIZE", "4", 1);
  OK(refit_rendezvous_from_environment(&rendezvous));
  EXPECT(refit_rendezvous_rank(rendezvous) == 3);
  EXPECT(refit_rendezvous_world_size(rendezvous) == 4);
  OK(refit_local_rank_from_environment(&local_rank));
  EXPECT(local_rank == 1);
  setenv("LOCAL_RANK", "first", 1);
  INVALID(refit_local_rank_from_environment(&local_rank),
          "LOCAL_RANK is \"first\"");
  refit_rendezvous_free(rendezvous);
}

/* refit_run_options of a later version. */
typedef struct LaterRunOptions {
  refit_run_options now;
  uint64_t later;
} LaterRunOptions;

static void TestCreateErrors(void) {
  refit_plan* plan = NULL;
  refit_device* device = NULL;
  refit_local_fabric* fabric = NULL;
  refit_local_fabric* smaller = NULL;
  refit_rendezvous* rendezvous = NULL;
  refit_executor* executor = NULL;
  refit_executor* made = NULL;
  OK(refit_plan_open(staged_path, &plan));
  OK(refit_device_create_host(&device));
  OK(refit_local_fabric_create(kRanks, &fabric));
  char id[REFIT_UNIQUE_ID_BYTES];
  OK(refit_unique_id_create(id));
  OK(refit_rendezvous_create_unique_id(id, 0, 3, &rendezvous));
  INVALID(refit_local_fabric_create(0, &smaller),
          "world size 0 is not between 1 and ");
  INVALID(refit_local_fabric_create(1, NULL), "fabric is NULL");
  OK(refit_local_fabric_create(2, &smaller));

  const refit_executor_options good = {sizeof(good), plan, device, NULL,
                                       fabric,       0,    0};
  refit_executor_options bad = good;
  INVALID(refit_executor_create(&good, NULL), "executor is NULL");
  INVALID(refit_executor_create(NULL, &executor), "options is NULL");
  bad.struct_size = 12;
  INVALID(refit_executor_create(&bad, &executor),
          "struct_size of refit_executor_options is 12, it should be "
          "sizeof(refit_executor_options), which is 64 in Refit ");
  bad = good;
  bad.plan = NULL;
  INVALID(refit_executor_create(&bad, &executor), "plan is NULL");
  bad = good;
  bad.device = NULL;
  INVALID(refit_executor_create(&bad, &executor), "device is NULL");
  bad = good;
  bad.without_memory_watch = 2;
  INVALID(refit_executor_create(&bad, &executor),
          "without_memory_watch is 2, it should be 0 or 1");
  bad.without_graph = -1;
  INVALID(refit_executor_create(&bad, &executor),
          "without_graph is -1, it should be 0 or 1");
  bad = good;
  bad.fabric = NULL;
  INVALID(refit_executor_create(&bad, &executor), "none is given");
  bad.rendezvous = rendezvous;
  INVALID(refit_executor_create(&bad, &executor),
          "the transport is rank 0 of 3, the executor is rank 0 of 4");
  bad.fabric = fabric;
  INVALID(refit_executor_create(&bad, &executor), "both are given");
  bad = good;
  bad.transport = 3;
  INVALID(refit_executor_create(&bad, &executor),
          "transport is 3, it should be 0, 1 or 2");
  bad.transport = REFIT_TRANSPORT_UCX;
  INVALID(refit_executor_create(&bad, &executor),
          "a transport is chosen, but a local fabric is one itself");
  bad = good;
  bad.rank = kRanks;
  INVALID(refit_executor_create(&bad, &executor),
          "rank 4 is not one of the plan's 4 ranks");
  bad = good;
  bad.fabric = smaller;
  INVALID(refit_executor_create(&bad, &executor),
          "the transport is rank 0 of 2, the executor is rank 0 of 4");
  /* A caller older than the options of its end. */
  bad = good;
  bad.struct_size = offsetof(refit_executor_options, without_memory_watch);
  bad.without_memory_watch = 2;
  OK(refit_executor_create(&bad, &made));
  ERROR(refit_executor_create(&good, &executor), REFIT_ALREADY_EXISTS,
        "rank 0 has its transport already");
  EXPECT(executor == NULL);

  refit_executor_free(made);
  refit_rendezvous_free(rendezvous);
  refit_local_fabric_free(smaller);
  refit_local_fabric_free(fabric);
  refit_device_free(device);
  refit_plan_free(plan);
}

static void TestArgumentErrors(Rank* rank) {
  refit_executor* executor = rank->executor;
  refit_counters counters = {0};
  INVALID(refit_executor_connect(NULL, 0), "executor is NULL");
  INVALID(refit_executor_bind_with(NULL, rank->tensors, kLayers, NULL),
          "executor is NULL");
  INVALID(refit_executor_run(NULL, NULL, NULL), "executor is NULL");
  INVALID(refit_executor_wait(NULL), "executor is NULL");
  INVALID(refit_executor_counters(NULL, &counters), "executor is NULL");
  INVALID(refit_executor_counters(executor, NULL), "counters is NULL");
  INVALID(refit_executor_counters(executor, &counters),
          "struct_size of refit_counters is 0");
  INVALID(refit_executor_connect(executor, -1),
          "timeout_ms is -1, it should not be below 0");
  const refit_bind_options never = {sizeof(never), -5};
  INVALID(refit_executor_bind_with(executor, rank->tensors, kLayers, &never),
          "timeout_ms is -5");
  INVALID(refit_executor_bind_with(executor, NULL, 1, NULL), "tensors is NULL");
  refit_tensor tensors[kLayers];
  memcpy(tensors, rank->tensors, sizeof(tensors));
  tensors[1].struct_size = 64;
  INVALID(refit_executor_bind_with(executor, tensors, kLayers, NULL),
          "tensors[1]: struct_size is 64, that of tensors[0] is 56");
  tensors[0].struct_size = 0;
  INVALID(refit_executor_bind_with(executor, tensors, kLayers, NULL),
          "tensors[0]: struct_size of refit_tensor is 0, it should be "
          "sizeof(refit_tensor), which is 56 in Refit ");
  memcpy(tensors, rank->tensors, sizeof(tensors));
  tensors[1].name = NULL;
  INVALID(refit_executor_bind_with(executor, tensors, kLayers, NULL),
          "tensors[1]: name is NULL");
  tensors[0].shape = NULL;
  INVALID(refit_executor_bind_with(executor, tensors, kLayers, NULL),
          "tensors[0]: shape is NULL");
  memcpy(tensors, rank->tensors, sizeof(tensors));
  tensors[0].reserved = 7;
  INVALID(refit_executor_bind_with(executor, tensors, kLayers, NULL),
          "tensors[0]: reserved is not 0");
  refit_run_options options = {sizeof(options), -1, NULL, 0};
  INVALID(refit_executor_run(executor, NULL, &options), "timeout_ms is -1");
  options.timeout_ms = 0;
  options.check = 2;
  INVALID(refit_executor_run(executor, NULL, &options),
          "check is 2, it should be 0 or 1");
  options.check = 0;
  options.dense = -1;
  INVALID(refit_executor_run(executor, NULL, &options),
          "dense is -1, it should be 0 or 1");
  options.dense = 0;
  options.reserved = 1;
  INVALID(refit_executor_run(executor, NULL, &options), "reserved is not 0");
  LaterRunOptions later = {{sizeof(later), 0, NULL, 0}, 1};
  INVALID(refit_executor_run(executor, NULL, &later.now),
          "refit_run_options sets a field that Refit ");
}

static void TestStepsOutOfOrder(Rank* rank) {
  ERROR(refit_executor_run(rank->executor, NULL, NULL),
        REFIT_FAILED_PRECONDITION, "rank 0: Run while loaded");
  ERROR(refit_executor_wait(rank->executor), REFIT_FAILED_PRECONDITION,
        "rank 0: Wait while loaded");
  ERROR(refit_executor_bind_with(rank->executor, rank->tensors, kLayers, NULL),
        REFIT_FAILED_PRECONDITION, "rank 0: Bind while loaded");
  /* A later caller's options that it leaves at their defaults are no error. */
  LaterRunOptions later = {{sizeof(later), 0, NULL, 0}, 0};
  ERROR(refit_executor_run(rank->executor, NULL, &later.now),
        REFIT_FAILED_PRECONDITION, "rank 0: Run while loaded");
}

static void* Connect(void* argument) {
  Rank* rank = argument;
  OK(refit_executor_connect(rank->executor, INT64_MAX));
  return NULL;
}

/* refit_tensor of a later version. */
typedef struct LaterTensor {
  refit_tensor now;
  uint64_t later;
} LaterTensor;

static void* BindAsLaterCaller(void* argument) {
  Rank* rank = argument;
  LaterTensor tensors[kLayers];
  memset(tensors, 0, sizeof(tensors));
  for (int layer = 0; layer < kLayers; ++layer) {
    tensors[layer].now = rank->tensors[layer];
    tensors[layer].now.struct_size = sizeof(tensors[layer]);
  }
  OK(BindWithHooks(rank, &tensors[0].now));
  return NULL;
}

static void* RefitWithMovedTensor(void* argument) {
  Rank* rank = argument;
  refit_run_options options = {sizeof(options), kTimeoutMs, rank->addresses,
                               kLayers};
  const void* moved[kLayers] = {rank->weights[0] + 1, rank->weights[1]};
  if (rank->rank == 0) options.addresses = moved;
  refit_status* status = refit_executor_run(rank->executor, NULL, &options);
  if (status == NULL) status = refit_executor_wait(rank->executor);
  if (rank->rank == 0) {
    ERROR(status, REFIT_FAILED_PRECONDITION,
          "rank 0: a tensor moved since Bind");
  } else {
    ERROR(status, REFIT_ABORTED, "aborted by rank 0");
  }
  EXPECT(refit_executor_state(rank->executor) == REFIT_STATE_TORN);
  return NULL;
}

/* Nobody else hears of it. */
static void TestRunArguments(const Rank* rank) {
  refit_run_options none = {sizeof(none), kTimeoutMs, rank->addresses, 0};
  INVALID(refit_executor_run(rank->executor, NULL, &none),
          "rank 0: Run was given 0 addresses, Bind 2 tensors");
  refit_run_options null = {sizeof(null), kTimeoutMs, NULL, kLayers};
  INVALID(refit_executor_run(rank->executor, NULL, &null),
          "addresses is NULL, address_count is 2");
  EXPECT(refit_executor_state(rank->executor) == REFIT_STATE_BOUND);
}

/* The others are not called. */
static void TestRunTimeout(const Rank* destination) {
  const refit_run_options options = {sizeof(options), 100};
  ERROR(refit_executor_run(destination->executor, NULL, &options),
        REFIT_DEADLINE_EXCEEDED, ": round 0: recv of 32 bytes from rank 0");
  EXPECT(refit_executor_state(destination->executor) == REFIT_STATE_TORN);
}

static void TestFailures(void) {
  Rank ranks[kRanks];
  CreateLocal(ranks, staged_path);
  TestArgumentErrors(&ranks[0]);
  TestStepsOutOfOrder(&ranks[0]);
  OnAllRanks(ranks, Connect);
  OnAllRanks(ranks, BindAsLaterCaller);
  TestRunArguments(&ranks[0]);
  OnAllRanks(ranks, RefitWithMovedTensor);
  FillWeights(ranks);
  OnAllRanks(ranks, Refit);
  ExpectWeights(ranks);
  TestRunTimeout(&ranks[kSources]);
  CloseAll(ranks);
}

static void TestCastAndMark(void) {
  refit_device* device = NULL;
  OK(refit_device_create_host(&device));
  const float masters[3] = {1.0f, -0.0f, 3.0f};
  uint16_t weights[3] = {0x3f80, 0, 0x4040}; /* 1, 0, 3 */
  uint32_t bits[2] = {1, 0};
  refit_marking_cast cast = {sizeof(cast)};
  cast.from = masters;
  cast.to = weights;
  cast.changes = bits;
  cast.first_element = 31;
  cast.elements = 3;
  cast.to_dtype = REFIT_DTYPE_BF16;
  OK(refit_cast_and_mark(device, NULL, &cast));
  EXPECT(weights[0] == 0x3f80 && weights[1] == 0x8000 && weights[2] == 0x4040);
  EXPECT(bits[0] == 1 && bits[1] == 1); /* of element 32 */
  INVALID(refit_cast_and_mark(NULL, NULL, &cast), "device is NULL");
  INVALID(refit_cast_and_mark(device, NULL, NULL), "cast is NULL");
  cast.to_dtype = REFIT_DTYPE_INT16;
  INVALID(refit_cast_and_mark(device, NULL, &cast),
          "a cast that marks changes is to int16; wanted bf16 or fp16");
  cast.to_dtype = REFIT_DTYPE_FP16;
  cast.changes = NULL;
  INVALID(refit_cast_and_mark(device, NULL, &cast), "changes is null");
  cast.struct_size = 8;
  INVALID(refit_cast_and_mark(device, NULL, &cast),
          "struct_size of refit_marking_cast is 8");
  refit_device_free(device);
}

/* What each source marks; a bit for each element of a tensor. */
static uint32_t marks[kSources][kLayers][(kElements + 31) / 32];

static refit_status* BindWithChanges(Rank* rank, const refit_changes* changes,
                                     size_t count) {
  const refit_bind_options options = {sizeof(options), kTimeoutMs, NULL, 0,
                                      changes,         count};
  return refit_executor_bind_with(rank->executor, rank->tensors, kLayers,
                                  &options);
}

static void* BindMarked(void* argument) {
  Rank* rank = argument;
  OK(refit_executor_connect(rank->executor, kTimeoutMs));
  if (!IsSource(rank)) {
    OK(BindWithChanges(rank, NULL, 0));
    return NULL;
  }
  refit_changes changes[kLayers];
  for (int layer = 0; layer < kLayers; ++layer) {
    changes[layer].struct_size = sizeof(changes[layer]);
    changes[layer].tensor = rank->names[layer];
    changes[layer].bits = marks[rank->rank][layer];
  }
  OK(BindWithChanges(rank, changes, kLayers));
  return NULL;
}

/* Nobody else hears of it. */
static void TestChangesArguments(Rank* rank) {
  uint32_t bits[(kElements + 31) / 32] = {0};
  refit_changes changes[2] = {{sizeof(changes[0]), rank->names[0], bits},
                              {sizeof(changes[0]), rank->names[0], bits}};
  INVALID(BindWithChanges(rank, NULL, 1), "changes is NULL");
  INVALID(BindWithChanges(rank, changes, 2),
          "changes[1]: \"decoder.layers.0.weight\" is given twice");
  changes[0].tensor = "decoder.layers.7.weight";
  INVALID(BindWithChanges(rank, changes, 1),
          "changes[0]: \"decoder.layers.7.weight\" is none of the tensors");
  changes[0].bits = NULL;
  INVALID(BindWithChanges(rank, changes, 1), "changes[0]: bits is NULL");
  changes[0].struct_size = 0;
  INVALID(BindWithChanges(rank, changes, 1),
          "changes[0]: struct_size of refit_changes is 0");
}

static int asks_dense;

/* Checked by its plan, and not by the run. One rank, which sends nothing, may
 * ask for all. */
static void* RefitDelta(void* argument) {
  Rank* rank = argument;
  refit_run_options options = {sizeof(options), kTimeoutMs};
  options.dense = asks_dense && rank->rank == kRanks - 1;
  OK(refit_executor_run(rank->executor, NULL, &options));
  OK(refit_executor_wait(rank->executor));
  return NULL;
}

static refit_delta_report ReportOf(const Rank* rank) {
  refit_delta_report report = {sizeof(report)};
  OK(refit_executor_delta_report(rank->executor, &report));
  return report;
}

static void TestDeltas(void) {
  Rank ranks[kRanks];
  CreateLocal(ranks, marked_path);
  OnAllRanks(ranks, Connect);
  TestChangesArguments(&ranks[0]);
  OnAllRanks(ranks, BindMarked);
  refit_delta_report report = {sizeof(report)};
  ERROR(refit_executor_delta_report(ranks[0].executor, &report),
        REFIT_NOT_FOUND, "no refit of a plan with deltas has succeeded");
  FillWeights(ranks);
  OnAllRanks(ranks, RefitDelta);
  ExpectWeights(ranks);
  report = ReportOf(&ranks[0]);
  EXPECT(report.is_delta == 0);
  EXPECT(strcmp(report.why_dense, "rank 0 bound since its last refit") == 0);
  EXPECT(report.version == 1);
  EXPECT(report.elements == kLayers * kElements);
  EXPECT(report.stored_bytes == kRankBytes);
  EXPECT(report.dense_bytes == kRankBytes);

  /* One element of source 1, which destination 3 holds. */
  ranks[1].weights[1][5] = 0x1234;
  marks[1][1][0] |= 1u << 5;
  OnAllRanks(ranks, RefitDelta);
  EXPECT(ranks[3].weights[1][kElements / 2 + 1] == 0x1234);
  EXPECT(marks[1][1][0] == 0);
  report = ReportOf(&ranks[1]);
  EXPECT(report.is_delta == 1);
  EXPECT(strcmp(report.why_dense, "") == 0);
  EXPECT(report.base_version == 1 && report.version == 2);
  EXPECT(report.changed_elements == 1 && report.rung == 128);
  EXPECT(report.stored_bytes < kRankBytes / 2);
  EXPECT(report.dense_bytes == kRankBytes);
  EXPECT(report.move_seconds > 0);
  EXPECT(report.wire_seconds > 0 && report.check_seconds > 0);
  EXPECT(report.agree_seconds > 0);
  EXPECT(report.total_seconds > report.agree_seconds + report.wire_seconds);
  EXPECT(report.find_seconds > 0 && report.encode_seconds > 0);
  EXPECT(report.apply_seconds == 0);
  /* A caller of the first version, whose struct ended there. */
  report.find_seconds = report.check_seconds = 7;
  report.struct_size = offsetof(refit_delta_report, find_seconds);
  OK(refit_executor_delta_report(ranks[1].executor, &report));
  EXPECT(report.struct_size == offsetof(refit_delta_report, find_seconds));
  EXPECT(report.changed_elements == 1);
  EXPECT(report.find_seconds == 7 && report.check_seconds == 7);
  /* And one of the second, which ended behind check_seconds. */
  report.agree_seconds = report.total_seconds = 7;
  report.struct_size = offsetof(refit_delta_report, agree_seconds);
  OK(refit_executor_delta_report(ranks[1].executor, &report));
  EXPECT(report.check_seconds > 0 && report.check_seconds < 7);
  EXPECT(report.agree_seconds == 7 && report.total_seconds == 7);
  report = ReportOf(&ranks[0]);
  EXPECT(report.changed_elements == 0);

  /* A worker's own load. */
  FillWeights(ranks);
  asks_dense = 1;
  OnAllRanks(ranks, RefitDelta);
  ExpectWeights(ranks);
  report = ReportOf(&ranks[1]);
  EXPECT(report.is_delta == 0 && report.stored_bytes == kRankBytes);
  EXPECT(strcmp(report.why_dense, "rank 3 asked for it") == 0);

  INVALID(refit_executor_delta_report(NULL, &report), "executor is NULL");
  INVALID(refit_executor_delta_report(ranks[0].executor, NULL),
          "report is NULL");
  report.struct_size = 0;
  INVALID(refit_executor_delta_report(ranks[0].executor, &report),
          "struct_size of refit_delta_report is 0");
  CloseAll(ranks);
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  staged_path = argv[1];
  direct_path = argv[2];
  marked_path = argv[3];
  TestLibrary();
  TestLayoutOfStructs();
  TestPlan();
  TestDevices();
  TestLog();
  TestRendezvous();
  TestCreateErrors();
  TestFailures();
  TestRefitInAFabric();
  TestBindRefusesHooksThatNobodyDoes();
  TestFailingHook();
  TestDeltas();
  TestCastAndMark();
  TestRanksThatMeet(staged_path, REFIT_TRANSPORT_NCCL);
  TestRanksThatMeet(direct_path, REFIT_TRANSPORT_UCX);
  TestReplace();
  TestUniqueId();
  TestMeetingThatNobodyComesTo();
  if (failures > 0) fprintf(stderr, "%d failed\n", failures);
  return failures > 0 ? 1 : 0;
}
