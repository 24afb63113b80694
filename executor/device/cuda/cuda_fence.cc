#include "executor/device/cuda/cuda_fence.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "control/payload.h"
#include "control/token.h"
#include "executor/device/cuda/cuda_status.h"
#include "executor/device/cuda/driver_function.h"
#include "executor/device/cuda/scoped_device.h"
#include "executor/device/shared_words.h"

namespace refit {

// Words that the streams of this process reach.
class PinnedWords {
 public:
  static absl::StatusOr<std::shared_ptr<PinnedWords>> Pin(
      int device, std::unique_ptr<SharedWords> words) {
    std::shared_ptr<PinnedWords> made(
        new PinnedWords(device, std::move(words)));
    const SharedWords& memory = *made->words_;
    absl::Status status = CudaStatus(
        cudaHostRegister(memory.data(), memory.size_bytes(),
                         cudaHostRegisterMapped | cudaHostRegisterPortable),
        "cudaHostRegister");
    if (!status.ok()) return status;
    made->is_registered_ = true;
    void* on_device = nullptr;
    status = CudaStatus(cudaHostGetDevicePointer(&on_device, memory.data(), 0),
                        "cudaHostGetDevicePointer");
    if (!status.ok()) return status;
    made->on_device_ = static_cast<uint64_t*>(on_device);
    return made;
  }
  ~PinnedWords() {
    if (!is_registered_) return;
    const ScopedDevice current(device_);
    cudaHostUnregister(words_->data());
  }

  SharedWords& words() { return *words_; }
  uint64_t* on_device() const { return on_device_; }

 private:
  PinnedWords(int device, std::unique_ptr<SharedWords> words)
      : device_(device), words_(std::move(words)) {}

  const int device_;
  const std::unique_ptr<SharedWords> words_;
  bool is_registered_ = false;
  uint64_t* on_device_ = nullptr;
};

namespace {

// Those that ranks of this process show each other. Never destroyed.
TokenTable<PinnedWords>& ShownWords() {
  static auto* const words = new TokenTable<PinnedWords>;
  return *words;
}

// What Export writes.
struct Exported {
  std::string memory;  // CudaSharing::Export of words of device memory
  std::string words;   // SharedWords::Show; "" if no peer shares the device
  Token token = {};    // in ShownWords() of that process
};

std::string WriteExported(const Exported& exported) {
  return PayloadWriter()
      .String(exported.memory)
      .String(exported.words)
      .Bytes(TokenBytes(exported.token))
      .Take();
}

absl::StatusOr<Exported> ReadExported(std::string_view bytes) {
  PayloadReader reader(bytes);
  Exported exported;
  exported.memory = reader.String();
  exported.words = reader.String();
  exported.token = TokenOf(reader.Bytes(sizeof(Token))).value_or(Token{});
  if (reader.Complete()) return exported;
  return absl::InvalidArgumentError("not exported by a CUDA device");
}

uint32_t* LowerHalf(uint64_t* word) {
  return reinterpret_cast<uint32_t*>(word);
}

uint32_t* UpperHalf(uint64_t* word) {
  return reinterpret_cast<uint32_t*>(word) + 1;
}

absl::Status DriverStatus(int error, const char* call) {
  if (error == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(call, ": CUDA driver error ", error));
}

}  // namespace

CudaFence::CudaFence(Device& owner, CudaSharing& sharing, int device,
                     int32_t rank, int32_t world_size, Peers sharing_peers,
                     uint64_t first)
    : owner_(owner),
      sharing_(sharing),
      device_(device),
      world_size_(world_size),
      first_(first) {
  words_.rank = rank;
  if (!sharing_peers.empty()) pairs_.resize(static_cast<size_t>(world_size));
}

absl::StatusOr<std::unique_ptr<CudaFence>> CudaFence::Create(
    Device& owner, CudaSharing& sharing, int device, int32_t rank,
    int32_t world_size, Peers sharing_peers, uint64_t first) {
  std::unique_ptr<CudaFence> fence(new CudaFence(
      owner, sharing, device, rank, world_size, sharing_peers, first));
  const ScopedDevice current(device);
  absl::Status status = fence->Allocate();
  if (status.ok() && !sharing_peers.empty()) {
    status = fence->PrepareMemoryOperations();
  }
  if (!status.ok()) return status;
  return fence;
}

absl::Status CudaFence::Allocate() {
  const auto world = static_cast<size_t>(world_size_);
  absl::StatusOr<std::unique_ptr<DeviceMemory>> memory =
      owner_.Allocate((5 * world + 1) * sizeof(uint64_t));
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  auto* const counters = reinterpret_cast<uint64_t*>(memory_->data());
  words_.sent = counters + world;
  words_.taken = counters + 2 * world;
  words_.arrived = reinterpret_cast<uint64_t* const*>(counters + 3 * world);
  words_.peers = reinterpret_cast<uint64_t* const*>(counters + 4 * world);
  words_.aborted = reinterpret_cast<uint32_t*>(counters + 5 * world);
  void* host = nullptr;
  absl::Status status = CudaStatus(
      cudaHostAlloc(&host, sizeof(uint64_t) + (world + 1) * sizeof(uint32_t),
                    cudaHostAllocMapped | cudaHostAllocPortable),
      "cudaHostAlloc");
  if (!status.ok()) return status;
  host_position_ = static_cast<uint64_t*>(host);
  host_abort_ = reinterpret_cast<uint32_t*>(host_position_ + 1);
  host_waiting_ = host_abort_ + 1;
  *host_position_ = 0;
  std::fill_n(host_abort_, world + 1, 0);
  void* mapped = nullptr;
  status = CudaStatus(cudaHostGetDevicePointer(&mapped, host, 0),
                      "cudaHostGetDevicePointer");
  if (!status.ok()) return status;
  position_ = static_cast<uint64_t*>(mapped);
  words_.abort = reinterpret_cast<uint32_t*>(position_ + 1);
  words_.waiting = words_.abort + 1;
  return absl::OkStatus();
}

absl::Status CudaFence::PrepareMemoryOperations() {
  absl::Status status;
  const auto find = [&](auto& target, const char* name) {
    const auto found = FindDriverFunction<std::decay_t<decltype(target)>>(name);
    if (found.ok()) target = *found;
    status.Update(found.status());
  };
  find(wait_word_, "cuStreamWaitValue64");
  find(write_word_, "cuStreamWriteValue64");
  find(write_half_, "cuStreamWriteValue32");
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<SharedWords>> words =
      SharedWords::Create(static_cast<size_t>(world_size_));
  if (!words.ok()) return words.status();
  std::fill_n((*words)->data(), world_size_, first_);
  absl::StatusOr<std::shared_ptr<PinnedWords>> pinned =
      PinnedWords::Pin(device_, *std::move(words));
  if (pinned.ok()) shown_ = *std::move(pinned);
  return pinned.status();
}

CudaFence::~CudaFence() {
  const ScopedDevice current(device_);
  if (shown_token_.has_value()) ShownWords().Remove(*shown_token_);
  // What streams may still write is unmapped below; cudaFree would wait for
  // them too, but peers may keep that memory.
  if (shown_ != nullptr) cudaDeviceSynchronize();
  cudaFreeHost(host_position_);
}

absl::StatusOr<std::string> CudaFence::Export() {
  Exported exported;
  const MemoryRange arrived = {
      .data = memory_->data(),
      .size_bytes = static_cast<uint64_t>(world_size_) * sizeof(uint64_t)};
  absl::StatusOr<std::unique_ptr<ExportedMemory>> memory =
      sharing_.Export({&arrived, 1}, memory_);
  if (!memory.ok()) return memory.status();
  exported_ = *std::move(memory);
  exported.memory = exported_->bytes();
  if (shown_ != nullptr) {
    absl::StatusOr<std::string> words = shown_->words().Show();
    if (!words.ok()) return words.status();
    exported.words = *std::move(words);
    if (!shown_token_.has_value()) shown_token_ = ShownWords().Add(shown_);
    exported.token = *shown_token_;
  }
  return WriteExported(exported);
}

absl::Status CudaFence::MapPeer(int32_t peer, const std::string& bytes,
                                std::vector<uint64_t*>& peers,
                                Deadline deadline) {
  const absl::StatusOr<Exported> exported = ReadExported(bytes);
  if (!exported.ok()) return exported.status();
  uint64_t*& word = peers[static_cast<size_t>(peer)];
  if (exported->words.empty()) {
    absl::StatusOr<std::unique_ptr<MappedMemory>> mapped = owner_.Import(
        exported->memory,
        {static_cast<uint64_t>(world_size_) * sizeof(uint64_t)}, deadline);
    if (!mapped.ok()) return mapped.status();
    word = reinterpret_cast<uint64_t*>((*mapped)->addresses().front()) +
           words_.rank;
    mapped_.push_back(*std::move(mapped));
    return absl::OkStatus();
  }
  std::shared_ptr<PinnedWords> pinned = ShownWords().Find(exported->token);
  if (pinned == nullptr) {
    absl::StatusOr<std::unique_ptr<SharedWords>> words = SharedWords::Open(
        exported->words, static_cast<size_t>(world_size_), deadline);
    if (!words.ok()) return words.status();
    absl::StatusOr<std::shared_ptr<PinnedWords>> made =
        PinnedWords::Pin(device_, *std::move(words));
    if (!made.ok()) return made.status();
    pinned = *std::move(made);
  }
  word = pinned->on_device() + words_.rank;
  written_.push_back(std::move(pinned));
  return absl::OkStatus();
}

absl::Status CudaFence::Connect(Peers peers,
                                absl::Span<const std::string> exported,
                                Deadline deadline) {
  const ScopedDevice current(device_);
  const auto world = static_cast<size_t>(world_size_);
  mapped_.clear();
  written_.clear();
  std::vector<uint64_t*> there(world);
  for (size_t i = 0; i < peers.size(); ++i) {
    const absl::Status mapped = MapPeer(peers[i], exported[i], there, deadline);
    if (mapped.ok()) continue;
    return absl::Status(mapped.code(), absl::StrCat("fence of rank ", peers[i],
                                                    ": ", mapped.message()));
  }
  std::vector<uint64_t*> here(world);
  for (size_t peer = 0; peer < world; ++peer) {
    here[peer] = reinterpret_cast<uint64_t*>(memory_->data()) + peer;
    if (shown_ == nullptr) continue;
    here[peer] = shown_->on_device() + peer;
    pairs_[peer] = {.awaits = first_,
                    .signals = first_,
                    .arrived = here[peer],
                    .word = there[peer]};
  }
  const std::vector<uint64_t> counters(3 * world, first_);
  absl::Status status;
  const auto copy = [&](const void* address, const auto& from) {
    status.Update(CudaStatus(
        cudaMemcpy(const_cast<void*>(address), from.data(),
                   from.size() * sizeof(from[0]), cudaMemcpyHostToDevice),
        "cudaMemcpy"));
  };
  copy(memory_->data(), counters);
  copy(words_.arrived, here);
  copy(words_.peers, there);
  copy(words_.aborted, std::vector<uint32_t>{0});
  status.Update(CudaStatus(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
  *host_position_ = 0;
  std::fill_n(host_abort_, world + 1, 0);
  was_captured_ = false;
  const std::lock_guard lock(mutex_);
  awaits_ = 0;
  awaiting_.clear();
  return status;
}

absl::Status CudaFence::LaunchAll(Launch launch, Peers peers, void* stream,
                                  const char* what) {
  const ScopedDevice current(device_);
  while (!peers.empty()) {
    cuda::FencePeers some;
    some.count = static_cast<int32_t>(
        std::min<size_t>(peers.size(), cuda::kFencePeersMax));
    std::copy_n(peers.begin(), some.count, some.peers);
    absl::Status status = CudaStatus(
        launch(words_, some, static_cast<cudaStream_t>(stream)), what);
    if (!status.ok()) return status;
    peers.remove_prefix(static_cast<size_t>(some.count));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> CudaFence::NoteCapture(void* stream) {
  const absl::StatusOr<bool> capturing = owner_.IsCapturing(stream);
  if (capturing.ok()) was_captured_ |= *capturing;
  return capturing;
}

// What the stream stored before comes before it, for all of the system.
absl::Status CudaFence::Store(void* stream, uint64_t* word, uint64_t value) {
  return DriverStatus(write_word_(stream, reinterpret_cast<uint64_t>(word),
                                  value, /*CU_STREAM_WRITE_VALUE_DEFAULT=*/0),
                      "cuStreamWriteValue64");
}

absl::Status CudaFence::StoreHalf(void* stream, uint32_t* half,
                                  uint32_t value) {
  return DriverStatus(write_half_(stream, reinterpret_cast<uint64_t>(half),
                                  value, /*CU_STREAM_WRITE_VALUE_DEFAULT=*/0),
                      "cuStreamWriteValue32");
}

// As the signal kernel does. The device's own counts stay right, for kernels of
// later captures.
absl::Status CudaFence::SignalByStores(int32_t peer, void* stream) {
  Pair& pair = pairs_[static_cast<size_t>(peer)];
  const uint64_t count = ++pair.signals;
  const auto lower = static_cast<uint32_t>(count);
  absl::Status status = Store(stream, &words_.sent[peer], count);
  status.Update(StoreHalf(stream, LowerHalf(pair.word), lower));
  if (lower == 0) {
    status.Update(StoreHalf(stream, UpperHalf(pair.word),
                            static_cast<uint32_t>(count >> 32)));
  }
  return status;
}

// Once there was a capture, the value may be too low, never too high: the
// kernel that follows then waits for the right one.
absl::Status CudaFence::AwaitWord(int32_t peer, void* stream) {
  Pair& pair = pairs_[static_cast<size_t>(peer)];
  const uint64_t wanted = ++pair.awaits;
  uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    const uint64_t position = __atomic_load_n(host_position_, __ATOMIC_SEQ_CST);
    while (!awaiting_.empty() && 2 * awaiting_.front().number <= position) {
      awaiting_.pop_front();
    }
    number = ++awaits_;
    awaiting_.push_back({.number = number, .peer = peer});
  }
  // Odd while the stream waits.
  absl::Status status = Store(stream, position_, 2 * number - 1);
  status.Update(DriverStatus(
      wait_word_(stream, reinterpret_cast<uint64_t>(pair.arrived), wanted,
                 /*CU_STREAM_WAIT_VALUE_GEQ=*/0),
      "cuStreamWaitValue64"));
  status.Update(Store(stream, position_, 2 * number));
  if (!was_captured_) {
    status.Update(Store(stream, &words_.taken[peer], wanted));
  }
  return status;
}

absl::Status CudaFence::Signal(Peers peers, void* stream) {
  constexpr char kWhat[] = "launch of the signal kernel";
  if (shown_ == nullptr) {
    return LaunchAll(cuda::LaunchSignal, peers, stream, kWhat);
  }
  const absl::StatusOr<bool> capturing = NoteCapture(stream);
  if (!capturing.ok()) return capturing.status();
  if (was_captured_) {
    return LaunchAll(cuda::LaunchSignal, peers, stream, kWhat);
  }
  const ScopedDevice current(device_);
  absl::Status status;
  for (const int32_t peer : peers) status.Update(SignalByStores(peer, stream));
  return status;
}

absl::Status CudaFence::Await(Peers peers, void* stream) {
  constexpr char kWhat[] = "launch of the await kernel";
  if (shown_ == nullptr) {
    return LaunchAll(cuda::LaunchAwait, peers, stream, kWhat);
  }
  const absl::StatusOr<bool> capturing = NoteCapture(stream);
  if (!capturing.ok()) return capturing.status();
  if (*capturing) return LaunchAll(cuda::LaunchAwait, peers, stream, kWhat);
  const ScopedDevice current(device_);
  absl::Status status;
  for (const int32_t peer : peers) status.Update(AwaitWord(peer, stream));
  if (!status.ok() || !was_captured_) return status;
  return LaunchAll(cuda::LaunchAwait, peers, stream, kWhat);
}

absl::Status CudaFence::ObserveAbort(void* stream) {
  const ScopedDevice current(device_);
  return CudaStatus(
      cuda::LaunchObserveAbort(words_, static_cast<cudaStream_t>(stream)),
      "launch of the kernel that observes aborts");
}

// By the CPU alone. What follows a wait observes `abort`, which is stored
// first.
void CudaFence::Abort() {
  __atomic_store_n(host_abort_, 1, __ATOMIC_SEQ_CST);
  if (shown_ == nullptr) return;
  for (int32_t peer = 0; peer < world_size_; ++peer) {
    __atomic_store_n(UpperHalf(shown_->words().data() + peer),
                     cuda::kReleasedHalf, __ATOMIC_SEQ_CST);
  }
}

std::vector<int32_t> CudaFence::Waiting() const {
  std::vector<int32_t> peers;
  for (int32_t peer = 0; peer < world_size_; ++peer) {
    if (__atomic_load_n(&host_waiting_[peer], __ATOMIC_SEQ_CST) != 0) {
      peers.push_back(peer);
    }
  }
  if (shown_ == nullptr) return peers;
  const std::lock_guard lock(mutex_);
  const uint64_t position = __atomic_load_n(host_position_, __ATOMIC_SEQ_CST);
  for (const Awaited& awaited : awaiting_) {
    if (2 * awaited.number - 1 == position) peers.push_back(awaited.peer);
  }
  std::sort(peers.begin(), peers.end());
  return peers;
}

}  // namespace refit
